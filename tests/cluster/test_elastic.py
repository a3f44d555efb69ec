"""node.sh --min_nodes: a job that loses a node goes on with the others, takes it back, and refuses one that differs."""

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


def newest(run: Path) -> int:
    """The step of a run's newest complete checkpoint, 0 without one."""
    return max([0, *(int(path.parent.name.split("-")[1]) for path in run.glob("checkpoint-*/manifest.json"))])


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
    wait_until(lambda: newest(run) >= 10, RUN_SECONDS, "two checkpoints of two nodes")
    for pid in [processes[1].pid, *node2.pids()]:
        os.kill(pid, signal.SIGKILL)
    lost_at = newest(run)
    wait_until(lambda: newest(run) > lost_at + 10, RUN_SECONDS, "checkpoints of the node that is left")
    second_output = tmp_path / "node2-again.txt"
    back = node2.start(["bash", NODE_SH, *words], second_output, variables(two_hosts, 1, **sharding), tmp_path)

    def printed() -> str:
        return "\n".join([*outputs(two_hosts, tmp_path), second_output.read_text()])

    # Either node may have rank 0, which tells it.
    wait_until(lambda: "world_size 1 -> 2" in printed(), RUN_SECONDS, "two nodes again")
    node2.fast()
    assert wait_for_all([processes[0], back], RUN_SECONDS) == [0, 0], printed()
    assert "world_size 2 -> 1" in printed()
    assert difference(run, uninterrupted) < 1e-6
    assert train_loss(run) == pytest.approx(train_loss(uninterrupted), rel=1e-6)


def test_a_node_with_other_rows_leaves_the_job_which_goes_on(two_hosts: list[Host], job: Job, tmp_path: Path):
    words = ["--cpu", "-m", str(job.model), "-d", "rows.jsonl", *job.words[5:], *OPTIONS, "--max_steps", "1000000"]
    words += ["--no_preflight", "--output_dir", str(tmp_path / "outputs"), "--run_name", "joined", "--min_nodes", "1"]
    rows = job.rows.read_text().splitlines(keepends=True)
    processes, run = [], tmp_path / "outputs" / "joined"
    for rank, host in enumerate(two_hosts):
        folder = tmp_path / host.name
        folder.mkdir()
        (folder / "rows.jsonl").write_text("".join(rows[rank:]))
        output, command = tmp_path / f"{host.name}.txt", ["bash", NODE_SH, *words]
        processes.append(host.start(command, output, variables(two_hosts, rank), folder))
        if rank == 0:
            wait_until(lambda: newest(run) >= 5, RUN_SECONDS, "the first checkpoint of one node")
    assert wait_for_all(processes[1:], RUN_SECONDS) == [2]
    text = outputs(two_hosts, tmp_path)[1]
    assert "holds other training rows than node" in text.splitlines()[-1], text
    step = newest(run)
    wait_until(lambda: newest(run) > step, RUN_SECONDS, "the node that was there to go on")
    processes[0].send_signal(signal.SIGUSR1)
    assert wait_for_all(processes, RUN_SECONDS) == [75, 2], outputs(two_hosts, tmp_path)[0]
