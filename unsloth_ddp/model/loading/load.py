"""Load the model to train and its tokenizer, by method and backend.

The backend is Unsloth on an accelerator, and Transformers + PEFT elsewhere. Settings have the same meaning in both: the
dtype of the base weights, the modules with an adapter, the kind of gradient checkpointing.
"""

import contextlib
import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.chat.template import check_chat_template, set_chat_template
from unsloth_ddp.distributed.precision import AMPERE, check_full_weights
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.sharding import loads_in_shards
from unsloth_ddp.model.adapter.experts import full_shape, stacked_experts
from unsloth_ddp.model.adapter.lora import adapter_options, check_module_names, lora_config
from unsloth_ddp.model.adapter.weights import load_weights
from unsloth_ddp.model.files.check import check_complete, check_local_model, check_source
from unsloth_ddp.model.files.find import download_model, is_folder
from unsloth_ddp.model.files.identity import check_same_files
from unsloth_ddp.model.forward.fp8 import check_fp8, use_fp8
from unsloth_ddp.model.forward.gradient_checkpointing import UNSLOTH_NAMES, kinds_here
from unsloth_ddp.model.loading.classes import check_attends_backwards, class_name, model_class, read_config
from unsloth_ddp.model.modules import DTYPES, name_present_layers, without_kernels
from unsloth_ddp.model.parts import freeze_beside_text, parts_beside_text
from unsloth_ddp.model.towers import trained_beside
from unsloth_ddp.utils.errors import UserError, panics_raised
from unsloth_ddp.utils.files.opened import recording
from unsloth_ddp.utils.known_errors import find_known_error, without_address


def check_model(settings: Settings, runtime: Runtime) -> None:
    """Refuse settings that this machine or backend cannot load, before anything is loaded."""
    check_local_model(str(settings.model), safetensors_only=settings.use_safetensors)
    runtime.on_main(lambda: check_source(settings, runtime.decided_backend, runtime.sharding))
    if settings.method == "qlora" and runtime.device_type == "cpu":
        raise UserError("method qlora needs a GPU for its 4-bit kernels, and this run uses none; use --method lora.")
    if settings.method == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("method qlora needs bitsandbytes, which is not installed here; use --method lora.")
    check_full_weights(settings.method, settings.full_weights, runtime.precision)
    check_fp8(settings, runtime)
    kernel = settings.attn_implementation
    if runtime.device_type == "cuda" and kernel and "flash" in kernel and torch.cuda.get_device_capability() < AMPERE:
        raise UserError(
            f"attn_implementation {kernel} needs compute capability 8.0, which {runtime.device_name} does not have; "
            "use sdpa."
        )
    check_chat_template(settings.chat_template)
    if settings.gradient_checkpointing == "unsloth" and runtime.backend == "transformers":
        raise UserError(
            "gradient_checkpointing unsloth needs the unsloth backend, and this run uses transformers; use torch."
        )


def load_model(settings: Settings, runtime: Runtime, adapter: Path | None = None) -> tuple[Any, Any]:
    """Return the model, on this process's device and ready for a trainer, and its tokenizer.

    Args:
        adapter: folder of a trained adapter, which takes the place of a new one (transformers backend).

    Raises:
        UserError: the model cannot be found or loaded.
    """
    if runtime.device_type == "cpu":
        runtime.cleanup.enter_context(without_kernels())
    runtime.on_main(lambda: check_class(settings))
    download_model(settings, runtime)
    in_shards = loads_in_shards(runtime.sharding, runtime.backend)
    # No rank sends the frozen weights to the others, and with FSDP2 none at all. Of a Hub id every node has the same
    # commit, and Unsloth may load another repository than it names.
    read_by_ranks = runtime.ranks.nodes > 1 or runtime.sharding == "fsdp2"
    if in_shards or (read_by_ranks and runtime.broadcast_from_main(lambda: is_folder(settings))):
        check_same_files(settings, runtime)
    if not in_shards:
        return _load(settings, runtime, adapter=adapter)
    from unsloth_ddp.model.loading.sharded_load import shard_mesh

    # Creating the mesh is a collective, so it happens outside on_every_rank, where a rank may fail.
    mesh = shard_mesh(runtime)
    return runtime.on_every_rank(lambda: _load(settings, runtime, mesh, adapter))


