"""Export a run with an adapter as a whole 16-bit model, and ask that model a question."""

import shutil
from pathlib import Path

from safetensors import SafetensorError

from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.checkpoints.shards import WEIGHTS, MissingTensor, Shards
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.messages import Message
from unsloth_ddp.export.folder import whole_or_absent
from unsloth_ddp.model.adapter.merge import save_merged
from unsloth_ddp.model.adapter.merge_check import check_merged
from unsloth_ddp.model.files.find import in_folder
from unsloth_ddp.model.files.stored_weights import empty_model, keep_what_is_not_modelled, load_on_cpu
from unsloth_ddp.model.files.whole_weights import saved_tensors, write_model
from unsloth_ddp.model.loading.load import describe_load_error, is_model_file_error
from unsloth_ddp.model.loading.trained import load_trained_tokenizer, stop_tokens
from unsloth_ddp.run.result import RunResult
from unsloth_ddp.utils.errors import UserError

# With which a merged model is compared with its adapter.
QUESTION = "Hello! Who are you, and what can you tell me about the weather in spring?"
# Of the answer to the question that an export is asked, in tokens.
ANSWER_LENGTH = 64


def write_merged(result: RunResult, target: Path) -> None:
    """Merge the run's adapter into its base model, in bf16 on the CPU, and write the whole model to `target`.

    Of a checkpoint in shards the model is put together instead, in the precision that it has there.

    Raises:
        UserError: the base model, the adapter or the shards cannot be loaded.
    """
    if result.in_shards:
        assemble(result.settings, result.folder, target)
        return
    tokenizer = load_trained_tokenizer(result.settings, result.folder)
    try:
        save_merged(result.settings, result.folder, target, stop_tokens(result.settings, tokenizer))
        texts = [QUESTION]
        if tokenizer.chat_template is not None:
            texts.append(
                tokenizer.apply_chat_template(conversation=[{"role": "user", "content": QUESTION}], tokenize=False)
            )
        rows = [tokenizer(text=text)["input_ids"] for text in texts]
        check_merged(result.settings, result.folder, target, rows)
    except Exception as error:
        # What the system refuses, as a disk that is full, is told by the folder's own handler; errors of a missing file
        # of the model have no number.
        refused = isinstance(error, SafetensorError) or getattr(error, "errno", None) is not None
        if isinstance(error, UserError) or refused or not is_model_file_error(error):
            raise
        raise UserError(f"The adapter in {result.folder} cannot be merged: {describe_load_error(error)}") from None


def export_merged(result: RunResult, target: Path, question: str, *, plain: bool) -> str:
    """Write the merged model to `target`, whole or not at all; return its answer to the question.

    Raises:
        UserError: it cannot be loaded, merged or written.
    """
    from unsloth_ddp.run.generation import GenerationOptions, generate

    settings = result.settings
    values = settings.chat_template_kwargs
    options = GenerationOptions(ANSWER_LENGTH, temperature=0, plain=plain, template_values=values)
    messages: list[Message] = [{"role": "user", "content": question}]
    with whole_or_absent(target) as aside:
        write_merged(result, aside)
        model, tokenizer = load_on_cpu(in_folder(settings, aside)), load_trained_tokenizer(settings, aside)
        return generate(model, tokenizer, messages, options, lambda piece: None)


# What a checkpoint holds for its run only; the rest of its top folder belongs to the model.
OF_THE_RUN = ("trainer_state.json", "training_args.bin", manifest.FILE_NAME, *manifest.READ_ON_RESUME)


def assemble(settings: Settings, checkpoint: Path, target: Path) -> None:
    """Write the model whose weights `checkpoint` holds in shards to `target`, which exists or is made.

    Raises:
        UserError: the shards do not hold every weight of the model.
    """
    from unsloth_ddp.checkpoints.sharded_state import named_tensors

    model = empty_model(checkpoint, settings)
    tensors = named_tensors(model)
    try:
        shards = Shards(checkpoint / WEIGHTS)
        names_by_tensor = {id(tensors[name]): name for name in shards.names if name in tensors}
        names = list(saved_tensors(model, tensors))
        if missing := [name for name in names if id(tensors[name]) not in names_by_tensor]:
            raise MissingTensor(f"{shards.folder} holds no {missing[0]}")
        target.mkdir(parents=True, exist_ok=True)
        write_model(
            model, names, lambda name: shards.whole(names_by_tensor[id(tensors[name])]), target, lambda write: write()
        )
    except MissingTensor as error:
        raise UserError(f"{checkpoint} does not hold the whole model: {error}; export another checkpoint.") from None
    for path in sorted(checkpoint.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in OF_THE_RUN):
            shutil.copyfile(path, target / path.name)
    keep_what_is_not_modelled(settings, model, target)
