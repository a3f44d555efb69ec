"""load_model(): the model that will be trained and its tokenizer, by method and backend.

Unsloth where there is an accelerator, Transformers + PEFT elsewhere. The same settings mean the same in both: what
the base weights are kept in, which modules get an adapter, what is recomputed.
"""

from __future__ import annotations

import difflib
import gc
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unsloth_ddp.config.parse import Settings
from unsloth_ddp.data.chat_template import check_chat_template, set_chat_template
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.files_check import check_complete, check_local_model
from unsloth_ddp.model.gradient_checkpointing import UNSLOTH_NAMES, loaded_with
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.known_errors import find

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def check_model(settings: Settings, runtime: Runtime) -> None:
    """Refuse what cannot be loaded here, before anything is.

    Raises:
        UserError: a folder without a config.json, or a method or option that this machine or backend does not have.
    """
    check_local_model(str(settings.model), safetensors_only=settings.use_safetensors)
    if settings.method == "qlora" and runtime.device_type == "cpu":
        raise UserError("method qlora needs a GPU for its 4-bit kernels and none is used here; use --method lora.")
    if settings.method == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("method qlora needs bitsandbytes, which is not installed here; use --method lora.")
    check_chat_template(settings.chat_template)
    if runtime.backend == "transformers" and settings.gradient_checkpointing == "unsloth":
        raise UserError("gradient_checkpointing unsloth needs the unsloth backend, which is not used here; use torch.")


def load_model(settings: Settings, runtime: Runtime) -> tuple[Any, Any]:
    """The model, on this process's device and ready for a trainer, and its tokenizer.

    Raises:
        UserError: the model cannot be found or loaded.
    """
    try:
        load = _load_unsloth if runtime.backend == "unsloth" else _load_transformers
        model, tokenizer = load(settings, runtime)
    except Exception as error:
        if isinstance(error, UserError) or not is_about_the_files(error):
            raise
        raise UserError(f"model {settings.model} cannot be loaded: {loading_failure(error)}") from error
    _complete_tokenizer(settings, tokenizer)
    model.config.use_cache = False
    return model, tokenizer


def load_tokenizer(settings: Settings) -> Any:
    """The tokenizer alone, as `load_model` gives it.

    Raises:
        UserError: it cannot be found or loaded.
    """
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            settings.model, revision=settings.model_revision, trust_remote_code=settings.trust_remote_code
        )
    except Exception as error:
        if not is_about_the_files(error):
            raise
        raise UserError(f"model {settings.model}: no tokenizer can be loaded: {loading_failure(error)}") from None
    _complete_tokenizer(settings, tokenizer)
    return tokenizer


def is_about_the_files(error: Exception) -> bool:
    """Whether loading failed over what the model's files hold, which any exception may say, and not over the machine.

    RuntimeErrors come from devices, memory and other ranks, but for a few.
    """
    if isinstance(error, RuntimeError):
        sizes = any(words in str(error) for words in ("ignore_mismatched_sizes", "negative dimension"))
        return sizes or isinstance(error, (RecursionError, NotImplementedError))
    return not isinstance(error, (MemoryError, AssertionError))


def loading_failure(error: Exception) -> str:
    """What the library says; by itself the text of a KeyError or TypeError says little."""
    text = " ".join(str(error).split())
    if "ignore_mismatched_sizes" in text:
        return "its weights have other sizes than its config.json says; download it again, or mend config.json."
    said = text if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {text}"
    row = find(f"{type(error).__name__}: {text}")
    return f"{said} What helps: {row.fix}" if row and row.name == "no network" else said


