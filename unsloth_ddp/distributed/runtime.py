"""Start the process group of a run, provide collectives that raise failures on every rank alike, and stop it.

A launcher (accelerate launch, torchrun) describes the job in environment variables; plain python is one process.
Work for one process (read the rows, choose the run's name) runs there, and its result or failure is sent to the others,
so that no rank is left waiting.
"""

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed import wire
from unsloth_ddp.distributed.alike import check_alike, code_facts, option_facts
from unsloth_ddp.distributed.missing_gpu import check_cpu_is_meant, warn_of_cpu
from unsloth_ddp.distributed.precision import Precision, choose_precision
from unsloth_ddp.distributed.ranks import RankLocation, Ranks, this_location
from unsloth_ddp.distributed.rendezvous import SECRET, TOLD_SECONDS, check_secret, rendezvous, told_after
from unsloth_ddp.distributed.sharding import (
    Offload,
    Sharding,
    check_offload,
    check_sharding,
    complete_environment,
    copies_from_environment,
    describe_sharding,
    is_on,
    offload_from_environment,
    sharding_from_environment,
)
from unsloth_ddp.distributed.watch.progress import Progress
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.sources import read_source
from unsloth_ddp.utils.redaction import hide
from unsloth_ddp.utils.units import counted

T = TypeVar("T")
Backend = Literal["unsloth", "transformers"]


