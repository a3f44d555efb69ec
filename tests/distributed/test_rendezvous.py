"""The ranks of a job meet where no stranger can take a rank's place, and a job that was killed is in nobody's way."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.distributed.groups import Group
from tests.ranks import free_port, run_ranks
from tests.unpickled import Touch
from tests.waiting import wait_until
from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed import rendezvous
from unsloth_ddp.distributed.ranks import Ranks, ranks_from_environment
from unsloth_ddp.distributed.runtime import started
from unsloth_ddp.utils.errors import UserError

# ---- a stranger on the network ----


def other_address() -> str:
    """Return an address of this machine that is not 127.0.0.1, as strangers see it."""
    found = [a.address for one in psutil.net_if_addrs().values() for a in one if a.family == socket.AF_INET]
    return next((address for address in found if not address.startswith("127.")), "127.0.0.2")


def stranger(folder: Path) -> None:
    """Try for a while to become rank 1 before the real one; whoever unpickles what it sends writes the file `ran`."""
    import torch.distributed as dist

    address, port = other_address(), int(os.environ["MASTER_PORT"])
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
            continue
        os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR=address, RANK="1")
        dist.init_process_group("gloo", timeout=timedelta(seconds=10))
        group = dist.new_group(backend="gloo")
        dist.all_gather_object([None, None], Touch(folder / "ran"), group=group)
        return


def job_under_attack(folder: str) -> None:
    """Rank 0 starts, then the stranger (RANK 2) tries to get in, then rank 1 starts."""
    place = Path(folder)
    if os.environ["RANK"] == "2":
        wait_until((place / "rank 0 starts").exists, 60, "rank 0")
        try:
            stranger(place)
        finally:
            (place / "the stranger is done").touch()
        return
    ranks = ranks_from_environment()
    if ranks.is_main:
        (place / "rank 0 starts").touch()
    else:
        wait_until((place / "the stranger is done").exists, 60, "the stranger")
    with started(Settings(use_cpu=True), ranks) as runtime:
        listening = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        found = {"ranks": runtime.gather(ranks.rank), "listening": listening}
        (place / f"{ranks.rank}.json").write_text(json.dumps(found))


def test_a_stranger_cannot_become_a_rank_of_a_job_on_one_machine(tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    result = run_ranks(3, job_under_attack, str(tmp_path), folder=tmp_path / "out", environ=world, end=False)
    assert not (tmp_path / "ran").exists(), "the stranger's code ran"
    assert result.codes == [0, 0, 0], result.output
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["ranks"] == [0, 1]
        assert found["listening"]
        assert set(found["listening"]) <= {"127.0.0.1", "::1"}, "a rank listens beyond loopback"


# ---- the folder of the meeting ----


@pytest.fixture
def base(tmp_path, monkeypatch) -> Path:
    """The temporary folder of this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_can_be_opened_by_its_user_only(base):
    folder = rendezvous.private_folder()
    assert folder.parent == base
    assert folder.stat().st_mode & 0o777 == 0o700
    assert rendezvous.private_folder() == folder


def test_a_folder_that_a_stranger_made_is_refused(base, monkeypatch):
    other = os.geteuid() + 1
    (base / f"unsloth_ddp-{other}").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(UserError, match=r"unsloth_ddp-\d+, where .* only user \d+ can open; remove it, or set TMPDIR"):
        rendezvous.private_folder()


def test_a_link_or_an_open_folder_is_refused(base):
    folder = base / f"unsloth_ddp-{os.geteuid()}"
    (base / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(base / "elsewhere")
    with pytest.raises(UserError, match="can open"):
        rendezvous.private_folder()
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.raises(UserError, match="can open"):
        rendezvous.private_folder()


def test_a_temporary_folder_that_cannot_serve_is_named(base, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(base / "missing"))
    with pytest.raises(UserError, match="cannot be made: No such file or directory; set TMPDIR"):
        rendezvous.private_folder()
    monkeypatch.setattr(tempfile, "tempdir", str(base / "what?"))
    with pytest.raises(UserError, match="cannot meet in a path with"):
        rendezvous.private_folder()


def test_jobs_have_different_names_and_the_ranks_of_one_the_same():
    launched = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "6001",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "LOCAL_RANK": "0",
        "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_b/attempt_0/0/error.json",
    }
    second_rank = {"LOCAL_RANK": "1", "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_b/attempt_0/1/error.json"}
    name = rendezvous.job_name(launched)
    assert rendezvous.job_name(launched | second_rank) == name
    others = [
        {"MASTER_PORT": "6002"},
        {"TORCHELASTIC_RESTART_COUNT": "1"},
        {"TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_c/attempt_0/0/error.json"},
    ]
    assert len({name, *(rendezvous.job_name(launched | other) for other in others)}) == 4


def meeting(folder: Path, name: str, held: bool) -> Any:
    """Make a meeting as a job would that still runs (`held`), or that was killed; returns its lock."""
    own = folder / f"{name}.0123"
    own.mkdir()
    (own / "store").write_text("addresses of ranks")
    lock = (own / "lock").open("w")
    if held:
        fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def test_what_a_killed_job_left_is_removed_and_a_running_one_stays(base):
    folder = rendezvous.private_folder()
    locks = [meeting(folder, "aaaa", held=True), meeting(folder, "bbbb", held=False)]
    rendezvous.remove_abandoned(folder)
    assert [one.name for one in folder.iterdir()] == ["aaaa.0123"]
    assert (folder / "aaaa.0123" / "store").exists()
    for lock in locks:
        lock.close()


