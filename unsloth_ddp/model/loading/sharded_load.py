"""Load a model in shards for FSDP2: every rank reads its shard of each weight, and none holds the whole model.

Transformers creates the model on the meta device, maps the names in the files to its own, and reads only this rank's
slice of a weight that is a DTensor. accelerate decides which modules FSDP2 wraps. Between the two:

1. `reading_shards` replaces the weights by DTensors before `from_pretrained` reads them, sharded as FSDP2 does.
2. PEFT adds adapters to that model. They are small, and begin with the same values as without sharding.
3. `wrap` passes the model to accelerate with weights on the meta device, and puts each rank's shards into the result.

accelerate's own method (fsdp_cpu_ram_efficient_loading) first reads the whole model into one process's memory.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from unsloth_ddp.distributed.precision import Precision
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.files.check import check_complete
from unsloth_ddp.model.loading.shards import SplitPacked, as_shard, part_of, part_shape, places, put, split_quantized
from unsloth_ddp.model.modules import DTYPES, base_model, replaced
from unsloth_ddp.utils.errors import UserError, one_line

# Conversions whose sharded result a rank can compute from its own slices of the files: experts, each read by the rank
# that holds it, are stacked to one weight.
SPLITTABLE = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)], [("Bnb4bitDeserialize", None)])


def mixed_precision_policy(precision: Precision) -> MixedPrecisionPolicy:
    """Return FSDP2's policy: compute in `precision`, reduce gradients in fp32 (accelerate reduces in 16 bit)."""
    if precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=DTYPES[precision], reduce_dtype=torch.float32)


def shard_mesh(runtime: Runtime) -> DeviceMesh:
    """Return the device mesh, over whose last dimension weights are sharded; every rank calls this.

    Its shape is (replicas, shards) with hybrid sharding, otherwise (shards,).
    """
    # PEFT knows the name "fsdp", and would take other names for tensor parallelism.
    if runtime.copies == 1:
        return init_device_mesh(runtime.device_type, (runtime.parts,), mesh_dim_names=("fsdp",))
    sizes = (runtime.copies, runtime.parts)
    return init_device_mesh(runtime.device_type, sizes, mesh_dim_names=("dp_replicate", "fsdp"))


@contextlib.contextmanager
def reading_shards(mesh: DeviceMesh, model_name: str) -> Iterator[None]:
    """Make `from_pretrained` read only this rank's shard of each weight inside the block.

    Upstream shards weights while reading only if it also wraps the modules (DistributedConfig), which would leave out
    adapters that are added later. It also reserves memory for the whole model before it reads.
    """
    from transformers import modeling_utils

    convert = modeling_utils.convert_and_load_state_dict_in_model
    assert mesh.mesh_dim_names is not None
    # Replicas do not matter for reading.
    mesh = mesh[mesh.mesh_dim_names[-1]]

    def read(model: Any, state_dict: dict[str, Any], load_config: Any, disk_offload_index: Any = None) -> Any:
        quantizer, mapping = load_config.hf_quantizer, load_config.weight_mapping or []
        if quantizer is not None and not split_quantized(quantizer, mapping, mesh):
            return convert(model, state_dict, load_config, disk_offload_index)
        whole = _read_whole(mapping)
        _place(model, mesh, lambda name: any(target in name for target in whole))
        # Threads would prefetch whole tensors, which become small only when they are converted.
        with patch_environment(HF_DEACTIVATE_ASYNC_LOAD="1" if whole or quantizer is not None else "0"):
            result = convert(model, state_dict, load_config, disk_offload_index)
        _check_read(model, result[0], model_name, quantized=quantizer is not None)
        _split_the_rest(model, mesh)
        return result

    with (
        replaced(modeling_utils, "convert_and_load_state_dict_in_model", read),
        replaced(modeling_utils, "caching_allocator_warmup", lambda *_: None),
        # Otherwise Transformers loads weights only in the first rank of each node.
        patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false"),
    ):
        yield