def check_class(settings: Settings) -> None:
    """Refuse a model that is no causal language model, by its config.json; before its weights are downloaded."""
    try:
        config = read_config(settings)
    except Exception as error:
        if isinstance(error, UserError) or not is_model_file_error(error):
            raise
        return  # loading the model tells it
    model_class(config, settings)


@recording()
def _load(
    settings: Settings, runtime: Runtime, mesh: DeviceMesh | None = None, adapter: Path | None = None
) -> tuple[Any, Any]:
    """Load model and tokenizer, without collectives.

    Args:
        mesh: over which the weights are sharded while loading; None loads the whole model.
    """
    try:
        with panics_raised():
            if runtime.backend == "unsloth":
                model, tokenizer = _load_unsloth(settings, runtime)
            else:
                model, tokenizer = _load_transformers(settings, runtime, mesh, adapter)
    except Exception as error:
        if isinstance(error, UserError) or not is_model_file_error(error):
            raise
        raise _not_loaded(settings, error) from error
    _complete_tokenizer(settings, tokenizer)
    if tokenizer.pad_token_id >= full_shape(model.get_input_embeddings().weight)[0]:
        # Padding is masked, so any token with a row serves.
        print(
            f"Rows are padded with {tokenizer.eos_token}, as the model has no row for {tokenizer.pad_token}.",
            flush=True,
        )
        tokenizer.pad_token = tokenizer.eos_token
    model.config.use_cache = False
    if is_folder(settings):
        # A relative path, as adapter_config.json would have it, leads to the model from this working folder only.
        for config in getattr(model, "peft_config", {}).values():
            config.base_model_name_or_path = str(Path(str(settings.model)).expanduser().resolve())
    beside = trained_beside(model, settings.train_towers)
    if settings.method == "full":
        freeze_beside_text(model, beside)
    return model, tokenizer


@recording()
def load_tokenizer(settings: Settings) -> Any:
    """Return the same tokenizer as `load_model`, without the model.

    Raises:
        UserError: the tokenizer cannot be found or loaded.
    """
    import transformers

    try:
        with panics_raised():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                settings.model, revision=settings.model_revision, trust_remote_code=settings.trust_remote_code
            )
    except Exception as error:
        if not is_model_file_error(error):
            raise
        raise _not_loaded(settings, error, ": its tokenizer") from None
    _complete_tokenizer(settings, tokenizer)
    return tokenizer


def _not_loaded(settings: Settings, error: Exception, part: str = "") -> UserError:
    # A name may be a Hub id or a mistyped path, such as outputs/RUM.
    if not Path(str(settings.model)).exists():
        part = " is not a folder here, and as a Hub id it"
    return UserError(f"model {settings.model}{part} cannot be loaded: {describe_load_error(error)}")


def is_model_file_error(error: Exception) -> bool:
    """Return whether loading failed because of the model's files, and not because of the machine.

    Broken files raise exceptions of many classes. A RuntimeError comes from devices, memory or other ranks, except for
    the messages and subclasses checked here.
    """
    if isinstance(error, RuntimeError):
        sizes = any(words in str(error) for words in ("ignore_mismatched_sizes", "negative dimension"))
        return sizes or isinstance(error, (RecursionError, NotImplementedError))
    return not isinstance(error, (MemoryError, AssertionError))


# Errors whose message names no way out.
EXPLAINED = ("no network", "flash-attn", "remote code")


def describe_load_error(error: Exception) -> str:
    """Return the library's message, with the class of errors whose message alone says little, such as KeyError."""
    text = without_address(error)
    if "ignore_mismatched_sizes" in text:
        return "the sizes of its weights differ from its config.json; download it again, or correct config.json."
    named = f"{type(error).__name__}: {text}"
    message = text if isinstance(error, (OSError, ValueError)) else named
    if (known_error := find_known_error(named)) and known_error.name in EXPLAINED:
        return f"{message} What helps: {known_error.fix}"
    # These are written for people. Others come from values that no library has checked.
    if isinstance(error, (OSError, ValueError, ImportError)):
        return message
    return f"{message.rstrip('.')}; correct the model's files, or download it again."


