"""node.sh --min_nodes: a job that loses a node goes on with the others, and takes the node back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, make_hosts, wait_for_all, wait_until
from tests.cluster.jobs import NODE_SH, RUN_SECONDS, Job, difference, outputs, start_nodes, train_loss, variables

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]
# Plain SGD, because AdamW makes rounding large where gradients are tiny (test_nodes.py). One node alone takes some ten
# steps a second, and a node needs some twenty seconds to come back.
STEPS = 200
OPTIONS = (
    f"--optim sgd --learning_rate 0.02 --max_steps {STEPS} --save_steps 5 --logging_steps 1 --warmup_steps 0".split()
)


def words_of(job: Job, name: str) -> list[str]:
    """node.sh's options; of an option given twice, the last counts."""
    return [*job.words, *OPTIONS, "--no_preflight", "--run_name", name]


@pytest.fixture(scope="module")
def uninterrupted(can_make_hosts: None, job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one node that is never interrupted."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    with make_hosts(1) as hosts:
        process = hosts[0].start(["bash", NODE_SH, *words_of(job, "one")], folder / "node1.txt", cwd=folder)
        assert wait_for_all([process], RUN_SECONDS) == [0], (folder / "node1.txt").read_text()
    return folder / "outputs" / "one"


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [{}, {"UNSLOTH_FSDP2": "1"}], ids=["ddp", "fsdp2"])
def test_two_nodes_go_on_as_one_and_then_as_two_again(
    sharding: dict[str, str], two_hosts: list[Host], uninterrupted: Path, job: Job, tmp_path: Path
):
    node2 = two_hosts[1]
    # 650 kB of gradients a step: about a fifth of a second a step.
    node2.slow("25mbit")
    words = [*words_of(job, "elastic"), "--min_nodes", "1"]
    processes = start_nodes(two_hosts, words, tmp_path, **sharding)
    run = tmp_path / "outputs" / "elastic"

    def newest() -> int:
        return max([0, *(int(path.parent.name.split("-")[1]) for path in run.glob("checkpoint-*/manifest.json"))])

    wait_until(lambda: newest() >= 10, RUN_SECONDS, "two checkpoints of two nodes")
    for pid in [processes[1].pid, *node2.pids()]:
        os.kill(pid, signal.SIGKILL)
    lost_at = newest()
    wait_until(lambda: newest() > lost_at + 10, RUN_SECONDS, "checkpoints of the node that is left")
    again = tmp_path / "node2-again.txt"
    back = node2.start(["bash", NODE_SH, *words], again, variables(two_hosts, 1, **sharding), tmp_path)

    def said() -> str:
        return "\n".join([*outputs(two_hosts, tmp_path), again.read_text()])

    # Either node may have rank 0, which tells it.
    wait_until(lambda: "world_size 1 -> 2" in said(), RUN_SECONDS, "two nodes again")
    node2.fast()
    assert wait_for_all([processes[0], back], RUN_SECONDS) == [0, 0], said()
    assert "world_size 2 -> 1" in said()
    assert difference(run, uninterrupted) < 1e-6
    assert train_loss(run) == pytest.approx(train_loss(uninterrupted), rel=1e-6)