def asks_for_cpu(settings: Settings, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the CPU was chosen: by the option, the accelerate config, or Unsloth's variable for it."""
    return settings.use_cpu or is_on(environ, "ACCELERATE_USE_CPU") or environ.get("UNSLOTH_FORCE_CPU") == "1"


@dataclass
class Runtime:
    """The processes, the device and the precision of a run, and the collectives of its control group.

    Args:
        backend: None until model/backend.py decides it, which nothing changes later.
        copies: copies of a model that FSDP2 shards, each over world_size / copies neighbouring ranks.
    """

    ranks: Ranks
    backend: Backend
    device_type: Literal["cuda", "cpu"]
    precision: Precision
    device_name: str
    sharding: Sharding = "none"
    offload: Offload = "none"
    copies: int = 1
    control_group: Any = None
    cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    locations: list[RankLocation] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "backend":
            if self.decided_backend is not None:
                raise AttributeError(f"backend {self.backend} is decided, and cannot be changed to {value}")
            if value is None:
                return
        super().__setattr__(name, value)

    @property
    def decided_backend(self) -> Backend | None:
        """Return the backend, or None while rows may decide it, when `backend` is an AttributeError."""
        return vars(self).get("backend")

    @property
    def parts(self) -> int:
        """Return the number of processes that each copy of a model is split over, where FSDP2 shards it."""
        return self.ranks.world_size // self.copies

    @property
    def device_map(self) -> dict[str, str | int] | None:
        """Return the map that puts the whole model on this process's device; None if DeepSpeed places the weights."""
        if self.sharding == "zero3":
            return None
        return {"": self.ranks.local_rank if self.device_type == "cuda" else "cpu"}

    def layout(self) -> dict[str, Any]:
        """Return how a run is spread and computed, by the names in the manifest, record.json and summary.json."""
        return {
            "world_size": self.ranks.world_size,
            "nodes": self.ranks.nodes,
            "device": self.device_name,
            "sharding": self.sharding,
            "offload": self.offload,
            "copies": self.copies,
            "backend": self.backend,
            "precision": self.precision,
        }

    def barrier(self) -> None:
        """Wait until every process has come here, for control_timeout at most."""
        if self.control_group is not None:
            import torch.distributed as dist

            dist.barrier(group=self.control_group)

    def gather(self, value: T) -> list[T]:
        """Return the `value` of every rank, in rank order, on every rank."""
        if self.control_group is None:
            return [value]
        return wire.all_gather(value, self.control_group)

    def on_main(self, work: Callable[[], T], *, per_node: bool = False) -> T | None:
        """Run `work` in the main process (`per_node`: in the first process of each node) while the others wait.

        Returns the result on the rank that ran it and None on the others. A UserError is raised on every rank alike.
        Any other exception is raised where it happened, and as a RuntimeError on the other ranks.
        """
        runs = self.ranks.is_local_main if per_node else self.ranks.is_main
        return self.on_every_rank(work if runs else lambda: None)

    def on_every_rank(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return its result; what fails on one rank is raised on all, as by on_main."""
        result: Any = None
        failure = None
        try:
            result = work()
        except Exception as error:
            failure = error
        failures = self.gather(_describe(failure))
        if failure is not None:
            raise failure
        for rank, described in enumerate(failures):
            if described is not None:
                raise _rebuild(rank, described)
        return result

    def broadcast_from_node_main(self, work: Callable[[], T]) -> T:
        """Run `work` in the first process of each node and return its result on every rank of that node."""
        results = self.gather(self.on_main(work, per_node=True))
        return results[self.ranks.rank - self.ranks.local_rank]  # type: ignore[return-value]

    def broadcast_from_main(self, work: Callable[[], T]) -> T:
        """Run `work` in the main process and return its result on every rank."""
        result = self.on_main(work)
        return self.gather(result)[0]  # type: ignore[return-value]

    def scatter_from_main(self, work: Callable[[], list[T]]) -> T:
        """Run `work` in the main process, which returns one item for each rank, and return this rank's item.

        Each rank receives only its own item. Failures are raised as by `on_main`.
        """
        if self.control_group is None:
            return work()[0]
        items: list[Any] | None = None
        failure = None
        if self.ranks.is_main:
            try:
                items = [(item, None) for item in work()]
            except Exception as error:
                failure = error
                items = [(None, _describe(error))] * self.ranks.world_size
        item, described = wire.scatter(items, self.control_group)
        if failure is not None:
            raise failure
        if described is not None:
            raise _rebuild(0, described)
        return item


def _describe(failure: Exception | None) -> tuple[bool, str] | None:
    """Return whether a failure is a UserError, and its text without secrets, to be sent to the other ranks."""
    return None if failure is None else (isinstance(failure, UserError), hide(str(failure)))


def _rebuild(rank: int, described: tuple[bool, str]) -> Exception:
    """Return the exception that this rank raises for a failure on another rank."""
    is_user_error, text = described
    return UserError(text) if is_user_error else RuntimeError(f"rank {rank} failed: {text}")


@contextlib.contextmanager
def started(settings: Settings, ranks: Ranks) -> Iterator[Runtime]:
    """Start the process group of a run, and stop it at the end of the block."""
    import torch

    cuda = torch.cuda.is_available() and not asks_for_cpu(settings)
    if not cuda and not asks_for_cpu(settings):
        check_cpu_is_meant(settings)
    if cuda and ranks.local_world_size > torch.cuda.device_count():
        raise UserError(
            f"{counted(ranks.local_world_size, 'process')} were started on this machine, but torch sees "
            f"{counted(torch.cuda.device_count(), 'GPU')}; start at most one process per GPU (--num_processes, "
            "--nproc_per_node)."
        )
    runtime = Runtime(
        ranks=ranks,
        backend=None,  # type: ignore[arg-type]
        device_type="cuda" if cuda else "cpu",
        precision=_choose_precision(settings.precision, cuda),
        device_name=torch.cuda.get_device_name(ranks.local_rank) if cuda else "CPU",
        sharding=sharding_from_environment(os.environ),
        offload=offload_from_environment(os.environ),
        copies=copies_from_environment(os.environ, ranks.world_size, ranks.nodes),
    )
    check_sharding(runtime.sharding, settings, runtime.device_type, ranks.world_size)
    check_offload(runtime.offload, runtime.sharding, settings, runtime.device_type)
    complete_environment(runtime.sharding, os.environ)
    if settings.trainer_args.get("full_determinism"):
        # The Trainer sets it once the model has computed, and cuBLAS refuses to compute deterministically where it came
        # too late (https://docs.nvidia.com/cuda/cublas/#results-reproducibility).
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    quiet_imports()
    with rendezvous(ranks, settings.ddp_timeout) as meeting:
        _start_processes(runtime, settings, meeting)
        try:
            with runtime.cleanup:
                yield runtime
        finally:
            _stop_processes(runtime)


def single_process(settings: Settings) -> Runtime:
    """Return the runtime of one process without a process group, which loads a trained model and answers with it.

    The backend is not decided, and the precision is what this machine computes in. A sentence on stderr says why the
    CPU is used where a GPU was expected.
    """
    import torch

    cuda = torch.cuda.is_available() and not asks_for_cpu(settings)
    if not cuda and not asks_for_cpu(settings):
        warn_of_cpu()
    return Runtime(
        ranks=Ranks(),
        backend=None,  # type: ignore[arg-type]
        device_type="cuda" if cuda else "cpu",
        precision=_choose_precision("auto", cuda),
        device_name=torch.cuda.get_device_name() if cuda else "CPU",
    )


def let_idle_threads_sleep() -> None:
    """Make OpenMP threads that wait for each other spin shortly before they sleep; call this before importing torch.

    On a busy machine a spinning thread keeps the thread that it waits for off its core. On an idle machine a thread
    that sleeps at once (OMP_WAIT_POLICY=PASSIVE) wakes up too late. Measured with the demo on two threads of two cores
    (benchmarks/results/speed/openmp_waiting.json): the idle machine trains 5,414 tokens/s with this count, 5,803 with
    libgomp's own (300,000) and 2,227 without spinning. Beside six busy processes it trains 177 with this count and 613
    without spinning, and a run with libgomp's own count did not end in 120 s.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")


def keep_tuned_kernels() -> None:
    """Have Triton keep on the disk which variant of a kernel was fastest; call this before torch is imported.

    Kernels of layers with a state, such as the gated delta nets of Qwen3.5, have many variants, and each run would
    compile and time all of them before its first step. A resumed run takes the variants of the run that it continues.
    """
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")


def let_memory_segments_grow() -> None:
    """Have torch's allocator grow its segments; call this before torch is imported.

    Rows of other lengths would leave pieces of memory that no later tensor fits into: a step ran out of memory with
    2 GiB unused. Unsloth sets this too.
    """
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def quiet_imports() -> None:
    """Silence messages at import on which no user can act: deprecations in torchao, missing CPU kernels."""
    for library in ("torch.utils._pytree", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)


def _choose_precision(option: str, cuda: bool) -> Precision:
    import torch

    bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    return choose_precision(option, torch.cuda.get_device_name() if cuda else None, bf16)


def control_timeout(settings: Settings) -> timedelta:
    """Return how long ranks wait for the work of one process (tokenizing, merging), which grows with the data.

    It is one hour and a second for every 200 kB of local rows, or eight hours for rows from the Hub, whose size is not
    known here. A process that dies ends the wait at once.
    """
    files = [Path(read_source(text).name).expanduser() for text in [*settings.dataset, *settings.eval_dataset]]
    if not all(path.is_file() for path in files):
        return timedelta(hours=8)
    return timedelta(hours=1, seconds=sum(path.stat().st_size for path in files) / 200_000)


def _start_processes(runtime: Runtime, settings: Settings, meeting: dict[str, Any]) -> None:
    import torch
    from accelerate import PartialState

    ranks, cpu = runtime.ranks, runtime.device_type == "cpu"
    launcher_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    mixed = "no" if runtime.precision == "fp32" else runtime.precision
    if launcher_precision not in ("no", mixed):
        print(
            f"mixed_precision {launcher_precision} of the accelerate config is overridden by precision "
            f"{runtime.precision}."
        )
    # Transformers reads this variable after its own arguments, so it would win silently.
    os.environ["ACCELERATE_MIXED_PRECISION"] = mixed
    if cpu:
        os.environ["ACCELERATE_USE_CPU"] = "True"
        threads = os.environ.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(
            int(threads) if threads.isdigit() else max(1, (os.cpu_count() or 1) // ranks.local_world_size)
        )
    else:
        torch.cuda.set_device(ranks.local_rank)
    if ranks.world_size > 1:
        meeting = {**meeting, "timeout": timedelta(seconds=settings.ddp_timeout)}
    with told_after(TOLD_SECONDS, ranks) if ranks.world_size > 1 and ranks.is_main else contextlib.nullcontext():
        state = PartialState(cpu=cpu, **meeting)
    if state.num_processes != ranks.world_size:
        raise UserError(
            f"The launcher announced WORLD_SIZE {ranks.world_size}, but {counted(state.num_processes, 'process')} "
            "formed a group; use one of accelerate_configs/, which are tested, or torchrun."
        )
    if ranks.world_size > 1:
        import torch.distributed as dist

        runtime.control_group = dist.new_group(backend="gloo", timeout=control_timeout(settings))
    runtime.locations = runtime.gather(this_location(ranks))
    layout = {
        "sharding": describe_sharding(runtime.sharding, runtime.offload, runtime.copies, ranks.world_size),
        "device": runtime.device_type,
        "precision": runtime.precision,
    }
    check_alike(runtime.gather, {**layout, **code_facts()}, option_facts(settings), runtime.locations)
    if ranks.nodes > 1:
        check_secret(runtime.gather, ranks, os.environ.get(SECRET, ""), runtime.locations)


def _stop_processes(runtime: Runtime) -> None:
    """Destroy the process group, if there is one, after everything that uses it.

    A group that is left to the end of Python may abort the process (gloo), or keep it from ending (NCCL after
    FlashAttention 4).
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    gc.collect()
    failed = sys.exc_info()[0] is not None
    if runtime.ranks.world_size == 1:
        # The error that ended the run is told, not one that follows from it.
        with contextlib.suppress(RuntimeError) if failed else contextlib.nullcontext():
            dist.destroy_process_group()
    elif not failed:
        runtime.barrier()
        dist.destroy_process_group()