def _complete_tokenizer(settings: Settings, tokenizer: Any) -> None:
    set_chat_template(tokenizer, settings.chat_template)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"model {settings.model}: its tokenizer has no EOS token, so rows would have no end; set eos_token in "
            "tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token


def _load_unsloth(settings: Settings, runtime: Runtime) -> tuple[Any, Any]:
    from unsloth import FastLanguageModel

    checkpointing = UNSLOTH_NAMES[kinds_here(runtime, settings)[0]]
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=str(settings.model),
        revision=settings.model_revision,
        max_seq_length=settings.max_length,
        dtype=DTYPES[runtime.precision],
        load_in_4bit=settings.method == "qlora",
        full_finetuning=settings.method == "full",
        float32_mixed_precision=settings.full_weights == "fp32" if settings.method == "full" else None,
        use_gradient_checkpointing=checkpointing,
        # An automatic device map would put every rank's model on the first GPU, or spread one model over all GPUs.
        device_map=runtime.device_map,
        # DDP averages gradients on the GPU, so the embedding must not stay in host memory.
        offload_embedding=False,
        trust_remote_code=settings.trust_remote_code,
        use_safetensors=safetensors_only(settings),
    )
    _check_class_of_unsloth(settings, model)
    name_present_layers(model)
    if settings.method == "qlora" and settings.fp8:
        # As with Transformers below.
        model = model.dequantize()
    if settings.method != "full":
        check_module_names(settings, model)
        # For models without its kernels, Unsloth would take paths for leaf names unless every part may be adapted.
        parts = {"finetune_vision_layers": True} if os.environ.get("UNSLOTH_USE_NEW_MODEL") == "1" else {}
        options = adapter_options(settings, model) | parts
        if options["target_parameters"] is None and stacked_experts(model):
            # With None, Unsloth would choose experts of an MoE model itself.
            options["target_parameters"] = []
        model = FastLanguageModel.get_peft_model(
            model, **options, bias="none", use_gradient_checkpointing=checkpointing, random_state=settings.seed
        )
    if runtime.precision == "fp32":
        # Unsloth's trainer enables bf16 autocast for fp32 weights unless the model has this attribute.
        model._unsloth_forced_float32 = True
    if settings.fp8:
        use_fp8(model)
    return model, getattr(tokenizer, "tokenizer", tokenizer)


def _check_class_of_unsloth(settings: Settings, model: Any) -> None:
    """Refuse another class than the transformers backend loads, as names of weights would differ."""
    expected = class_name(model.config, settings)
    if type(model).__name__ != expected and not settings.trust_remote_code:
        raise UserError(
            f"Unsloth loads model {settings.model} as {type(model).__name__}, and its config.json names {expected}; "
            "use --backend transformers."
        )


def _unquantized_modules(settings: Settings) -> list[str] | None:
    """Return the modules that QLoRA leaves in 16 bit, towers too as with Unsloth; None for Transformers' choice."""
    from transformers.quantizers.base import get_keys_to_not_convert

    config = read_config(settings)
    if config.get_text_config() is config:
        return None
    with torch.device("meta"):
        model = model_class(config, settings).from_config(config, trust_remote_code=settings.trust_remote_code)
    return [*get_keys_to_not_convert(model), *parts_beside_text(model)]


