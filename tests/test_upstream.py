"""List what the kit replaces or calls in other libraries beyond their public interface, and test that it is there.

An upgrade that renames one of these, or changes its arguments, fails here with the name. The sources are read as
syntax trees: nothing is imported, so that Unsloth's are covered on a machine without a GPU too.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import REPO

# The versions that the arguments below were read from.
READ_FROM = {
    "transformers": "5.17.0",
    "trl": "1.15.0",
    "accelerate": "1.15.0",
    "torch": "2.14.1",
    "unsloth": "2026.10.9",
    "unsloth_zoo": "2026.10.9",
}
TRAINER = "transformers/trainer.py:Trainer"
# Arguments of each function, * before keyword-only ones.
REPLACED = {
    # Replaced by training/saving.py: checkpoints that are complete or absent, and exact resuming.
    f"{TRAINER}._save_checkpoint": "self model trial",
    f"{TRAINER}._get_output_dir": "self trial",
    f"{TRAINER}._determine_best_metric": "self metrics trial",
    f"{TRAINER}.save_model": "self output_dir _internal_call",
    f"{TRAINER}._save": "self output_dir state_dict",
    f"{TRAINER}._save_optimizer_and_scheduler": "self output_dir",
    f"{TRAINER}._save_scaler": "self output_dir",
    f"{TRAINER}._save_rng_state": "self output_dir",
    f"{TRAINER}._load_callback_state": "self",
    f"{TRAINER}._run_epoch": "self model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial "
    "ignore_keys_for_eval start_time resume_from_checkpoint epochs_trained steps_trained_in_current_epoch",
    f"{TRAINER}._load_rng_state": "self checkpoint",
    f"{TRAINER}._finalize_training": "self trial num_train_samples start_time",
    f"{TRAINER}._load_best_model": "self",
    f"{TRAINER}.create_accelerator_and_postprocess": "self",
    f"{TRAINER}._load_from_checkpoint": "self resume_from_checkpoint model",
    f"{TRAINER}._load_optimizer_and_scheduler": "self checkpoint",
    # Replaced by training/trainer.py: the batch plan, the token mean, reports.
    f"{TRAINER}.get_train_dataloader": "self",
    f"{TRAINER}._get_train_sampler": "self train_dataset",
    f"{TRAINER}._get_eval_sampler": "self eval_dataset",
    f"{TRAINER}.get_batch_samples": "self epoch_iterator num_batches device",
    f"{TRAINER}.compute_loss": "self model inputs return_outputs num_items_in_batch",
    f"{TRAINER}.training_step": "self model inputs num_items_in_batch",
    f"{TRAINER}.evaluation_loop": "self dataloader description prediction_loss_only ignore_keys metric_key_prefix",
    f"{TRAINER}.log": "self logs start_time",
    f"{TRAINER}._prepare_for_training": "self max_steps train_dataloader resume_from_checkpoint",
    # Skipped or wrapped, because TRL and Unsloth put their own in between.
    "trl/trainer/sft_trainer.py:SFTTrainer._save_checkpoint": "self model trial",
    "trl/trainer/sft_trainer.py:SFTTrainer.compute_loss": "self model inputs return_outputs num_items_in_batch",
    "trl/trainer/sft_trainer.py:SFTTrainer.log": "self logs start_time",
}
CALLED = {
    # model/loading/sharded_load.py wraps the first and leaves out the second while a model is read.
    "transformers/core_model_loading.py:convert_and_load_state_dict_in_model": "model state_dict load_config "
    "disk_offload_index",
    "transformers/modeling_utils.py:caching_allocator_warmup": "model expanded_device_map hf_quantizer",
    "transformers/distributed/sharding_utils.py:DtensorShardOperation.shard_tensor": "self source tensor_idx device "
    "dtype",
    "transformers/integrations/bitsandbytes.py:Bnb4bitQuantize.convert": "self input_dict full_layer_name model "
    "**kwargs",
    "transformers/integrations/bitsandbytes.py:Bnb4bitDeserialize.convert": "self input_dict model full_layer_name "
    "**kwargs",
    "transformers/quantizers/quantizer_bnb_4bit.py:Bnb4BitHfQuantizer.get_quantize_ops": "self",
    "accelerate/utils/fsdp_utils.py:fsdp2_prepare_model": "accelerator model",
    "accelerate/parallelism_config.py:ParallelismConfig.get_device_mesh": "self device_type",
    f"{TRAINER}._evaluate": "self trial ignore_keys_for_eval skip_scheduler",
    f"{TRAINER}._prepare_inputs": "self inputs",
    f"{TRAINER}.compute_loss_context_manager": "self",
    "transformers/trainer_callback.py:TrainerState.compute_steps": "self args max_steps",
    "transformers/modeling_utils.py:PreTrainedModel._can_set_attn_implementation": "cls",
    "transformers/masking_utils.py:sdpa_mask": "batch_size q_length kv_length q_offset kv_offset mask_function "
    "attention_mask local_size allow_is_causal_skip allow_is_bidirectional_skip allow_torch_fix use_vmap device "
    "**kwargs",
    "torch/nn/attention/varlen.py:varlen_attn": "query key value cu_seq_q cu_seq_k max_q max_k * return_aux scale "
    "window_size enable_gqa seqused_k block_table num_splits",
    "torch/nn/attention/varlen.py:_varlen_attn_backward": "grad_out query key value out lse cu_seq_q cu_seq_k max_q "
    "max_k is_causal rng_state scale window_size",
    "torch/serialization.py:register_package": "priority tagger deserializer",
    "torch/distributed/checkpoint/hf_storage.py:HuggingFaceStorageReader.read_metadata": "self",
    "torch/distributed/tensor/_utils.py:compute_local_shape_and_global_offset": "global_shape mesh placements "
    "skip_offset",
    "transformers/core_model_loading.py:revert_weight_conversion": "model state_dict",
    "unsloth/models/_utils.py:_unsloth_reset_stray_compile_cache": "self",
    "unsloth/models/llama.py:_decline_fused_lora_for_fsdp": "model reason",
    "unsloth/models/rl.py:_patch_trl_rl_trainers": "trainer_file",
    "unsloth/models/_utils.py:apply_unsloth_gradient_checkpointing": "use_gradient_checkpointing max_seq_length dtype",
    "unsloth/utils/hf_packed_attention.py:enable_hf_packed_attention": "",
    "unsloth/utils/attention_dispatch.py:select_attention_backend": "use_varlen dropout_p",
    "unsloth/utils/packing.py:patch_hybrid_linear_attention_varlen": "model",
    "unsloth_zoo/fused_losses/cross_entropy_loss.py:_get_chunk_multiplier": "vocab_size target_gb fixed_gb device",
}
# Arguments in other releases that the kit runs with: with torch 2.11 it takes no kernel for packed rows of
# Transformers' attention, and torch 2.15 and Transformers 5.24 run with the transformers backend.
OTHERS = {
    "torch/nn/attention/varlen.py:varlen_attn": "query key value cu_seq_q cu_seq_k max_q max_k * return_aux scale "
    "window_size",
    "torch/nn/attention/varlen.py:_varlen_attn_backward": (
        f"{CALLED['torch/nn/attention/varlen.py:_varlen_attn_backward']} backend"
    ),
    "transformers/masking_utils.py:sdpa_mask": CALLED["transformers/masking_utils.py:sdpa_mask"].replace(
        "allow_torch_fix ", ""
    ),
}
# Attributes and module variables that are read or set, by the file that has to name them.
NAMES = {
    "transformers/trainer.py": ["is_fsdp_enabled", "is_deepspeed_enabled", "model_accepts_loss_kwargs"],
    "transformers/integrations/integration_utils.py": [
        "tb_writer",
        "TENSORBOARD_LOGGING_DIR",
        "get_available_reporting_integrations",
    ],
    "transformers/modeling_utils.py": [
        "_supports_flash_attn",
        "_attn_implementation",
        "all_tied_weights_keys",
        "_keys_to_ignore_on_save",
        "_keep_in_fp32_modules",
        "_keep_in_fp32_modules_strict",
    ],
    "transformers/core_model_loading.py": [
        "HF_DEACTIVATE_ASYNC_LOAD",
        "MergeModulelist",
        "Concatenate",
        "_weight_conversions",
    ],
    "transformers/integrations/hub_kernels.py": ["is_torchdynamo_exporting", "is_torchdynamo_compiling"],
    "transformers/models/gemma4/modeling_gemma4.py": ["store_full_length_kv", "is_kv_shared_layer"],
    "accelerate/utils/dataclasses.py": ["mixed_precision_policy", "gradient_as_bucket_view", "auto_wrap_policy"],
    "accelerate/utils/fsdp_utils.py": ["fsdp_plugin", "torch_device_mesh", "fsdp_dim_names", "is_main_process"],
    "peft/tuners/tuners_utils.py": ["fsdp", "mesh_dim_names", "_disable_adapters"],
    "accelerate/accelerator.py": ["ddp_handler"],
    "accelerate/state.py": ["distributed_type", "fsdp_plugin", "parallelism_config", "device_mesh"],
    "datasets/arrow_dataset.py": ["_indices"],
    "torch/distributed/checkpoint/_hf_utils.py": ["DCP_SHARDING_INFO", "saved_offsets"],
    "torch/cuda/memory.py": ["_cuda_endAllocateToPool", "_cuda_releasePool"],
    "torch/nn/modules/module.py": [
        "_buffers",
        "_non_persistent_buffers_set",
        "_compiled_call_impl",
        "_call_impl",
        "_forward_hooks",
        "_forward_pre_hooks",
    ],
    "transformers/modeling_layers.py": ["gradient_checkpointing"],
    "unsloth/models/llama.py": ["logger", "UNSLOTH_FORCE_FUSED_LORA"],
    "unsloth/kernels/qk_norm_rope.py": ["QK_NORM_ROPE_ENABLED"],
    "unsloth/trainer.py": ["PADDING_FREE_BLOCKLIST"],
    # Read before every call of a compiled layer.
    "unsloth/models/_block_compile.py": ["UNSLOTH_BLOCK_COMPILE"],
    "torch/_dynamo/utils.py": ["counters"],
    "unsloth/models/_utils.py": ["_unsloth_forced_float32", "_unsloth_gradient_checkpointing"],
    "unsloth/utils/attention_dispatch.py": ["_TORCH_VARLEN_ATTN", "XFORMERS", "FLASH_VARLEN"],
    "unsloth_zoo/fused_losses/cross_entropy_loss.py": ["_FUSED_CE_COMPILE_SUPPORTED"],
}


@cache
def source(file: str) -> ast.Module:
    """Return the syntax tree of a file of an installed package, given as package/path.py."""
    package, _, path = file.partition("/")
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return ast.parse((Path(spec.origin).parent / path).read_text(encoding="utf-8"))


def arguments(name: str) -> str | None:
    """Return the argument names of package/path.py:Class.function, or None if there is no such function."""
    file, _, qualified = name.partition(":")
    *classes, function = qualified.split(".")
    body = source(file).body
    for wanted in classes:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == wanted), [])
    for node in ast.walk(ast.Module(body, [])) if not classes else body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            given = node.args
            names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
            names += [f"*{given.vararg.arg}"] if given.vararg else ["*"] if given.kwonlyargs else []
            names += [argument.arg for argument in given.kwonlyargs]
            return " ".join([*names, f"**{given.kwarg.arg}"] if given.kwarg else names)
    return None


@pytest.mark.parametrize(("name", "expected"), [*REPLACED.items(), *CALLED.items()])
def test_an_upstream_function_takes_the_arguments_that_the_kit_relies_on(name: str, expected: str) -> None:
    package = name.partition("/")[0]
    found, version = arguments(name), metadata.version(package)
    assert found in (expected, OTHERS.get(name)), (
        f"{package} {version} changed {name}; the kit was written for {READ_FROM[package]}"
    )


@pytest.mark.parametrize(("file", "names"), NAMES.items())
def test_upstream_names_an_attribute_that_the_kit_uses(file: str, names: list[str]) -> None:
    words = set()
    for node in ast.walk(source(file)):
        if isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
    assert [name for name in names if name not in words] == []


def test_every_private_method_that_the_kit_replaces_is_listed() -> None:
    upstream = {
        node.name
        for file in ("transformers/trainer.py", "trl/trainer/sft_trainer.py")
        for node in ast.walk(source(file))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and not node.name.startswith("__")
    }
    ours = {
        node.name
        for path in (REPO / "unsloth_ddp" / "training").glob("*.py")
        for part in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(part, ast.ClassDef)
        for node in part.body
        if isinstance(node, ast.FunctionDef)
    }
    listed = {name.rpartition(".")[2] for name in REPLACED}
    assert len(ours & upstream) > 5
    assert ours & upstream <= listed


# ---- what is imported is declared ----

# Import names that differ from the name of the distribution.
DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "pillow"}
# Imported behind a check, with a sentence where it is missing: plan --picture, method qlora.
OPTIONAL = {"matplotlib", "bitsandbytes"}


def requirements() -> dict[str, Requirement]:
    """Return the packages that pyproject.toml depends on, without extras."""
    return {canonicalize_name(found.name): found for found in map(Requirement, project()["dependencies"])}


def extras() -> set[str]:
    """Return the packages of the extras, which are imported behind a check."""
    found = (Requirement(text) for texts in project()["optional-dependencies"].values() for text in texts)
    return {canonicalize_name(requirement.name) for requirement in found}


def project() -> dict[str, Any]:
    """Return the project's table of pyproject.toml."""
    return tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def imported_packages() -> set[str]:
    """Return the top-level packages that the kit and the demo import, in functions too."""
    own = {"unsloth_ddp", *(path.stem for path in (REPO / "demo").glob("*.py"))}
    files = [*(REPO / "unsloth_ddp").rglob("*.py"), *(REPO / "demo").glob("*.py"), *REPO.glob("*.py")]
    names = set()
    for node in (node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - own - set(sys.stdlib_module_names)


def test_everything_that_is_imported_is_declared() -> None:
    needed = {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in imported_packages() - OPTIONAL}
    assert needed - requirements().keys() - extras() == set()


def test_every_dependency_has_a_lower_bound_that_the_lock_meets() -> None:
    for name, requirement in requirements().items():
        assert any(specifier.operator == ">=" for specifier in requirement.specifier), f"{name} has no lower bound"
        assert requirement.specifier.contains(metadata.version(name)), f"{name}: {requirement.specifier}"
