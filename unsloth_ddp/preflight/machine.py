"""Check one node's clock, disks, shared memory, GPUs and driver: pure functions from plain values to a Check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unsloth_ddp.distributed.missing_gpu import MissingGpu
from unsloth_ddp.distributed.precision import check_full_weights, choose_precision, has_bf16
from unsloth_ddp.preflight.checks import Check, Verdict
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.units import GIB, counted, shown_bytes

# Containers get 64 MB by default; NCCL and data loaders need more.
SHARED_MEMORY_WANTED = GIB
CACHE_WANTED = 2 * GIB
LOGS_WANTED = GIB // 4
# Seconds of the kernel's own error bound, above which systemd too calls a clock unsynchronised.
CLOCK_ERROR_LIMIT = 16.0


def check_clock(node: int, error_seconds: float | None, nodes: int) -> Check:
    """Check that NTP keeps the kernel's clock.

    Args:
        error_seconds: the kernel's bound on its error; None where it cannot be read.
    """
    if error_seconds is None:
        return Check("clock", {node: "not known whether synchronised"})
    if error_seconds < CLOCK_ERROR_LIMIT:
        return Check("clock", {node: "synchronised"})
    if nodes == 1:
        return Check("clock", {node: "not synchronised"})
    remedy = "Start chrony, ntpd or systemd-timesyncd: nodes whose clocks differ disagree on which file is newer."
    return Check("clock", {node: "not synchronised"}, "warning", remedy)


@dataclass(frozen=True)
class Folder:
    """A folder that a run writes to: its free bytes, or the reason why it cannot be written."""

    path: str
    free: int = 0
    error: str = ""


def check_folder(name: str, node: int, folder: Folder, needed: int, content: str, option: str) -> Check:
    """Check that a folder can be written and has room for what the run writes there.

    Args:
        needed: bytes; less than twice that is a warning.
        content: name of what is written there.
        option: the option or variable that names another folder.
    """
    if folder.error:
        remedy = (
            f"{folder.path} cannot be written ({folder.error}); correct that, or choose another folder with {option}."
        )
        return Check(name, {node: f"{folder.path}: {folder.error}"}, "failure", remedy)
    shown = f"{folder.path}: {shown_bytes(folder.free)} free, about {shown_bytes(needed)} needed"
    if folder.free < needed:
        remedy = f"Free space for {content}, or choose another folder with {option}."
        return Check(name, {node: shown}, "failure", remedy)
    if folder.free < 2 * needed:
        remedy = f"{content.capitalize()} may not fit; free some space, or choose another folder with {option}."
        return Check(name, {node: shown}, "warning", remedy)
    return Check(name, {node: shown})


def check_shared_memory(node: int, free: int, total: int, processes: int, gpu: bool) -> Check:
    """Check that /dev/shm has room for NCCL between the processes of one node, and for data loaders."""
    shown = f"{shown_bytes(free)} free of {shown_bytes(total)}"
    if free >= SHARED_MEMORY_WANTED or (processes <= 1 and not gpu):
        return Check("shared memory", {node: shown})
    remedy = "NCCL keeps its buffers in /dev/shm: start the container with --ipc=host or --shm-size=8g."
    return Check("shared memory", {node: shown}, "warning", remedy)


# ---- GPUs ----


def check_gpus(
    node: int,
    devices: Sequence[Mapping[str, Any]],
    *,
    cpu: bool,
    missing: MissingGpu | None,
    expected: int | None,
    processes: int,
    visible: str | None,
) -> Check:
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
        return Check("GPUs", {node: "not used: the run is on the CPU"})
    limit = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
    shown = list_gpus(devices) + limit

    def row(verdict: Verdict, remedy: str) -> Check:
        return Check("GPUs", {node: shown}, verdict, remedy)

    if not devices:
        if missing and not missing.hidden:
            return row("failure", missing.refusal)
        if expected:
            return row(
                "failure",
                f"GPUS_PER_NODE is {expected}, but no GPU is here; check the driver (nvidia-smi), start the container "
                "with --gpus all, or give --use_cpu for a run on the CPU.",
            )
        if missing:
            return row("warning", missing.warning)
        return row("warning", "The run will use the CPU; give --use_cpu if that is intended, or check nvidia-smi.")
    if expected and len(devices) != expected:
        return row(
            "failure",
            f"GPUS_PER_NODE is {expected}, but {len(devices)} are visible{limit}; every node needs the same number.",
        )
    if processes > len(devices):
        return row(
            "failure", f"{processes} processes were started for {counted(len(devices), 'GPU')}; start one a GPU."
        )
    if processes and processes < len(devices):
        return row("warning", f"Idle GPUs: {len(devices) - processes}; start one process a GPU.")
    return Check("GPUs", {node: shown})


def check_precision(
    node: int, devices: Sequence[Mapping[str, Any]], wanted: str, method: str, full_weights: str
) -> Check:
    """Check that the GPUs have the precision of the run: those before Ampere have no bf16.

    Args:
        devices: name and compute capability of each GPU; none for a run on the CPU.
        wanted: --precision.
    """
    weakest = min(devices, key=lambda device: _capability(device), default=None)
    gpu = f"{weakest['name']} (compute capability {weakest['capability']})" if weakest else None
    try:
        precision = choose_precision(wanted, gpu, bf16=weakest is not None and has_bf16(_capability(weakest)))
        check_full_weights(method, full_weights, precision)
    except UserError as error:
        return Check("precision", {node: wanted}, "failure", str(error))
    shown = precision if wanted != "auto" else f"{precision} (auto)"
    if weakest and not has_bf16(_capability(weakest)):
        shown += f": {gpu} has no bf16, and no flash attention for packed rows"
    return Check("precision", {node: shown})


def _capability(device: Mapping[str, Any]) -> tuple[int, int]:
    major, _, minor = str(device["capability"]).partition(".")
    return int(major), int(minor)


def list_gpus(devices: Sequence[Mapping[str, Any]]) -> str:
    """Return `4 x NVIDIA H200 139.8 GiB`, each kind of GPU separately."""
    kinds = [f"{d['name']} {shown_bytes(d['memory'])}" for d in devices]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "none"


def check_driver(node: int, driver_version: str | None, driver_cuda: int | None, torch_cuda: str | None) -> Check:
    """Check that the driver supports the CUDA version that torch was built for.

    Within one major version of CUDA a newer toolkit runs on an older driver, but code compiled at run time (Triton)
    may not (docs.nvidia.com/deploy/cuda-compatibility).

    Args:
        driver_cuda: the newest CUDA of the driver as cuDriverGetVersion gives it: 12080 for 12.8.
        torch_cuda: torch.version.cuda: "12.8"; None for a build without CUDA.
    """
    name = "driver and CUDA"
    if torch_cuda is None:
        remedy = "This torch was built without CUDA; install the kit's own with uv sync."
        return Check(name, {node: "torch without CUDA"}, "failure", remedy)
    if driver_cuda is None:
        return Check(
            name, {node: f"torch for CUDA {torch_cuda}; the driver's is not known"}, "warning", "Run nvidia-smi."
        )
    newest = (driver_cuda // 1000, driver_cuda % 1000 // 10)
    built = tuple(int(part) for part in torch_cuda.split(".")[:2])
    known = f"driver {driver_version}, " if driver_version else ""
    shown = f"{known}up to CUDA {newest[0]}.{newest[1]}; torch for CUDA {torch_cuda}"
    if newest[0] < built[0]:
        remedy = f"Update the driver to one for CUDA {built[0]}, or install a torch built for CUDA {newest[0]}."
        return Check(name, {node: shown}, "failure", remedy)
    if newest < built:
        remedy = "Mostly works within one major version; if kernels fail to compile or load, update the driver."
        return Check(name, {node: shown}, "warning", remedy)
    return Check(name, {node: shown})


def check_doctor(node: int, code: int | None, report: str) -> Check:
    """Check the result of `unsloth doctor --gpus`.

    Args:
        code: its exit status; None when it did not end in time or could not be started.
        report: its output.
    """
    name = "unsloth doctor --gpus"
    hints = report.partition("=== Verdict:")[2].strip().splitlines()[1:]
    said = " ".join(line.strip().lstrip("- ") for line in hints if line.strip())
    if code == 0:
        return Check(name, {node: "OK"})
    if code is None:
        return Check(
            name, {node: report or "did not end"}, "warning", "Run unsloth doctor --gpus by hand on this node."
        )
    if not said:
        last = report.strip().splitlines()[-1:] or [""]
        return Check(name, {node: f"exit {code}: {last[0][:200]}"}, "warning", "Run unsloth doctor --gpus by hand.")
    return Check(name, {node: "PROBLEMS FOUND"}, "failure", said)
