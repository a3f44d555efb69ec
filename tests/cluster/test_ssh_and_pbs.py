"""cluster/ssh.sh and cluster/pbs.sh over a real sshd on every host. PBS itself is not here: its node file is written by
the test, and qsub, pbs_tmrsh and qrerun are not tried."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import make_hosts
from tests.cluster.jobs import RUN_SECONDS, difference, losses, train_loss
from tests.cluster.sshd import missing_sshd, start_sshd
from tests.cluster.test_nodes import LOSS_TOLERANCE, TOLERANCE, ranks_of
from tests.conftest import REPO
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def reachable(can_make_hosts, tmp_path_factory):
    """Two hosts with sshd, and the ssh options that reach them."""
    reason = missing_sshd()
    if reason is not None:
        pytest.skip(reason)
    with make_hosts(2) as hosts:
        yield hosts, start_sshd(hosts, tmp_path_factory.mktemp("sshd"))


def start(reachable, script: str, words: list[str], folder: Path, **environ: str):
    """A script of cluster/ on node1, with its output in out.txt."""
    hosts, options = reachable
    command = ["bash", str(REPO / "cluster" / script), *words]
    return hosts[0].start(command, folder / "out.txt", {"SSH_OPTIONS": options, **environ}, folder)


def has_ended(process, timeout: float) -> int:
    wait_until(lambda: process.poll() is not None, timeout, "the script to end")
    return process.returncode


def nothing_trains(hosts) -> bool:
    lines = []
    for host in hosts:
        for pid in host.pids():
            # Gone by now, maybe.
            with contextlib.suppress(OSError):
                lines.append(Path("/proc", str(pid), "cmdline").read_bytes())
    return not any(b"train_ddp.py" in line or b"node.sh" in line for line in lines)


def test_pbs_trains_on_the_nodes_of_its_file(reachable, one_host, job, tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("node1\nnode1\nnode2\nnode2\n")  # a line a processor
    environ = {"PBS_NODEFILE": str(nodes), "PBS_JOBID": "4711.server", "PBS_O_WORKDIR": str(tmp_path)}
    arguments = " ".join(f'"{word}"' for word in [*job.words, "--no_preflight"])
    process = start(reachable, "pbs.sh", [], tmp_path, **environ, ARGS=arguments, UNSLOTH_DDP_HOME=str(REPO))
    code = has_ended(process, RUN_SECONDS)
    said = (tmp_path / "out.txt").read_text()
    assert code == 0, said
    run = tmp_path / "outputs" / "pbs-4711"
    assert difference(run, one_host[0]) < TOLERANCE
    assert train_loss(run) == pytest.approx(train_loss(one_host[0]), rel=LOSS_TOLERANCE)
    assert "port 19422" in said
    logs = [(tmp_path / f"logs/pbs-4711/node-{node}.log").read_text() for node in (0, 1)]
    assert len(losses(logs[0])) == 30 and losses(said) == losses(logs[0]) and not losses(logs[1])


@pytest.mark.slow
def test_ssh_passes_a_signal_on_and_leaves_nothing_running(reachable, job, tmp_path):
    hosts, _ = reachable
    hosts[1].slow("5mbit")
    words = [*job.words, "--no_preflight", "--run_name", "s"]
    process = start(reachable, "ssh.sh", words, tmp_path, HOSTS="node1,node2", LOGS="logs")
    checkpoint = tmp_path / "outputs" / "s" / "checkpoint-5" / "manifest.json"
    wait_until(lambda: checkpoint.exists() or process.poll() is not None, RUN_SECONDS, "the first checkpoint")
    process.send_signal(signal.SIGTERM)
    code = has_ended(process, 90)
    hosts[1].fast()
    said = (tmp_path / "out.txt").read_text()
    assert code == 75, said + (tmp_path / "logs" / "node-1.log").read_text()
    wait_until(lambda: nothing_trains(hosts), 30, "the nodes to be idle")
    assert not list(Path("/tmp").glob("unsloth_ddp_ssh.*"))
    assert "exit code 75" in said


@pytest.mark.slow
def test_ssh_ends_the_other_nodes_when_one_fails(reachable, job, tmp_path):
    hosts, _ = reachable
    hosts[1].slow("5mbit")
    words = [*job.words, "--no_preflight", "--run_name", "s"]
    process = start(reachable, "ssh.sh", words, tmp_path, HOSTS="node1 node2", LOGS="logs")
    checkpoint = tmp_path / "outputs" / "s" / "checkpoint-5" / "manifest.json"
    wait_until(lambda: checkpoint.exists() or process.poll() is not None, RUN_SECONDS, "the first checkpoint")
    began = time.monotonic()
    for pid in ranks_of(hosts[1]):
        os.kill(pid, signal.SIGKILL)
    code = has_ended(process, 90)
    hosts[1].fast()
    said = (tmp_path / "out.txt").read_text()
    assert code == 1, said
    assert time.monotonic() - began < 60
    assert "ending the other nodes" in said or said.count("exit code 1") >= 2, said
    wait_until(lambda: nothing_trains(hosts), 30, "the nodes to be idle")


def test_ssh_to_a_host_that_is_not_there(reachable, job, tmp_path):
    process = start(reachable, "ssh.sh", [*job.words], tmp_path, HOSTS="node1 nowhere", LOGS="logs", START_TIMEOUT="60")
    assert has_ended(process, 250) == 255
    said = (tmp_path / "out.txt").read_text()
    assert "node 1 (nowhere) ended with exit code 255; ending the other nodes" in said
    assert "Could not resolve hostname nowhere" in said
    wait_until(lambda: nothing_trains(reachable[0]), 30, "the nodes to be idle")
