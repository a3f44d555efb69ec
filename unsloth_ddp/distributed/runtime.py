"""Bring up the processes of a run, give them collectives that raise failures on every rank alike, and take them down.

A launcher (accelerate launch, torchrun) describes the job in environment variables; plain python is one process.
Work that only one process can do (read the rows, choose the run's name) is done there and sent to the others, failures
included, so that no rank is left waiting.
"""

from __future__ import annotations

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
from unsloth_ddp.distributed.progress import Progress
from unsloth_ddp.distributed.ranks import RankLocation, Ranks, this_location
from unsloth_ddp.distributed.rendezvous import check_secret, rendezvous, secret_of
from unsloth_ddp.distributed.sharding import (
    TRUE,
    Sharding,
    check_sharding,
    complete_environment,
    sharding_from_environment,
)
from unsloth_ddp.utils.errors import UserError

T = TypeVar("T")


def asks_for_cpu(settings: Settings, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the run is on the CPU by choice: the option's, or the accelerate config's."""
    return settings.use_cpu or environ.get("ACCELERATE_USE_CPU", "").lower() in TRUE


def choose_backend(wanted: str, accelerator: bool) -> Literal["unsloth", "transformers"]:
    """The backend that runs here.

    Raises:
        UserError: Unsloth was asked for on a machine without an accelerator.
    """
    if wanted == "unsloth" and not accelerator:
        raise UserError(
            "backend unsloth needs an accelerator and none is found here; use --backend transformers, or auto."
        )
    if wanted == "auto":
        return "unsloth" if accelerator else "transformers"
    return "unsloth" if wanted == "unsloth" else "transformers"


@dataclass
class Runtime:
    """What the rest of a run needs to know about the processes and the device."""

    ranks: Ranks
    backend: Literal["unsloth", "transformers"]
    device_type: Literal["cuda", "cpu"]
    precision: Literal["bf16", "fp16", "fp32"]
    device_name: str
    sharding: Sharding = "none"
    control_group: Any = None
    cleanup: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    locations: list[RankLocation] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)

    @property
    def device_map(self) -> dict[str, str | int] | None:
        """The whole model on this process's own device; None where DeepSpeed places every weight itself."""
        if self.sharding == "zero3":
            return None
        return {"": self.ranks.local_rank if self.device_type == "cuda" else "cpu"}

    def barrier(self) -> None:
        """Wait until every process is here, for control_timeout at most."""
        if self.control_group is not None:
            import torch.distributed as dist

            dist.barrier(group=self.control_group)

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, in rank order, on every rank."""
        if self.control_group is None:
            return [value]
        return wire.all_gather(value, self.control_group)

    def on_main(self, work: Callable[[], T], *, per_node: bool = False) -> T | None:
        """Run `work` in the main process (`per_node`: in one process of each node) while the others wait.

        Returns the result where it ran and None elsewhere. A UserError is raised on every rank alike; any other
        exception is raised where it happened, and as a RuntimeError elsewhere.
        """
        result, failure = None, None
        if self.ranks.is_local_main if per_node else self.ranks.is_main:
            try:
                result = work()
            except Exception as error:
                failure = error
        outcomes = self.gather(_told(failure))
        if failure is not None:
            raise failure
        for rank, outcome in enumerate(outcomes):
            if outcome is not None:
                raise _failure_of(rank, outcome)
        return result

    def broadcast_from_node_main(self, work: Callable[[], T]) -> T:
        """The result of `work` in the first process of this rank's node, on every rank of that node."""
        results = self.gather(self.on_main(work, per_node=True))
        return results[self.ranks.rank - self.ranks.local_rank]  # type: ignore[return-value]

    def broadcast_from_main(self, work: Callable[[], T]) -> T:
        """The result of `work` in the main process, on every rank."""
        result = self.on_main(work)
        return self.gather(result)[0]  # type: ignore[return-value]

    def scatter_from_main(self, work: Callable[[], list[T]]) -> T:
        """This rank's item of the list that `work` returns in the main process, one item a rank.

        Each rank is sent its own item only. Failures are raised as by `on_main`.
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
                items = [(None, _told(error))] * self.ranks.world_size
        item, outcome = wire.scatter(items, self.control_group)
        if failure is not None:
            raise failure
        if outcome is not None:
            raise _failure_of(0, outcome)
        return item


def _told(failure: Exception | None) -> tuple[bool, str] | None:
    """What the other ranks are told of a failure: whether it is the user's to mend, and its text."""
    return None if failure is None else (isinstance(failure, UserError), str(failure))


def _failure_of(rank: int, told: tuple[bool, str]) -> Exception:
    mendable, text = told
    return UserError(text) if mendable else RuntimeError(f"rank {rank} failed: {text}")


@contextlib.contextmanager
def started(settings: Settings, ranks: Ranks) -> Iterator[Runtime]:
    """Bring up the processes of a run; on leaving, take them down in order."""
    import torch

    cuda = torch.cuda.is_available() and not asks_for_cpu(settings)
    if cuda and ranks.local_world_size > torch.cuda.device_count():
        raise UserError(
            f"{ranks.local_world_size} processes were started on this machine, which shows "
            f"{torch.cuda.device_count()} GPUs; start at most one a GPU (--num_processes, --nproc_per_node)."
        )
    runtime = Runtime(
        ranks=ranks,
        backend=choose_backend(settings.backend, cuda),
        device_type="cuda" if cuda else "cpu",
        precision=_choose_precision(settings.precision, cuda),
        device_name=torch.cuda.get_device_name(ranks.local_rank) if cuda else "CPU",
        sharding=sharding_from_environment(os.environ),
    )
    check_sharding(runtime.sharding, settings, runtime.device_type, runtime.backend, ranks.world_size)
    complete_environment(runtime.sharding, os.environ)
    quiet_imports()
    with rendezvous(ranks, settings.ddp_timeout) as meeting:
        _start_processes(runtime, settings, meeting)
        try:
            with runtime.cleanup:
                yield runtime
        finally:
            _stop_processes(runtime)


def quiet_imports() -> None:
    """No word of what libraries say at import: deprecations inside torchao, 4-bit kernels for CPUs; no user could act on it."""
    for library in ("torch.utils._pytree", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)


def _choose_precision(wanted: str, cuda: bool) -> Literal["bf16", "fp16", "fp32"]:
    import torch

    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if cuda else True
    if wanted == "bf16" and not has_bf16:
        raise UserError(f"precision bf16 is not supported by {torch.cuda.get_device_name()}; use --precision fp16.")
    if wanted == "fp16" and not cuda:
        raise UserError("precision fp16 needs a GPU; use --precision fp32 or bf16 on a CPU.")
    if wanted == "auto":
        return ("bf16" if has_bf16 else "fp16") if cuda else "fp32"
    return "bf16" if wanted == "bf16" else "fp16" if wanted == "fp16" else "fp32"


def control_timeout(settings: Settings) -> timedelta:
    """Return how long the others wait for work of one process (tokenizing, merging): it grows with the data.

    An hour, and a second for every 200 kB of local rows; eight hours where rows come from the Hub, whose size is
    not known here. A process that dies ends the wait at once.
    """
    sizes = [Path(s).expanduser() for s in [*settings.dataset, *settings.eval_dataset]]
    if not all(path.is_file() for path in sizes):
        return timedelta(hours=8)
    return timedelta(hours=1, seconds=sum(path.stat().st_size for path in sizes) / 200_000)


def _start_processes(runtime: Runtime, settings: Settings, meeting: dict[str, Any]) -> None:
    import torch
    from accelerate import PartialState

    ranks, cpu = runtime.ranks, runtime.device_type == "cpu"
    launcher_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    mixed = "no" if runtime.precision == "fp32" else runtime.precision
    if launcher_precision not in ("no", mixed):
        print(
            f"mixed_precision {launcher_precision} of the accelerate config is overridden by precision {runtime.precision}."
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
    state = PartialState(cpu=cpu, **meeting)
    if state.num_processes != ranks.world_size:
        raise UserError(
            f"The launcher announced WORLD_SIZE {ranks.world_size}, but {state.num_processes} processes formed a group; "
            "use one of accelerate_configs/, which are tested, or torchrun."
        )
    if ranks.world_size > 1:
        import torch.distributed as dist

        runtime.control_group = dist.new_group(backend="gloo", timeout=control_timeout(settings))
    runtime.locations = runtime.gather(this_location(ranks))
    if ranks.nodes > 1:
        check_secret(runtime.gather, ranks, secret_of(), runtime.locations)


def _stop_processes(runtime: Runtime) -> None:
    """Take the process group down once everything that uses it is gone; gloo may abort at exit otherwise."""
    if runtime.control_group is None:
        return
    import torch.distributed as dist

    gc.collect()
    if sys.exc_info()[0] is None:
        runtime.barrier()
        dist.destroy_process_group()