def _complete_tokenizer(settings: Settings, tokenizer: Any) -> None:
    set_chat_template(tokenizer, settings.chat_template)
    if tokenizer.eos_token_id is None:
        raise UserError(f"model {settings.model}: its tokenizer has no EOS token, so no row could end; set one.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token


def weights_dtype(settings: Settings, runtime: Runtime) -> torch.dtype:
    """What the base weights are kept in: the compute precision, but fp32 master weights where they are trained."""
    if settings.method == "full":
        return DTYPES[settings.full_weights]
    return DTYPES[runtime.precision]


def _load_unsloth(settings: Settings, runtime: Runtime) -> tuple[Any, Any]:
    from unsloth import FastLanguageModel

    checkpointing = UNSLOTH_NAMES[loaded_with(runtime, settings)]
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(settings.model),
        revision=settings.model_revision,
        max_seq_length=settings.max_length,
        dtype=DTYPES[runtime.precision],
        load_in_4bit=settings.method == "qlora",
        full_finetuning=settings.method == "full",
        float32_mixed_precision=settings.full_weights == "fp32" if settings.method == "full" else None,
        use_gradient_checkpointing=checkpointing,
        # Automatic maps put every rank's model on the first GPU, or spread one model over all of them.
        device_map=runtime.device_map,
        # An embedding in host memory is not on the device whose gradients DDP averages.
        offload_embedding=False,
        trust_remote_code=settings.trust_remote_code,
        use_safetensors=safetensors_only(settings),
    )
    if settings.method != "full":
        check_module_names(settings, model)
        model = FastLanguageModel.get_peft_model(
            model,
            r=settings.lora_r,
            lora_alpha=settings.lora_alpha,
            lora_dropout=settings.lora_dropout,
            target_modules=_target_modules(settings, model),
            modules_to_save=settings.lora_modules_to_save or None,
            use_rslora=settings.use_rslora,
            bias="none",
            use_gradient_checkpointing=checkpointing,
            random_state=settings.seed,
        )
    if runtime.precision == "fp32":
        # Unsloth's trainer turns bf16 on for fp32 weights unless the model carries this mark of its own.
        model._unsloth_forced_float32 = True
    return model, getattr(tokenizer, "tokenizer", tokenizer)


def _target_modules(settings: Settings, model: torch.nn.Module) -> list[str]:
    """The names to adapt; all-linear stands for every linear layer but the output head, as in PEFT."""
    if settings.lora_target_modules != ["all-linear"]:
        return settings.lora_target_modules
    head = model.get_output_embeddings()  # type: ignore[operator]
    linear = (n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head)
    return sorted({name.rpartition(".")[2] for name in linear})


def check_module_names(settings: Settings, model: torch.nn.Module) -> None:
    """Refuse a name that is no module's: PEFT takes the others and says nothing. A name is a module's last part or more.

    Raises:
        UserError: naming the one that is near.
    """
    modules = [f".{name}" for name, _ in model.named_modules()]
    for option in ("lora_target_modules", "lora_modules_to_save"):
        given = getattr(settings, option)
        if option == "lora_target_modules" and given == ["all-linear"]:
            continue
        for name in given:
            if not any(module.endswith(f".{name}") for module in modules):
                raise UserError(f"{option} {name[:100]} is no module of {settings.model}; {_instead(name, model)}")


def _instead(name: str, model: torch.nn.Module) -> str:
    """The end of a sentence that refuses the name of a module."""
    if "," in name:
        return f"separate names by spaces ({' '.join(name.replace(',', ' ').split())[:100]})."
    if name == "all-linear":
        return "all-linear stands alone, in lora_target_modules."
    with_weights = sorted({path.split(".")[-2] for path, _ in model.named_parameters() if "." in path})
    near = difflib.get_close_matches(name[:100], with_weights, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"it has {', '.join(with_weights[:20])}."


def _load_transformers(settings: Settings, runtime: Runtime) -> tuple[Any, Any]:
    import transformers
    from peft import get_peft_model, prepare_model_for_kbit_training

    transformers.utils.logging.disable_progress_bar()
    source: dict[str, Any] = {"revision": settings.model_revision, "trust_remote_code": settings.trust_remote_code}
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model, **source)
    quantization = None
    if settings.method == "qlora":
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=DTYPES[runtime.precision],
            # FSDP2 shares out floating-point tensors only, so the packed bytes have to look like some.
            bnb_4bit_quant_storage=DTYPES[runtime.precision] if runtime.sharding == "fsdp2" else torch.uint8,
        )
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(settings.model),
        dtype=weights_dtype(settings, runtime),
        device_map=runtime.device_map,
        quantization_config=quantization,
        attn_implementation=settings.attn_implementation,
        use_safetensors=safetensors_only(settings),
        output_loading_info=True,
        **source,
    )
    model, loading = loaded
    # With ZeRO-3 every rank loads parts, and 4-bit layers have parts that no file holds.
    if runtime.sharding != "zero3" and quantization is None:
        check_complete(str(settings.model), list(loading["missing_keys"]), list(loading["mismatched_keys"]))
    checkpointing = loaded_with(runtime, settings) != "none"
    if quantization is not None:
        model = prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
    if settings.method != "full":
        check_module_names(settings, model)
        torch.manual_seed(settings.seed)
        # ZeRO-3 gathers small weights into buffers of one dtype, so adapters keep that of the base model there
        # (DeepSpeed issue 8072); its optimizer has fp32 copies of them.
        model = get_peft_model(model, lora_config(settings), autocast_adapter_dtype=runtime.sharding != "zero3")
    return model, tokenizer


