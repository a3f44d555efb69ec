"""Read from the launcher's variables which process of the job this is, and name ranks in messages."""

import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import psutil

from unsloth_ddp.distributed.wire import sendable
from unsloth_ddp.utils.errors import UserError

# Variables in which MPI's launchers give the number of processes, and that of this one.
MPI = {
    "PMI_SIZE": "PMI_RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
}


@dataclass(frozen=True)
class Ranks:
    """The position of this process in the job, as its launcher gives it."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Return whether this is the main process, which prints and writes the files of the run."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Return whether this is the first process of its node, which prepares what the node shares."""
        return self.local_rank == 0

    @property
    def node_rank(self) -> int:
        """Return the number of this process's machine; launchers number the processes of one machine consecutively."""
        return self.rank // self.local_world_size

    @property
    def nodes(self) -> int:
        """Return the number of machines; every node runs the same number of processes."""
        return max(1, self.world_size // self.local_world_size)


def ranks_from_environment(environ: Mapping[str, str] = os.environ) -> Ranks:
    """Read the launcher's variables; the defaults are those of a single process.

    Raises:
        UserError: a variable is not a number, or they are not those of a launcher.
    """

    def number(name: str, default: int) -> int:
        text = environ.get(name, str(default))
        if not text.isdigit():
            raise UserError(f"The environment variable {name} is {text!r}, but it takes a whole number; unset it.")
        return int(text)

    world_size = number("WORLD_SIZE", 1)
    if world_size > 1 and (missing := [name for name in ("RANK", "LOCAL_RANK") if name not in environ]):
        raise UserError(
            f"The environment variable WORLD_SIZE is {world_size}, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set, so no launcher started this process; unset WORLD_SIZE, "
            "or start with "
            "accelerate launch or torchrun."
        )
    ranks = Ranks(number("RANK", 0), number("LOCAL_RANK", 0), world_size, number("LOCAL_WORLD_SIZE", world_size))
    if ranks.rank >= ranks.world_size or ranks.local_rank >= ranks.local_world_size:
        raise UserError(
            f"RANK {ranks.rank} of WORLD_SIZE {ranks.world_size} and LOCAL_RANK {ranks.local_rank} of "
            f"LOCAL_WORLD_SIZE {ranks.local_world_size} contradict each other; start with accelerate launch or "
            "torchrun."
        )
    return ranks


def node_range(environ: Mapping[str, str] = os.environ) -> range:
    """Return the numbers of nodes with which an elastic job may go on (node.sh --min_nodes); empty for other jobs."""
    lowest, _, highest = environ.get("UNSLOTH_DDP_NODES", "").partition(":")
    return range(int(lowest), int(highest) + 1) if lowest.isdigit() and highest.isdigit() else range(0)


def forget_mpi(environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove what srun or mpirun left in a shell, which accelerate takes for a job of several processes.

    Raises:
        UserError: mpirun or srun started this process as one of several.
    """
    if "WORLD_SIZE" in environ:
        return
    for size, rank in MPI.items():
        count, number = environ.get(size, "1"), environ.get(rank, "0")
        if number != "0":
            raise UserError(
                f"{rank} is {number} and {size} is {count}, so srun or mpirun started this process as one of "
                "several; start with accelerate "
                f"launch or torchrun, once per machine (cluster/slurm.sbatch), or unset {rank} and {size} for a "
                "single process."
            )
        if count != "1":
            print(f"{size} {count} is ignored: no accelerate launch or torchrun started this process.", flush=True)
        environ.pop(size, None)
        environ.pop(rank, None)


@sendable
@dataclass(frozen=True)
class RankLocation:
    """The host and process of one rank; as text, how messages name it."""

    rank: int
    node: int
    host: str
    pid: int
    # Start in seconds after boot, which distinguishes the process from a later one with the same id.
    started: float

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}, host {self.host}, pid {self.pid})"


def this_location(ranks: Ranks) -> RankLocation:
    """Return the host and id of this process."""
    me = psutil.Process()
    return RankLocation(ranks.rank, ranks.node_rank, socket.gethostname(), me.pid, seconds_after_boot(me))


def seconds_after_boot(process: psutil.Process) -> float:
    """Return when a process began; unlike its time of day, this stays when the clock is set."""
    return process.create_time() - psutil.boot_time()
