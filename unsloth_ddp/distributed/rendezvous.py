"""Bring the ranks of a job together so that no stranger can take a rank's place.

torch's own rendezvous is a TCP store that listens on every interface and believes whoever connects. On one machine the
ranks meet in a file instead: in a folder that only this user can open, while gloo and NCCL are bound to the loopback
interface. Over several machines torch's store remains, and the ranks prove to each other that they hold the secret
that the launch files gave to every node.
"""

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.utils.errors import UserError, os_reason

# Set by cluster/ssh.sh, slurm.sbatch and pbs.sh, alike on every node of a job.
SECRET = "UNSLOTH_DDP_SECRET"  # noqa: S105 (the name of the variable)

POLL_SECONDS = 0.02
# Ranks of one launcher start within a few seconds of each other, on several machines within more.
TOLD_SECONDS = 10.0
LEAVE_SECONDS = 5.0


def listen_on_loopback(environ: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL listen on the loopback interface only; for jobs on one machine.

    NCCL only bootstraps over this interface: between the GPUs of a machine data goes over NVLink, PCIe or shared
    memory all the same. An interface that the environment names is for jobs over several machines, and is replaced.
    """
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback:
        environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=f"={loopback}")


@contextlib.contextmanager
def rendezvous(ranks: Ranks, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the arguments that let torch's init_process_group meet the other ranks; for as long as the job lasts.

    Raises:
        UserError: the folder of the meeting is not this user's own, or rank 0 does not come.
    """
    # A single process forms a group too where a launcher started it on a GPU.
    if ranks.nodes > 1 or "LOCAL_RANK" not in os.environ:
        yield {}
        return
    listen_on_loopback(os.environ)
    folder = private_folder()
    name = job_name(os.environ)
    if ranks.is_main:
        remove_abandoned(folder)
        meeting = _open_meeting(folder, name)
    else:
        with told_after(TOLD_SECONDS, ranks):
            meeting = _find_meeting(folder, name, seconds)
    yield {"init_method": f"file://{meeting / 'store'}", "rank": ranks.rank, "world_size": ranks.world_size}
    _leave(meeting, ranks)


@contextlib.contextmanager
def told_after(seconds: float, ranks: Ranks) -> Iterator[None]:
    """Print which ranks are awaited if the block takes longer than so many seconds."""
    others = f"ranks 1 to {ranks.world_size - 1}" if ranks.world_size > 2 else "rank 1"
    place = " and ".join(f"{name} {os.environ.get(name)}" for name in ("MASTER_ADDR", "MASTER_PORT"))
    sentence = (
        f"Rank {ranks.rank} of WORLD_SIZE {ranks.world_size} waits for {others if ranks.is_main else 'rank 0'} at "
        f"{place} ... If no launcher "
        "started them, these variables are left from another job: unset WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR "
        "and MASTER_PORT."
    )
    timer = threading.Timer(seconds, lambda: print(sentence, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def private_folder() -> Path:
    """Return the folder below the temporary one that holds this user's meetings; nobody else can open it.

    Raises:
        UserError: someone else made it, or others can write to it.
    """
    base = tempfile.gettempdir()
    if any(mark in base for mark in "?#"):
        raise UserError(f"TMPDIR is {base}, but ranks cannot meet in a path with ? or #; set it to another folder.")
    folder = Path(base, f"unsloth_ddp-{os.geteuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise UserError(
            f"{folder}, where the ranks of this machine meet, cannot be made: {os_reason(error)}; set TMPDIR to a "
            "folder that can be written."
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UserError(
            f"{folder}, where the ranks of this machine meet, is not a folder that only user {os.geteuid()} can open; "
            "remove it, or set TMPDIR to a folder of your own."
        )
    return folder


def job_name(environ: Mapping[str, str]) -> str:
    """Return a name for the job that its ranks on one machine derive alike and that no other running job has."""
    parts = [environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")]
    parts += [environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
    # A launcher that was killed leaves ranks behind, and the next one may take its port. torch's agent makes a folder
    # of its own for every attempt: FOLDER/LOCAL_RANK/error.json.
    error_file = Path(environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if error_file.parent.name == environ.get("LOCAL_RANK"):
        parts.append(str(error_file.parent.parent))
    # Containers may share the temporary folder, and have ports of their own.
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _open_meeting(folder: Path, name: str) -> Path:
    """Make the meeting of a job, as its rank 0: a new folder, locked for as long as this process lives."""
    if any(is_held(meeting) for meeting in folder.glob(f"{name}.*")):
        raise UserError(
            f"Another job on this machine uses MASTER_PORT {os.environ.get('MASTER_PORT')}; wait for its end, or give "
            "each job a port of its own."
        )
    aside = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
    lock = os.open(aside / "lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        raise UserError(
            f"{folder}, where the ranks of this machine meet, is on a file system without locks "
            f"({os_reason(error)}); set TMPDIR to a local folder."
        ) from None
    # A forked child (a loader of data) would hold the lock for longer than this process lives.
    os.register_at_fork(after_in_child=lambda: _close(lock))
    # Others look for the final name, and find it locked.
    return aside.rename(folder / f"{name}.{secrets.token_hex(8)}")


def _close(lock: int) -> None:
    with contextlib.suppress(OSError):
        os.close(lock)


def _find_meeting(folder: Path, name: str, seconds: float) -> Path:
    """Return the meeting that rank 0 of this job holds, once it does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for meeting in folder.glob(f"{name}.*"):
            if is_held(meeting):
                return meeting
        time.sleep(POLL_SECONDS)
    raise UserError(
        f"Rank 0 did not reach {folder} within {seconds:.0f} s; check its output, and check that all ranks of this "
        "machine have the same TMPDIR, MASTER_ADDR and MASTER_PORT."
    )


def is_held(meeting: Path) -> bool:
    """Return whether the rank 0 that made a meeting is alive; the lock of a process that ends is dropped."""
    try:
        lock = os.open(meeting / "lock", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def remove_abandoned(folder: Path) -> None:
    """Remove the meetings that killed jobs left."""
    for meeting in folder.glob("[0-9a-f]*.*"):
        if not is_held(meeting):
            # Renamed first, so that nobody finds a meeting that is half removed.
            with contextlib.suppress(OSError):
                aside = meeting.rename(folder / f".old-{secrets.token_hex(8)}")
                shutil.rmtree(aside, ignore_errors=True)


def _leave(meeting: Path, ranks: Ranks) -> None:
    """Say that this rank needs the meeting no more; rank 0 removes it once all have said so.

    Where one does not, the folder stays until the next job of this user removes it: a store that is gone would hold
    up whoever still asks it.
    """
    with contextlib.suppress(OSError):
        if not ranks.is_main:
            (meeting / f"left-{ranks.rank}").touch()
            return
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline:
            if len(list(meeting.glob("left-*"))) == ranks.world_size - 1:
                shutil.rmtree(meeting, ignore_errors=True)
                return
            time.sleep(POLL_SECONDS)


def proof(secret: str, rank: int, challenges: list[str]) -> str:
    """Return what shows that a rank holds the secret, in answer to the random texts of all ranks."""
    return hmac.new(secret.encode(), "\0".join([str(rank), *challenges]).encode(), hashlib.sha256).hexdigest()


def check_secret(gather: Callable[[Any], list[Any]], ranks: Ranks, secret: str, places: list[Any]) -> None:
    """Have every rank prove that it holds the secret of the launch files, without sending it.

    Raises:
        UserError: on every rank, naming one that has no secret, or another one.
    """
    holders = gather(bool(secret))
    if not any(holders):
        return
    challenges = [str(text) for text in gather(secrets.token_hex(16))]
    proofs = gather(proof(secret, ranks.rank, challenges) if secret else "")
    if secret:
        wrong = [r for r, p in enumerate(proofs) if not hmac.compare_digest(str(p), proof(secret, r, challenges))]
    else:
        wrong = [ranks.rank]
    # Each rank judges for itself; what they found is not exchanged, since a stranger would have a say in it.
    if wrong:
        raise UserError(
            f"{places[wrong[0]]} does not hold the secret of this job ({SECRET}), so it may not belong to this job; "
            f"start every node with the same launch file, or set {SECRET} to the same text on each, or on none."
        )