def safetensors_only(settings: Settings) -> bool | None:
    """What from_pretrained is told: its False would refuse safetensors, its None takes what is there."""
    return True if settings.use_safetensors else None


def lora_config(settings: Settings) -> Any:
    """PEFT's description of the adapter."""
    from peft import LoraConfig

    targets = settings.lora_target_modules
    return LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        modules_to_save=settings.lora_modules_to_save or None,
        use_rslora=settings.use_rslora,
        task_type="CAUSAL_LM",
    )


def stop_at(model: Any, stop_tokens: Sequence[int]) -> None:
    """Add the tokens that end the supervised answers to those at which generation stops."""
    known = model.generation_config.eos_token_id
    stops = known if isinstance(known, list) else [] if known is None else [known]
    if added := [token for token in stop_tokens if token not in stops]:
        model.generation_config.eos_token_id = [*stops, *added]


def check_positions(settings: Settings, model: Any, longest: int) -> None:
    """Refuse rows of more tokens than a model has learned positions; where it computes them, say that it is beyond them."""
    config = model.config.get_text_config()
    known = getattr(config, "max_position_embeddings", None)
    if not known or longest <= known:
        return
    # An adapter may hold copies of the tokens' table, whose size can be that of the positions.
    tokens = set(model.get_input_embeddings().modules())
    tables = [one for one in model.modules() if isinstance(one, torch.nn.Embedding) and one not in tokens]
    # Some begin a few positions later, and have as many more.
    if any(known <= table.num_embeddings < known + 8 for table in tables):
        raise UserError(
            f"Rows of up to {longest:,} tokens are longer than the {known:,} positions of model {settings.model}; use "
            f"--max_length {known}, which truncates them (with --overlong drop: leaves them out), or a model that has more."
        )
    if getattr(config, "rope_parameters", None):
        print(
            f"Rows of up to {longest:,} tokens are longer than the {known:,} that model {settings.model} was made for; "
            f"use --max_length {known}, or set rope_parameters in its config.json to a scaling that it can be trained with."
        )


def parameter_counts(model: torch.nn.Module) -> tuple[int, int]:
    """(all, trainable) parameters; packed 4-bit weights count as the numbers they hold, not their bytes."""
    total = trainable = 0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        # ZeRO-3 leaves an empty tensor and its true count beside it.
        count = state.shape.numel() if state is not None else getattr(parameter, "ds_numel", parameter.numel())
        total += count
        trainable += count if parameter.requires_grad else 0
    return total, trainable


def save_merged(settings: Settings, adapter: Path, target: Path, stop_tokens: Sequence[int]) -> None:
    """Fold the adapter at `adapter` into its base model and write the whole model, in 16 bit, to `target`.

    Generation with the written model stops at the base model's EOS and at `stop_tokens`.

    The base is loaded again on the CPU, in 16 bit: merging into 4-bit weights would round the adapter away.
    """
    import transformers
    from peft import PeftModel

    base: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(settings.model),
        revision=settings.model_revision,
        trust_remote_code=settings.trust_remote_code,
        use_safetensors=safetensors_only(settings),
        dtype=torch.bfloat16,
        device_map={"": "cpu"},
    )
    if getattr(base, "quantization_method", None) is not None or "quantization_config" in base.config.to_dict():
        base = base.dequantize()
    merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    merged.config.use_cache = True
    stop_at(merged, stop_tokens)
    merged.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(adapter).save_pretrained(target)
    del base, merged
    gc.collect()
