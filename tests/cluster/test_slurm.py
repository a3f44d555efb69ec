"""cluster/slurm.sbatch under a real Slurm with two nodes."""

from __future__ import annotations

import shutil

import pytest

from tests.cluster.jobs import RUN_SECONDS, difference, losses, train_loss
from tests.cluster.slurm import missing_slurm, run_slurm
from tests.cluster.test_nodes import LOSS_TOLERANCE, TOLERANCE
from tests.conftest import REPO

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]
SBATCH = str(REPO / "cluster" / "slurm.sbatch")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    reason = missing_slurm()
    if reason is not None:
        pytest.skip(reason)
    with run_slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def second_start(folder, number, first_start):
    """Return what a job's script and both nodes said after the requeue, each cut to its end, for a test that fails."""
    nodes = folder / "logs" / f"slurm-{number}"
    texts = {
        "node-0": (nodes / "node-0.log").read_text()[len(first_start) :],
        "node-1": (nodes / "node-1.log").read_text(),
        "script": (folder / f"slurm-{number}.out").read_text(),
    }
    return "".join(f"\n== {name}\n{text[-2500:]}" for name, text in texts.items())


def test_a_job_is_stopped_before_its_limit_requeued_and_ends_as_if_nothing_had_been(slurm, one_host, job, tmp_path):
    node2 = slurm.hosts[1]
    node2.slow("5mbit")
    words = [SBATCH, *job.words, "--no_preflight"]
    number = slurm.submit(*words, cwd=tmp_path, UNSLOTH_DDP_HOME=str(REPO))
    run, logs = tmp_path / "outputs" / f"slurm-{number}", tmp_path / "logs" / f"slurm-{number}"
    slurm.wait_until_exists(run / "checkpoint-5" / "manifest.json", number, timeout=RUN_SECONDS)
    # What Slurm itself sends --signal=B:USR1@300 before the time limit: to the job's script only.
    slurm.command("scancel", "--batch", "--signal=USR1", number)
    found = slurm.wait_for(number, "PENDING", *ENDED, timeout=120)
    batch = (tmp_path / f"slurm-{number}.out").read_text()
    assert found["JobState"] == "PENDING" and found["Restarts"] == "1", batch
    assert "back into the queue" in batch
    assert not (run / "adapter_model.safetensors").exists()
    first_start = (logs / "node-0.log").read_text()

    node2.fast()
    slurm.start_now(number)
    found = slurm.wait_for(number, *ENDED, timeout=RUN_SECONDS)
    log = (logs / "node-0.log").read_text()
    assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0"), second_start(tmp_path, number, first_start)
    assert log.startswith(first_start)  # appended to, not replaced
    assert 0 < len(losses(log[len(first_start) :])) <= 25  # it did not begin at step 1
    assert difference(run, one_host[0]) < TOLERANCE
    assert train_loss(run) == pytest.approx(train_loss(one_host[0]), rel=LOSS_TOLERANCE)
    # One log a node, each with its own rank, which Slurm filled in there; the second one is silent on the training.
    assert "2 on 2 nodes" in log
    assert "node 0 reaches node1" in log and "node 1 reaches node1" in (logs / "node-1.log").read_text()
    assert not losses((logs / "node-1.log").read_text())