def test_ranks_pass_by_what_a_killed_job_of_the_same_name_left(base):
    folder = rendezvous.private_folder()
    meeting(folder, "aaaa", held=False).close()
    with pytest.raises(UserError, match=r"Rank 0 did not reach .* within 0 s; .*TMPDIR, MASTER_ADDR and MASTER_PORT"):
        rendezvous._find_meeting(folder, "aaaa", 0.2)
    own = rendezvous._open_meeting(folder, "aaaa")
    assert rendezvous._find_meeting(folder, "aaaa", 5) == own


def test_two_running_jobs_of_the_same_name_are_refused(base, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "6001")
    folder = rendezvous.private_folder()
    rendezvous._open_meeting(folder, "cccc")
    with pytest.raises(UserError, match="Another job on this machine uses MASTER_PORT 6001"):
        rendezvous._open_meeting(folder, "cccc")


def test_a_forked_child_does_not_keep_a_meeting_alive(base):
    folder = rendezvous.private_folder()
    reads, writes = os.pipe()
    owner = os.fork()
    if owner == 0:
        own = rendezvous._open_meeting(folder, "dddd")
        if os.fork() == 0:
            # A loader that outlives the rank until the test has looked.
            os.write(writes, str(own).encode())
            time.sleep(30)
            os._exit(0)
        os._exit(0)
    os.waitpid(owner, 0)
    own = Path(os.read(reads, 4096).decode())
    assert own.exists()
    assert not rendezvous.is_held(own)
    os.close(reads)
    os.close(writes)


def leave_at_the_end(folder: str) -> None:
    """Run a job to its end, or (UNTIL set) kill rank 0 in the middle of it."""
    tempfile.tempdir = folder
    ranks = ranks_from_environment()
    with started(Settings(use_cpu=True), ranks) as runtime:
        runtime.gather(ranks.rank)
        if "UNTIL" in os.environ:
            os.kill(os.getpid(), 9)


def test_jobs_remove_their_meeting_and_follow_one_that_was_killed(tmp_path):
    port = {"MASTER_PORT": str(free_port())}
    killed = run_ranks(2, leave_at_the_end, str(tmp_path), folder=tmp_path / "a", environ={**port, "UNTIL": "killed"})
    assert killed.codes[0] == -9
    folder = tmp_path / f"unsloth_ddp-{os.geteuid()}"
    assert len(list(folder.iterdir())) == 1, "nothing was left behind, so the next start is not tried"
    run_ranks(2, leave_at_the_end, str(tmp_path), folder=tmp_path / "b", environ=port).check()
    assert list(folder.iterdir()) == []


def test_jobs_on_one_machine_use_the_loopback_interface_whatever_the_cluster_names():
    environ = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    rendezvous.listen_on_loopback(environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


@pytest.mark.parametrize("ranks", [Ranks(), Ranks(1, 0, 2, 1)], ids=["plain python", "two nodes"])
def test_other_jobs_meet_as_before(ranks, base, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    with rendezvous.rendezvous(ranks, 1) as arguments:
        assert arguments == {}
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert list(base.iterdir()) == []


# ---- the secret of the launch files ----


class Checked(Group):
    """Ranks that check each other's secrets."""

    def check(self, secrets: list[str]) -> list[str]:
        """Return what each rank that checks the others' secrets is told."""
        told = [""] * self.size

        def one(rank: int) -> None:
            places = [f"rank {r}" for r in range(self.size)]
            try:
                rendezvous.check_secret(self.gather_of(rank), Ranks(rank, 0, self.size, 1), secrets[rank], places)
            except UserError as error:
                told[rank] = str(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return told


@pytest.mark.parametrize("secret", ["", "s3cret"])
def test_ranks_with_the_same_secret_or_none_believe_each_other(secret):
    assert Checked(3).check([secret] * 3) == [""] * 3


@pytest.mark.parametrize("other", ["", "another"])
def test_a_rank_without_the_secret_is_named_by_all_that_have_it(other):
    told = Checked(3).check(["s3cret", "s3cret", other])
    assert all(text.startswith("rank 2 does not hold the secret of this job") for text in told[:2])
    assert "does not hold the secret" in told[2]


def test_a_stranger_who_repeats_what_another_rank_said_is_found_out():
    challenges = ["a", "b"]
    assert rendezvous.proof("s3cret", 0, challenges) != rendezvous.proof("s3cret", 1, challenges)
    assert rendezvous.proof("s3cret", 0, challenges) != rendezvous.proof("s3cret", 0, ["a", "c"])


def meet_over_two_nodes(folder: str) -> None:
    """Start as one of two nodes, and write what this rank was told."""
    ranks = ranks_from_environment()
    told = "met"
    try:
        with started(Settings(use_cpu=True), ranks) as runtime:
            runtime.gather(ranks.rank)
    except UserError as error:
        told = str(error)
    (Path(folder) / f"{ranks.rank}.txt").write_text(told)


@pytest.mark.parametrize("second", ["s3cret", "guessed"])
def test_nodes_train_together_only_with_the_secret_of_the_job(tmp_path, second):
    def environ_of(rank: int) -> dict[str, str]:
        secret = second if rank else "s3cret"
        return {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", rendezvous.SECRET: secret}

    run_ranks(2, meet_over_two_nodes, str(tmp_path), folder=tmp_path / "out", environ_of=environ_of, end=False)
    told = [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)]
    if second == "s3cret":
        assert told == ["met", "met"]
    else:
        assert told[0].startswith("rank 1 (node 1, host ")
        assert all("does not hold the secret of this job" in text for text in told)
