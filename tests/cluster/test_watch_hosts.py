"""Two hosts for real: one cut off, or a rank of one killed, in the middle of a run; each side names the other."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.hosts import Host, wait_for_all
from tests.cluster.jobs import losses
from tests.conftest import REPO
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

OPTIONS = (
    "--max_steps 100000 --max_length 64 --save_strategy no --run_name r --report_to none --gradient_checkpointing none"
)


@pytest.fixture
def launchers(two_hosts, tmp_path, tiny_model, uneven_rows):
    """A run of one process on each of two hosts, once it is in its steps: the launchers, by host."""
    processes = []
    for number, host in enumerate(two_hosts):
        options = f"--model {tiny_model} --dataset {uneven_rows} --output_dir {tmp_path}/{host.name} {OPTIONS}"
        launch = f"--num_machines 2 --num_processes 2 --machine_rank {number} --main_process_ip 10.77.0.1"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
        command += [*launch.split(), "--main_process_port", "6001", str(REPO / "train_ddp.py"), *options.split()]
        processes.append(host.start(command, tmp_path / f"{host.name}.txt"))
    said = tmp_path / "node1.txt"
    wait_until(lambda: len(losses(said.read_text(errors="replace"))) > 1, 400, "the first steps")
    return processes


def told(tmp_path: Path, host: str) -> list[str]:
    text = (tmp_path / f"{host}.txt").read_text(errors="replace")
    return [line for line in text.splitlines() if line.startswith("train_ddp.py: error: ")]


def training_process(host: Host) -> psutil.Process:
    found = [psutil.Process(pid) for pid in host.pids()]
    return next(p for p in found if "train_ddp.py" in " ".join(p.cmdline()) and "launch" not in " ".join(p.cmdline()))


def test_a_host_that_is_cut_off_is_named_on_both_sides(launchers, two_hosts, tmp_path):
    began = time.monotonic()
    two_hosts[1].cut_off()
    codes = wait_for_all(launchers, 120)
    seconds = time.monotonic() - began
    assert all(codes) and seconds < 100
    (first,), (second,) = told(tmp_path, "node1"), told(tmp_path, "node2")
    assert "rank 1 (node 1, host node2, pid " in first and "cut off" in first, first
    assert "rank 0 (node 0, host node1, pid " in second and "cut off" in second, second


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_rank_of_one_host_ends_the_other(launchers, two_hosts, tmp_path, node):
    began = time.monotonic()
    os.kill(training_process(two_hosts[node]).pid, signal.SIGKILL)
    assert all(wait_for_all(launchers, 120))
    assert time.monotonic() - began < 100
    (sentence,) = told(tmp_path, f"node{2 - node}")
    assert (
        f"rank {node} (node {node}, host node{node + 1}, pid " in sentence
        and "died without an error message" in sentence
    )
    assert told(tmp_path, f"node{node + 1}") == []
