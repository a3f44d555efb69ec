"""Ranks, devices, and what has to happen before `import unsloth`: the one module that imports it.

A launcher (accelerate launch, torchrun) describes the job in environment variables; plain python is one process.
Decisions that only one process can take (read the data, choose the run's name) are taken there and told to the
others, failures included, so that no rank is left waiting.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import psutil

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources import is_file
from unsloth_ddp.distributed.sharding import (
    TRUE,
    Sharding,
    check_sharding,
    complete_environment,
    sharding_from_environment,
)
from unsloth_ddp.utils.errors import UserError

T = TypeVar("T")
logger = logging.getLogger("unsloth_ddp")

# Older Unsloth releases patch trainers and build CUDA extensions in every rank unless told not to.
UNSLOTH_FLAGS = {"UNSLOTH_DISABLE_TRAINER_PATCHING": "1", "UNSLOTH_NO_CUDA_EXTENSIONS": "1"}
# What a folder of Unsloth's compiled modules holds, beside __pycache__.
COMPILED = (".py", ".pyc", ".lock")
EXIT_FAILURE, EXIT_USER_ERROR, EXIT_STOPPED = 1, UserError.exit_code, 75


@dataclass(frozen=True)
class Ranks:
    """Where this process stands in the job, as its launcher says."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        """The one process that prints and writes what there is one of."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """The one process of each node that prepares what its node shares."""
        return self.local_rank == 0

    @property
    def node_rank(self) -> int:
        """Which machine this process is on; launchers number the processes of one machine in a row."""
        return self.rank // self.local_world_size

    @property
    def nodes(self) -> int:
        """Number of machines; every node runs the same number of processes."""
        return max(1, self.world_size // self.local_world_size)


def ranks_from_environment(environ: Mapping[str, str] = os.environ) -> Ranks:
    """The launcher's variables, with those of a single process as defaults.

    Raises:
        UserError: a variable is not a number, or says that there are no processes.
    """

    def number(name: str, default: int) -> int:
        text = environ.get(name, str(default))
        if not text.isdigit():
            raise UserError(f"The environment variable {name} is {text!r}, but it takes a whole number; unset it.")
        return int(text)

    world_size = number("WORLD_SIZE", 1)
    ranks = Ranks(number("RANK", 0), number("LOCAL_RANK", 0), world_size, number("LOCAL_WORLD_SIZE", world_size))
    if ranks.rank >= ranks.world_size or ranks.local_rank >= ranks.local_world_size:
        raise UserError(
            f"RANK {ranks.rank} of WORLD_SIZE {ranks.world_size} and LOCAL_RANK {ranks.local_rank} of "
            f"LOCAL_WORLD_SIZE {ranks.local_world_size} contradict each other; start with accelerate launch or torchrun."
        )
    return ranks


def use_cache_if_hub_is_unreachable(settings: Settings) -> None:
    """Switch the Hub's libraries to their caches where it cannot be reached: they retry for minutes otherwise.

    To be called before any of them is imported. A proxy or a mirror is left to answer for itself.
    """
    sources = [str(settings.model), *settings.dataset, *settings.eval_dataset]
    decided = ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    if all(is_file(source) for source in sources) or any(name in os.environ for name in decided):
        return
    try:
        socket.create_connection(("huggingface.co", 443), timeout=5).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"


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


@dataclass(frozen=True)
class Place:
    """Where one rank runs; as text, what a message that names it says."""

    rank: int
    node: int
    host: str
    pid: int
    # Tells the process from a later one of the same id.
    started: float

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}, host {self.host}, pid {self.pid})"


def this_place(ranks: Ranks) -> Place:
    """Where this process runs."""
    me = psutil.Process()
    return Place(ranks.rank, ranks.node_rank, socket.gethostname(), me.pid, me.create_time())


@dataclass
class Progress:
    """How far this process is, written by the training thread for whoever watches it.

    `moves` grows with everything that shows life: a micro-batch, a step, a batch of evaluation.
    """

    step: int = 0
    moves: int = 0
    phase: Literal["preparing", "training", "evaluating", "saving", "finishing"] = "preparing"
    changed: Callable[[], None] = lambda: None

    def enter(self, phase: Literal["preparing", "training", "evaluating", "saving", "finishing"]) -> None:
        """Begin a phase; whoever watches is told at once, since what is a hang depends on it."""
        self.phase = phase
        self.moves += 1
        self.changed()

    @contextlib.contextmanager
    def doing(self, phase: Literal["evaluating", "saving"]) -> Iterator[None]:
        """A phase within another."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)


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
    places: list[Place] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)

    @property
    def device_map(self) -> dict[str, str | int] | None:
        """The whole model on this process's own device; None where DeepSpeed places every weight itself."""
        if self.sharding == "zero3":
            return None
        return {"": self.ranks.local_rank if self.device_type == "cuda" else "cpu"}

    def wait(self) -> None:
        """Wait until every process is here (up to alone_timeout)."""
        if self.control_group is not None:
            import torch.distributed as dist

            dist.barrier(group=self.control_group)

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, in rank order, on every rank."""
        if self.control_group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(values, value, group=self.control_group)
        return values

    def alone(self, work: Callable[[], T], *, per_node: bool = False) -> T | None:
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

    def from_main(self, work: Callable[[], T]) -> T:
        """The result of `work` in the main process, on every rank."""
        result = self.alone(work)
        return self.gather(result)[0]  # type: ignore[return-value]

    def hand_out(self, work: Callable[[], list[T]]) -> T:
        """This rank's item of the list that `work` returns in the main process, one item a rank.

        Each rank is sent its own item only. Failures are raised as by `alone`.
        """
        if self.control_group is None:
            return work()[0]
        import torch.distributed as dist

        items: list[Any] | None = None
        failure = None
        if self.ranks.is_main:
            try:
                items = [(item, None) for item in work()]
            except Exception as error:
                failure = error
                items = [(None, _told(error))] * self.ranks.world_size
        received: list[Any] = [None]
        dist.scatter_object_list(received, items, src=0, group=self.control_group)
        if failure is not None:
            raise failure
        item, outcome = received[0]
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
    _start_processes(runtime, settings)
    try:
        with runtime.cleanup:
            yield runtime
    finally:
        _stop_processes(runtime)


def quiet_imports() -> None:
    """No word of what libraries say at import: deprecations inside torchao, 4-bit kernels for CPUs; no user could act on it."""
    for library in ("torch.utils._pytree", "bitsandbytes"):
        logging.getLogger(library).setLevel(logging.ERROR)


def import_backend(runtime: Runtime, settings: Settings) -> None:
    """Import Unsloth, where it is the backend: after the process group, before Transformers, TRL and PEFT.

    Raises:
        UserError: Unsloth is installed but does not import on this machine.
    """
    if runtime.backend != "unsloth":
        if settings.compiled_cache_dir or settings.clear_compiled_cache:
            print("compiled_cache_dir and clear_compiled_cache are ignored: only the unsloth backend compiles modules.")
        return
    runtime.cleanup.enter_context(_compiled_cache(runtime, settings))
    for name, value in UNSLOTH_FLAGS.items():
        os.environ.setdefault(name, value)
    try:
        import unsloth  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"backend unsloth: Unsloth does not import here ({error}); use --backend transformers."
        ) from None


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


def alone_timeout(settings: Settings) -> timedelta:
    """How long the others wait for what one process does alone (tokenize, merge): it grows with the data.

    An hour, and a second for every 200 kB of local rows; eight hours where rows come from the Hub, whose size is
    not known here. A process that dies ends the wait at once.
    """
    sizes = [Path(s).expanduser() for s in [*settings.dataset, *settings.eval_dataset]]
    if not all(path.is_file() for path in sizes):
        return timedelta(hours=8)
    return timedelta(hours=1, seconds=sum(path.stat().st_size for path in sizes) / 200_000)


def _start_processes(runtime: Runtime, settings: Settings) -> None:
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
    timeout = timedelta(seconds=settings.ddp_timeout)
    state = PartialState(cpu=cpu, timeout=timeout) if ranks.world_size > 1 else PartialState(cpu=cpu)
    if state.num_processes != ranks.world_size:
        raise UserError(
            f"The launcher announced WORLD_SIZE {ranks.world_size}, but {state.num_processes} processes formed a group; "
            "use one of accelerate_configs/, which are tested, or torchrun."
        )
    if ranks.world_size > 1:
        import torch.distributed as dist

        runtime.control_group = dist.new_group(backend="gloo", timeout=alone_timeout(settings))
    runtime.places = runtime.gather(this_place(ranks))


@contextlib.contextmanager
def _compiled_cache(runtime: Runtime, settings: Settings) -> Iterator[None]:
    """Point Unsloth at a folder for its compiled modules, before it is imported.

    Unless one is named, it is a new folder on the node's local disk, told by the node's first process to the
    others and removed at the end: ranks share it, other jobs and a shared home folder never see it.
    """
    named = settings.compiled_cache_dir or os.environ.get("UNSLOTH_COMPILE_LOCATION")

    def prepare() -> str:
        if not named:
            return tempfile.mkdtemp(prefix="unsloth_compiled_cache_")
        folder = Path(named).expanduser().resolve()
        try:
            if settings.clear_compiled_cache:
                _clear_compiled_modules(folder)
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"compiled_cache_dir {folder} cannot be written: {error.strerror or error}; name another, or none."
            ) from None
        return str(folder)

    mine = runtime.alone(prepare, per_node=True)
    local_mains = runtime.gather(mine)
    node_main = runtime.ranks.rank - runtime.ranks.local_rank
    folder = local_mains[node_main]
    assert folder is not None
    os.environ["UNSLOTH_COMPILE_LOCATION"] = folder
    try:
        yield
    finally:
        if not named and runtime.ranks.is_local_main:
            shutil.rmtree(folder, ignore_errors=True)


def _clear_compiled_modules(folder: Path) -> None:
    """Empty a folder of compiled modules; one that holds anything else was named by mistake."""
    if not folder.exists():
        return
    other = next(
        (path for path in folder.iterdir() if path.suffix not in COMPILED and path.name != "__pycache__"), None
    )
    if other is None and Path.cwd().is_relative_to(folder):
        other = Path.cwd()
    if other is not None:
        raise UserError(
            f"compiled_cache_dir {folder} holds {other.name}, which is no compiled module, so clear_compiled_cache leaves "
            "it alone; name a folder that holds nothing else."
        )
    shutil.rmtree(folder)


@contextlib.contextmanager
def quiet(active: bool = True) -> Iterator[None]:
    """Drop what libraries print to standard output; errors still reach standard error."""
    if not active:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _stop_processes(runtime: Runtime) -> None:
    """Take the process group down once everything that uses it is gone; gloo may abort at exit otherwise."""
    if runtime.control_group is None:
        return
    import torch.distributed as dist

    gc.collect()
    if sys.exc_info()[0] is None:
        runtime.wait()
        dist.destroy_process_group()


def note_exit_code(code: int, environ: Mapping[str, str] = os.environ) -> None:
    """Leave this process's exit code where the job's script finds it: launchers turn every code into 1.

    The first process of each node writes the file named by UNSLOTH_DDP_EXIT_CODE_FILE, if it is set.
    """
    path = environ.get("UNSLOTH_DDP_EXIT_CODE_FILE")
    if code and path and environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):
            Path(path).write_text(f"{code}\n", encoding="utf-8")


def exit_with(error: UserError, is_main: bool) -> NoReturn:
    """End this process over a user's mistake (or a RunError): the main process says the sentence, the others stay silent.

    Launchers end every process as soon as one has failed, so the others leave the main process time to speak.
    """
    if is_main:
        print(f"train_ddp.py: error: {error}", file=sys.stderr, flush=True)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Event().wait(timeout=20)
    note_exit_code(error.exit_code)
    os._exit(error.exit_code)