@pytest.mark.slow
def test_a_preempted_job_saves_goes_back_into_the_queue_and_ends_as_if_nothing_had_been(slurm, one_host, job, tmp_path):
    """Slurm itself takes the nodes for a job of a higher partition, after the grace time of the lower one."""
    slurm.hosts[1].slow("5mbit")
    number = slurm.submit(SBATCH, *job.words, "--no_preflight", cwd=tmp_path, UNSLOTH_DDP_HOME=str(REPO))
    run, log = tmp_path / "outputs" / f"slurm-{number}", tmp_path / "logs" / f"slurm-{number}" / "node-0.log"
    slurm.wait_until_exists(run / "checkpoint-5" / "manifest.json", number, timeout=RUN_SECONDS)
    urgent = slurm.submit("--partition=urgent", "--nodes=2", "--exclusive", "--wrap", "hostname", cwd=tmp_path)
    found = slurm.wait_for(number, "PENDING", *ENDED, timeout=150)
    assert (found["JobState"], found["Restarts"]) == ("PENDING", "1")
    slurm.wait_for(urgent, "COMPLETED", timeout=120)
    first_start = log.read_text()
    assert "saving a checkpoint after this step" in first_start
    kept = {int(path.parent.name.split("-")[1]) for path in run.glob("checkpoint-*/manifest.json")}
    assert kept - {5, 10, 15, 20, 25, 30}, kept  # the stop's own

    slurm.hosts[1].fast()
    slurm.start_now(number)
    found = slurm.wait_for(number, *ENDED, timeout=RUN_SECONDS)
    assert (found["JobState"], found["ExitCode"]) == ("COMPLETED", "0:0"), second_start(tmp_path, number, first_start)
    assert f"checkpoint-{max(kept)}, step {max(kept)}" in log.read_text()[len(first_start) :]
    assert difference(run, one_host[0]) < TOLERANCE
    assert train_loss(run) == pytest.approx(train_loss(one_host[0]), rel=LOSS_TOLERANCE)


def test_the_exit_code_of_a_job_is_the_trainings(slurm, job, tmp_path):
    number = slurm.submit(SBATCH, *job.words, "--method", "lola", cwd=tmp_path, UNSLOTH_DDP_HOME=str(REPO))
    found = slurm.wait_for(number, *ENDED, timeout=200)
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "2:0")
    # The first node that refuses ends the other, maybe before it has said the same.
    logs = [(tmp_path / f"logs/slurm-{number}/node-{node}.log").read_text() for node in (0, 1)]
    assert any("--method is lola" in log for log in logs), logs


def test_the_first_node_to_fail_gives_the_job_its_exit_code(slurm, tmp_path):
    """srun itself tells the highest code, which is that of a node it ended."""
    node = tmp_path / "kit" / "cluster" / "node.sh"
    node.parent.mkdir(parents=True)
    node.write_text("((NODE_RANK == 1)) && exit 3\nexec sleep 600\n")
    number = slurm.submit(SBATCH, cwd=tmp_path, UNSLOTH_DDP_HOME=str(tmp_path / "kit"))
    found = slurm.wait_for(number, *ENDED, timeout=200)
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "3:0")
    assert "ended with exit code 3" in (tmp_path / f"slurm-{number}.out").read_text()
    assert not list((tmp_path / "logs" / f"slurm-{number}").glob("exit-code"))


def test_it_says_what_to_do_where_the_kit_is_not(slurm, tmp_path):
    number = slurm.submit(SBATCH, cwd=tmp_path)
    assert slurm.wait_for(number, *ENDED, timeout=200)["ExitCode"] == "2:0"
    assert f"there is no cluster/node.sh in {tmp_path}" in (tmp_path / f"slurm-{number}.out").read_text()


@pytest.mark.slow
def test_a_cancelled_job_leaves_no_process(slurm, tmp_path, job):
    """scancel signals every process of the job at once: script, node.sh, launcher, ranks."""
    slurm.hosts[1].slow("5mbit")
    number = slurm.submit(SBATCH, *job.words, "--no_preflight", cwd=tmp_path, UNSLOTH_DDP_HOME=str(REPO))
    run = tmp_path / "outputs" / f"slurm-{number}"
    slurm.wait_until_exists(run / "checkpoint-5" / "manifest.json", number, timeout=RUN_SECONDS)
    slurm.command("scancel", number)
    found = slurm.wait_for(number, *ENDED, timeout=120)
    assert found["JobState"] == "CANCELLED"
    slurm.wait_until_gone("train_ddp.py", timeout=60)
    # The stop was still a complete checkpoint, at a step of its own.
    steps = {int(path.name.split("-")[1]) for path in run.glob("checkpoint-*") if (path / "manifest.json").exists()}
    assert steps - {5, 10, 15, 20, 25, 30}, steps
    slurm.hosts[1].fast()
    shutil.rmtree(run)