def wrap(model: Any, mesh: DeviceMesh, precision: Precision, *, quantized: bool) -> Any:
    """Apply FSDP2 to a model whose weights were read in shards, as accelerate does; return the model.

    accelerate does not wrap it again later. Trained weights keep their type, unless they have several, of which FSDP2
    takes one: then they become fp32, as with accelerate. In a model with 4-bit weights they become bf16, as with TRL.

    Raises:
        UserError: FSDP2 cannot wrap this model.
    """
    from accelerate.accelerator import fsdp2_prepare_model
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=mixed_precision_policy(precision))
    # Each shard is already in the memory of its device.
    plugin.cpu_ram_efficient_loading = False
    if not (plugin.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None)):
        raise UserError(
            f"FSDP2 cannot shard {type(base_model(model)).__name__}: its class does not name its layers "
            "(_no_split_modules); give the class of a layer as fsdp_transformer_layer_cls_to_wrap under fsdp_config in "
            "the accelerate config."
        )
    _check_shared(model)
    if quantized:
        for parameter in model.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                # TRL casts them later, when the cast would no longer affect the shards.
                parameter.data = parameter.data.to(torch.bfloat16)
    # accelerate casts trained weights to fp32 unless this is "no", --full_weights bf16 included.
    one_type = len({parameter.dtype for parameter in model.parameters() if parameter.requires_grad}) == 1
    parts = [(part, weight_places) for part, weight_places in places(model) if isinstance(part, DTensor)]
    for part, weight_places in parts:
        put(Parameter(torch.empty(part.shape, dtype=part.dtype, device="meta"), part.requires_grad), weight_places)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        mixed_precision="no" if one_type or quantized or precision == "fp32" else precision,
        is_main_process=False,
        device=torch.device(mesh.device_type),
    )
    try:
        model = fsdp2_prepare_model(accelerator, model)
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"FSDP2 cannot shard {type(base_model(model)).__name__}: {one_line(error)}") from error
    on_host = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    while parts:
        # Popping drops the last reference to a shard that is cast.
        part, weight_places = parts.pop()
        _, module, name = weight_places[0]
        wrapped: Any = module.get_parameter(name)
        weight = as_shard(part.to_local().detach().to(wrapped.dtype), wrapped, wrapped.device_mesh)
        if on_host:
            weight = Parameter(weight.detach().to("cpu"), weight.requires_grad)
        weight.__dict__.update(part.__dict__)
        put(weight, weight_places)
    return model


def _check_shared(model: Any) -> None:
    """Refuse shared weights, except for a tied embedding and output head, which accelerate puts into one group."""
    shared = [[path for path, _, _ in weight_places] for _, weight_places in places(model) if len(weight_places) > 1]
    ends = [getattr(end, "weight", None) for end in (model.get_input_embeddings(), model.get_output_embeddings())]
    if shared and ends[0] is not ends[1]:
        raise UserError(
            f"FSDP2 cannot shard the weight that {' and '.join(shared[0])[:300]} share; leave the embedding out of "
            "--lora_modules_to_save, or use accelerate_configs/zero2.yaml."
        )


def _check_read(model: Any, info: Any, model_name: str, *, quantized: bool) -> None:
    """Refuse weights that were not read; upstream would initialize them at random, in a collective.

    Raises:
        UserError: naming one of them. Other ranks may not raise, because a shard can have the right size by chance.
    """
    if info.mismatched_keys:
        raise UserError(
            f"model {model_name} cannot be loaded: the sizes of its weights differ from its config.json; download it "
            "again, or correct config.json."
        )
    expected = info.missing_keys - getattr(model, "all_tied_weights_keys", {}).keys()
    ignored = model._keys_to_ignore_on_load_missing or ()
    if not quantized:
        check_complete(model_name, [key for key in expected if not any(re.search(name, key) for name in ignored)], [])


def _read_whole(mapping: list[Any]) -> list[str]:
    """Return name patterns of weights that a rank cannot compute from its slices of the files: fused ones, say."""
    return [target for conversion in mapping if not _splittable(conversion) for target in conversion.target_patterns]


def _splittable(conversion: Any) -> bool:
    operations = getattr(conversion, "operations", [])
    steps = (step for step in operations if not isinstance(step, SplitPacked))
    kinds = [(type(step).__name__, getattr(step, "dim", None)) for step in steps]
    return not operations or kinds in SPLITTABLE


def _place(model: Module, mesh: DeviceMesh, skip: Callable[[str], bool]) -> None:
    """Replace weights on the meta device by DTensors on the meta device."""
    for parameter, weight_places in places(model):
        sharded_places = [place for place in weight_places if not skip(place[0])]
        if sharded_places and type(parameter) is Parameter and parameter.ndim and _for_everyone(parameter, mesh):
            local = torch.empty(part_shape(parameter.shape, mesh), dtype=parameter.dtype, device="meta")
            put(as_shard(local, parameter, mesh), sharded_places)


def _for_everyone(parameter: Parameter, mesh: DeviceMesh) -> bool:
    # Upstream cannot stack the experts of a rank that has none.
    ranks = mesh.size(mesh.ndim - 1)
    return -(-parameter.shape[0] // ranks) * (ranks - 1) < parameter.shape[0]


def _split_the_rest(model: Module, mesh: DeviceMesh) -> None:
    """Replace the weights that were read whole by this rank's shards."""
    for parameter, weight_places in places(model):
        if type(parameter) is Parameter and not isinstance(parameter, DTensor) and parameter.ndim:
            shard = as_shard(part_of(parameter.detach(), mesh), parameter, mesh)
            # Upstream marks initialized weights with an attribute.
            shard.__dict__.update(parameter.__dict__)
            put(shard, weight_places)