def _load_transformers(
    settings: Settings, runtime: Runtime, mesh: DeviceMesh | None, trained: Path | None
) -> tuple[Any, Any]:
    import transformers
    from peft import PeftConfig, get_peft_model

    from unsloth_ddp.model.loading import sharded_load, shards

    transformers.utils.logging.disable_progress_bar()
    source: dict[str, Any] = {"revision": settings.model_revision, "trust_remote_code": settings.trust_remote_code}
    # Before the tokenizer, whose class reads it too.
    auto = model_class(read_config(settings), settings)
    tokenizer = load_tokenizer(settings)
    quantization = None
    if settings.method == "qlora":
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=DTYPES[runtime.precision],
            # FSDP2 shards floating-point tensors only, so the packed 4-bit weights are stored in such a dtype.
            bnb_4bit_quant_storage=DTYPES[runtime.precision] if runtime.sharding == "fsdp2" else torch.uint8,
            llm_int8_skip_modules=_unquantized_modules(settings),
        )
    with contextlib.nullcontext() if mesh is None else sharded_load.reading_shards(mesh, str(settings.model)):
        loaded: Any = auto.from_pretrained(
            str(settings.model),
            dtype=DTYPES[settings.full_weights if settings.method == "full" else runtime.precision],
            device_map=runtime.device_map,
            quantization_config=quantization,
            attn_implementation=settings.attn_implementation,
            use_safetensors=safetensors_only(settings),
            output_loading_info=True,
            **source,
        )
    model, loading = loaded
    name_present_layers(model)
    # The check fails with ZeRO-3, where every rank loads a part, and with 4-bit layers, which have extra tensors.
    if runtime.sharding != "zero3" and quantization is None:
        check_complete(str(settings.model), list(loading["missing_keys"]), list(loading["mismatched_keys"]))
        if mesh is None:
            check_attends_backwards(settings, model)
    if quantization is not None and settings.fp8:
        # use_fp8 rounds what 4 bits hold.
        model, quantization = model.dequantize(), None
    checkpointing = kinds_here(runtime, settings)[0] != "none"
    if quantization is not None:
        # PEFT's function would convert embedding, norms and output head to fp32, and activations with them; Unsloth
        # leaves them in 16 bit. It would also take packed shards for 16-bit weights.
        model.requires_grad_(requires_grad=False)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings.method != "full" or trained:
        check_module_names(settings, model)
        torch.manual_seed(settings.seed)
        # ZeRO-3 gathers small weights into buffers of one dtype, so with it adapters keep the dtype of the base model
        # (DeepSpeed issue 8072); its optimizer holds fp32 copies of them.
        with shards.copied_with_modules():
            adapter = PeftConfig.from_pretrained(str(trained)) if trained else lora_config(settings, model, tokenizer)
            adapter.inference_mode = False
            model = get_peft_model(model, adapter, autocast_adapter_dtype=runtime.sharding != "zero3")
        if trained:
            load_weights(model, trained, str(settings.model))
    if settings.fp8:
        use_fp8(model)
    if mesh is not None:
        model = sharded_load.wrap(model, mesh, runtime.precision, quantized=quantization is not None)
    return model, tokenizer


def safetensors_only(settings: Settings) -> bool | None:
    """Return use_safetensors for from_pretrained: False would refuse safetensors, and None accepts either format."""
    return True if settings.use_safetensors else None


def eos_tokens(config: Any) -> list[int]:
    """Return the tokens at which a generation config stops."""
    eos_ids = config.eos_token_id
    return eos_ids if isinstance(eos_ids, list) else [] if eos_ids is None else [eos_ids]


def stop_at(model: Any, stop_tokens: Sequence[int]) -> list[int]:
    """Make generation stop at `stop_tokens` too, which end the supervised answers; return the newly added tokens."""
    stops = eos_tokens(model.generation_config)
    if added := [token for token in stop_tokens if token not in stops]:
        model.generation_config.eos_token_id = [*stops, *added]
    return added


def check_positions(settings: Settings, model: Any, longest: int) -> None:
    """Refuse rows longer than the model's position embeddings; warn if positions are computed (RoPE)."""
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if not positions or longest <= positions:
        return
    # Copies of the token embedding in an adapter are left out: they may have as many entries as there are positions.
    tokens = set(model.get_input_embeddings().modules())
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding) and module not in tokens]
    # Some position embeddings (OPT) have an offset and are longer by it.
    if any(positions <= table.num_embeddings < positions + 8 for table in tables):
        raise UserError(
            f"Rows of up to {longest:,} tokens are longer than the {positions:,} positions of model {settings.model}; "
            f"use --max_length {positions}, which truncates them (with --overlong drop: leaves them out), or a model "
            "with more positions."
        )
    if getattr(config, "rope_parameters", None):
        print(
            f"Rows of up to {longest:,} tokens are longer than the {positions:,} positions that model {settings.model} "
            f"was trained for; use --max_length {positions}, or set rope_parameters in its config.json to a scaling "
            "for longer rows."
        )


def parameter_counts(model: torch.nn.Module) -> tuple[int, int]:
    """Return (all, trainable) parameters; a packed 4-bit weight counts as its original number of values."""
    counts = [(math.prod(full_shape(parameter)), parameter.requires_grad) for parameter in model.parameters()]
    return sum(count for count, _ in counts), sum(count for count, is_trained in counts if is_trained)
