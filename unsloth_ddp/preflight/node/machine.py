"""Read and check one node's shared memory and GPUs; works with torch 2.11 to 2.14."""

from collections.abc import Mapping, Sequence
from typing import Any

from unsloth_ddp.distributed.missing_gpu import MissingGpu
from unsloth_ddp.distributed.precision import check_full_weights, choose_precision, has_bf16
from unsloth_ddp.preflight.checks import Finding, failure, run_with_limit, warning
from unsloth_ddp.utils.errors import UserError, one_line
from unsloth_ddp.utils.units import GIB, counted, shown_bytes

# Containers get 64 MB by default; NCCL and data loaders need more.
SHARED_MEMORY_WANTED = GIB
GPU_SECONDS = 60


def check_shared_memory(free: int, total: int, processes: int, gpu: bool) -> Finding:
    """Check that /dev/shm has room for NCCL between the processes of one node, and for data loaders."""
    shown = f"{shown_bytes(free)} free of {shown_bytes(total)}"
    if free >= SHARED_MEMORY_WANTED or (processes <= 1 and not gpu):
        return Finding(shown)
    remedy = "NCCL keeps its buffers in /dev/shm: start the container with --ipc=host or --shm-size=8g."
    return warning(shown, remedy)


# ---- GPUs ----


def check_gpus(
    devices: Sequence[Mapping[str, Any]],
    *,
    cpu: bool,
    missing: MissingGpu | None,
    expected: int | None,
    processes: int,
    visible: str | None,
) -> Finding:
    """Check that torch sees the GPUs that the run needs.

    Args:
        devices: name and memory (bytes) of each GPU that torch sees.
        cpu: the run asks for the CPU.
        missing: why torch sees none where one was expected.
        expected: GPUS_PER_NODE; None when not set.
        processes: number of processes on this node; 0 when no launcher has started them yet.
        visible: CUDA_VISIBLE_DEVICES.
    """
    if cpu:
        return Finding("not used: the run is on the CPU")
    limit = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
    shown = list_gpus(devices) + limit

    if not devices:
        if missing and not missing.hidden:
            return failure(shown, missing.refusal)
        if expected:
            return failure(
                shown,
                f"GPUS_PER_NODE is {expected}, but no GPU is here; check the driver (nvidia-smi), start the container "
                "with --gpus all, or give --use_cpu for a run on the CPU.",
            )
        if missing:
            return warning(shown, missing.warning)
        return warning(shown, "The run will use the CPU; give --use_cpu if that is intended, or check nvidia-smi.")
    if expected and len(devices) != expected:
        return failure(
            shown,
            f"GPUS_PER_NODE is {expected}, but {len(devices)} are visible{limit}; every node needs the same number.",
        )
    if processes > len(devices):
        return failure(
            shown, f"{processes} processes were started for {counted(len(devices), 'GPU')}; start one a GPU."
        )
    if processes and processes < len(devices):
        return warning(shown, f"Idle GPUs: {len(devices) - processes}; start one process a GPU.")
    return Finding(shown)


def check_precision(devices: Sequence[Mapping[str, Any]], option: str, method: str, full_weights: str) -> Finding:
    """Check that the GPUs have the precision of the run: those before Ampere have no bf16.

    Args:
        devices: name and compute capability of each GPU; none for a run on the CPU.
        option: --precision.
    """
    weakest = min(devices, key=lambda device: _capability(device), default=None)
    gpu = f"{weakest['name']} (compute capability {weakest['capability']})" if weakest else None
    try:
        precision = choose_precision(option, gpu, bf16=weakest is not None and has_bf16(_capability(weakest)))
        check_full_weights(method, full_weights, precision)
    except UserError as error:
        return failure(option, str(error))
    shown = precision if option != "auto" else f"{precision} (auto)"
    if weakest and not has_bf16(_capability(weakest)):
        shown += f": {gpu} has no bf16, and no flash attention for packed rows"
    return Finding(shown)


def _capability(device: Mapping[str, Any]) -> tuple[int, int]:
    major, _, minor = str(device["capability"]).partition(".")
    return int(major), int(minor)


def list_gpus(devices: Sequence[Mapping[str, Any]]) -> str:
    """Return `4 x NVIDIA H200 139.8 GiB`, each kind of GPU separately."""
    kinds = [f"{d['name']} {shown_bytes(d['memory'])}" for d in devices]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "none"


# ---- what is read ----


def read_gpus(cpu: bool) -> tuple[list[dict[str, Any]], str]:
    """Return what query_gpus returns, with a time limit for a stuck driver; nothing for a run on the CPU."""
    if cpu:
        return [], ""
    try:
        return run_with_limit(query_gpus, GPU_SECONDS)
    except Exception as error:
        return [], f"{type(error).__name__}: {one_line(error)}"


def query_gpus() -> tuple[list[dict[str, Any]], str]:
    """Return name, memory and capability of the GPUs that torch sees, and its reason for seeing none."""
    import torch

    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except Exception as error:
            return [], one_line(error)
        return [], ""
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": p.name, "memory": p.total_memory, "capability": f"{p.major}.{p.minor}"} for p in properties], ""
