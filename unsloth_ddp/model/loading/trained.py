"""Load the adapter or model that a run has trained, to generate with it.

The base model is loaded as for training, so revision, quantization and data types are those of the run; the trained
adapter's weights then replace those of the new one.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.chat.tokenize import Encoder
from unsloth_ddp.data.sources.formats import Example
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.adapter.weights import load_weights
from unsloth_ddp.model.files.check import check_adapter_file, check_local_model
from unsloth_ddp.model.files.find import in_folder
from unsloth_ddp.model.loading.load import load_model, load_tokenizer
from unsloth_ddp.utils.errors import UserError


def check_trust(settings: Settings, *, trusted: bool) -> None:
    """Refuse to run the Python code of a run's base model without a new --trust_remote_code.

    The run's folder, and so its settings, may come from someone else.
    """
    if settings.trust_remote_code and not trusted:
        raise UserError(
            f"The run was trained with --trust_remote_code, so loading it runs Python code of {settings.model}; add "
            "--trust_remote_code if you trust that model and the run's folder."
        )


def check_trained(settings: Settings, trained: Path) -> None:
    """Refuse a base model, an adapter or a trained model with missing or damaged files; nothing is loaded."""
    if settings.method == "full":
        check_local_model(str(trained), safetensors_only=True)
        return
    try:
        check_local_model(str(settings.model), safetensors_only=settings.use_safetensors)
    except UserError as error:
        raise UserError(
            f"The base model of {trained} cannot be read: {error} If it was moved, change model in the run's "
            "settings.yaml."
        ) from None
    check_adapter_file(trained)


def load_trained(settings: Settings, trained: Path, runtime: Runtime) -> Any:
    """Return the trained model on this process's device, ready to generate.

    Raises:
        UserError: the model needs a GPU and there is none, or it cannot be loaded.
    """
    check_trained(settings, trained)
    if settings.method == "full":
        return load_base(in_folder(settings, trained), runtime)
    if settings.method == "qlora" and runtime.device_type == "cpu":
        raise UserError(
            "method qlora needs a GPU for its 4-bit kernels, and none is used here; use a machine with a GPU, or "
            "export the run with --to merged and load that model."
        )
    model = _load(settings, runtime)
    load_weights(model, trained, str(settings.model))
    return _ready(model, runtime)


def load_base(settings: Settings, runtime: Runtime) -> Any:
    """Return the base model of a run with --method full, ready to generate.

    Raises:
        UserError: it cannot be loaded.
    """
    return _ready(_load(settings, runtime), runtime)


def _load(settings: Settings, runtime: Runtime) -> Any:
    """Return the model of `settings` as for training: with a new adapter unless the method is full."""
    weights: Literal["fp32", "bf16"] = "fp32" if runtime.precision == "fp32" else "bf16"
    # The run's folder has the tokenizer with its template, so the template's file may be gone.
    # Generation uses the 16-bit weights, not those of --fp8. The run's attention kernel may need a GPU.
    attention = None if runtime.device_type == "cpu" else settings.attn_implementation
    changed: dict[str, Any] = {"fp8": False, "attn_implementation": attention, "full_weights": weights}
    settings = dataclasses.replace(settings, gradient_checkpointing="none", chat_template=None, **changed)
    return load_model(settings, runtime)[0]


def _ready(model: Any, runtime: Runtime) -> Any:
    model.config.use_cache = True
    if runtime.backend == "unsloth":
        from unsloth import FastLanguageModel

        FastLanguageModel.for_inference(model=model)
    return model.eval()


def load_trained_tokenizer(settings: Settings, trained: Path) -> Any:
    """Return the tokenizer that the run saved, with the chat template that it trained with.

    Raises:
        UserError: it cannot be loaded.
    """
    return load_tokenizer(dataclasses.replace(in_folder(settings, trained), chat_template=None))


def stop_tokens(settings: Settings, tokenizer: Any) -> list[int]:
    """Return the tokens that end the supervised answers of a run, at which generation has to stop."""
    if tokenizer.chat_template is None:
        return [tokenizer.eos_token_id]
    chat = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]
    encoder = Encoder(tokenizer, supervise_all=settings.loss_on == "all", chat_template=settings.chat_template)
    return encoder.encode(Example(chat)).stop_tokens or [tokenizer.eos_token_id]
