"""What one node sees by itself: each verdict with its remedy, from plain values."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from unsloth_ddp.distributed.missing_gpu import MissingGpu
from unsloth_ddp.preflight import checks, job
from unsloth_ddp.preflight.checks import Check
from unsloth_ddp.preflight.node import disks, machine, network
from unsloth_ddp.utils.units import GIB

TWO = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node1"}
WORKER = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1", "MASTER_PORT": "1",
}  # fmt: skip


def test_the_worst_verdict_counts():
    assert checks.worst_verdict([]) == "ok"
    assert checks.worst_verdict(["ok", "warning"]) == "warning"
    assert checks.worst_verdict(["warning", "failure", "ok"]) == "failure"


def test_rows_of_one_name_merge_and_say_whose_remedy_it_is():
    rows = [Check("disk", {1: "full"}, "failure", "Free some."), Check("clock", {0: "x"}), Check("disk", {0: "fine"})]
    disk, clock = checks.merge_checks(rows)
    assert disk == Check("disk", {0: "fine", 1: "full"}, "failure", "Node 1: Free some.")
    assert clock.name == "clock"
    (both,) = checks.merge_checks([Check("a", {n: "v"}, "warning", "Do it.") for n in (0, 1)])
    assert both.remedy == "Do it."


@pytest.mark.parametrize(("nodes", "text"), [([3], "node 3"), ([0, 1, 2, 7], "nodes 0-2, 7"), ([4, 2], "nodes 2, 4")])
def test_nodes_are_named_in_ranges(nodes, text):
    assert checks.name_nodes(nodes) == text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"NODE_RANK": ""}, "NODE_RANK is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"NNODES": "two"}, "NNODES is 'two'"),
        ({"NNODES": "0"}, "NNODES is '0'"),
        ({"NODE_RANK": "-1"}, "NODE_RANK is '-1'"),
        ({"GPUS_PER_NODE": "0"}, "GPUS_PER_NODE is '0'"),
        ({"MASTER_PORT": "70000"}, "ports end at 65535"),
        ({"NNODES": ""}, "NNODES is not set"),
    ],
)
def test_the_variables_of_a_node(change, problem):
    found = job.check_environment(TWO | change)
    assert found.verdict == ("failure" if problem else "ok")
    assert (problem or "") in found.remedy


def test_no_variables_are_one_node_but_slurm_may_mean_more():
    assert job.check_environment({}).verdict == "ok"
    found = job.check_environment({"SLURM_NNODES": "2"})
    assert (found.verdict, "Slurm gave this job 2 nodes" in found.remedy) == ("warning", True)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"NNODES": "2", "NODE_RANK": "1", "GPUS_PER_NODE": "2"}, None),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE not set"),
        ({"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}, "LOCAL_RANK, LOCAL_WORLD_SIZE not set beside RANK and WORLD_SIZE"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four'"),
        ({"RANK": "4"}, "contradict each other"),
        ({"LOCAL_RANK": "2"}, "contradict each other"),
        ({"WORLD_SIZE": "5"}, "does not divide WORLD_SIZE 5"),
        ({"NNODES": "3"}, "NNODES is 3, but the launcher started 2"),
        ({"NODE_RANK": "0"}, "NODE_RANK is 0, but to the launcher this is 1"),
        ({"GPUS_PER_NODE": "8"}, "GPUS_PER_NODE is 8, but processes on this node are 2"),
    ],
)
def test_the_variables_of_a_launcher(change, problem):
    found = job.check_environment(WORKER | change)
    assert found.verdict == ("failure" if problem else "ok"), found.remedy
    assert (problem or "") in found.remedy


def test_a_node_rank_out_of_range_is_refused():
    assert job.check_node_rank(1, 2).verdict == "ok"
    found = job.check_node_rank(2, 2)
    assert (found.verdict, "ranks go from 0 to 1" in found.remedy) == ("failure", True)


@pytest.mark.parametrize(
    ("addresses", "nodes", "interface", "one_machine", "verdict"),
    [
        (["10.0.0.2"], 2, None, False, "ok"),
        (["127.0.1.1"], 2, None, False, "failure"),
        ([], 2, None, False, "failure"),
        (["127.0.1.1"], 2, "eth0", False, "ok"),
        (["127.0.1.1"], 2, None, True, "ok"),
        (["127.0.1.1"], 1, None, False, "ok"),
    ],
)
def test_a_host_name_that_others_cannot_follow_is_refused(addresses, nodes, interface, one_machine, verdict):
    found = network.check_host_name("node1", addresses, nodes, interface, one_machine)
    assert found.verdict == verdict
    assert ("GLOO_SOCKET_IFNAME" in found.remedy) is (verdict == "failure")


@pytest.mark.parametrize(
    ("name", "addresses", "local", "rank", "nodes", "verdict", "says"),
    [
        ("node1", ["10.0.0.1"], True, 0, 2, "ok", ""),
        ("node1", ["10.0.0.1"], False, 1, 2, "ok", ""),
        ("node1", ["10.0.0.1"], False, 0, 2, "failure", "is not this machine"),
        ("node1", [], False, 1, 2, "failure", "does not resolve"),
        ("node1", ["127.0.1.1"], True, 0, 2, "failure", "Debian"),
        ("127.0.0.1", ["127.0.0.1"], True, 1, 2, "warning", "this one machine"),
        ("node1", [], False, 0, 1, "ok", ""),
    ],
)
def test_the_masters_name(name, addresses, local, rank, nodes, verdict, says):
    found = network.check_master_address(rank, name, addresses, local, nodes)
    assert (found.verdict, says in found.remedy) == (verdict, True)


def test_a_port_is_free_or_its_holder_is_named():
    assert network.check_free_port(6001, None).verdict == "ok"
    found = network.check_free_port(6001, "sshd (pid 7)")
    assert (found.verdict, "by sshd (pid 7)" in found.remedy) == ("failure", True)


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        ("refused", "start node 0 too"),
        ("timed out", "open the firewall for MASTER_PORT 6001"),
        ("another program", "set another MASTER_PORT"),
        ("no route to host", "no route to host; check MASTER_ADDR"),
    ],
)
def test_a_master_that_does_not_answer_says_why(outcome, says):
    found = network.check_master_answers("node1", 6001, outcome, 60)
    assert (found.verdict, says in found.remedy) == ("failure", True)
    assert network.check_master_answers("node1", 6001, "", 0.1).verdict == "ok"


@pytest.mark.parametrize(
    ("pattern", "name", "taken"),
    [
        ("eth", "eth0", True),
        ("=eth", "eth0", False),
        ("=eth0", "eth0", True),
        ("^docker,lo", "eth0", True),
        ("^docker,lo", "docker0", False),
        ("^=eth0", "eth01", True),
        ("ib,eth0", "ib3", True),
    ],
)
def test_interface_names_follow_nccls_rules(pattern, name, taken):
    assert network.selects("NCCL_SOCKET_IFNAME", pattern, name) is taken


@pytest.mark.parametrize(
    ("wanted", "nodes", "verdict", "says"),
    [
        ({}, 2, "ok", ""),
        ({"NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth0"}, 2, "ok", ""),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, 2, "failure", "NCCL_SOCKET_IFNAME is ib0, but this node has no such interface"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, 2, "failure", "no such interface that is up (eth0, lo)"),
        ({"NCCL_SOCKET_IFNAME": "lo"}, 2, "failure", "a loopback interface"),
        ({"NCCL_SOCKET_IFNAME": "^eth"}, 2, "failure", "a loopback interface"),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, 1, "ok", ""),
    ],
)
def test_a_named_interface_is_up_and_no_loopback(wanted, nodes, verdict, says):
    up = {"eth0": ["10.0.0.2"], "lo": ["127.0.0.1", "::1"]}
    found = network.check_network_interface(up, wanted, nodes)
    assert (found.verdict, says in found.remedy) == (verdict, True), found


def test_infiniband_ports_are_up_and_used():
    port = {"name": "mlx5_0:1", "rate": "400 Gb/sec (4X NDR)", "state": "4: ACTIVE", "link_layer": "InfiniBand"}
    assert network.check_infiniband([], False, 2).verdict == "ok"
    found = network.check_infiniband([port], False, 2)
    assert (found.verdict, found.shown) == ("ok", "mlx5_0:1 400 Gb/sec (4X NDR) InfiniBand ACTIVE")
    assert "unset it" in network.check_infiniband([port], True, 2).remedy
    down = network.check_infiniband([port | {"state": "1: DOWN"}], False, 2)
    assert (down.verdict, "NCCL_IB_DISABLE=1" in down.remedy) == ("warning", True)
    assert network.check_infiniband([port | {"state": "1: DOWN"}], False, 1).verdict == "ok"


@pytest.mark.parametrize(
    ("free", "verdict", "says"),
    [(20, "ok", ""), (15, "warning", "may not fit"), (9, "failure", "Free space for checkpoints")],
)
def test_a_disk_holds_what_will_be_written(free, verdict, says, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free * GIB))
    found = disks.check_folder(tmp_path / "new" / "inner", 10 * GIB, "checkpoints", "--output_dir")
    assert (found.verdict, says in found.remedy) == (verdict, True)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_says_why(tmp_path):
    (tmp_path / "file").write_text("x")
    found = disks.check_folder(tmp_path / "file" / "inner", 0, "checkpoints", "--output_dir")
    assert found.verdict == "failure" and "cannot be written (Not a directory)" in found.remedy


@pytest.mark.parametrize(
    ("free", "processes", "gpu", "verdict"),
    [(2 * GIB, 8, True, "ok"), (64 * 2**20, 8, True, "warning"), (64 * 2**20, 0, True, "warning"), (0, 1, False, "ok")],
)
def test_shared_memory(free, processes, gpu, verdict):
    found = machine.check_shared_memory(free, free, processes, gpu)
    assert (found.verdict, "--shm-size" in found.remedy) == (verdict, verdict == "warning")


H200 = {"name": "NVIDIA H200", "memory": 150 * 10**9}
SEEN = {"cpu": False, "missing": None, "expected": None, "processes": 0, "visible": None}
BROKEN = MissingGpu("This machine has an NVIDIA driver, but torch finds no GPU", "update the driver")
HIDDEN = MissingGpu("CUDA_VISIBLE_DEVICES is '', which hides this machine's GPUs", "unset it to use them", hidden=True)


@pytest.mark.parametrize(
    ("count", "change", "verdict", "says"),
    [
        (4, {}, "ok", ""),
        (4, {"expected": 4, "processes": 4}, "ok", ""),
        (3, {"expected": 4, "visible": "0,1,2"}, "failure", "3 are visible (CUDA_VISIBLE_DEVICES=0,1,2)"),
        (2, {"processes": 4}, "failure", "4 processes were started for 2 GPUs"),
        (4, {"processes": 2}, "warning", "Idle GPUs: 2;"),
        (0, {"missing": BROKEN}, "failure", "update the driver, or give --use_cpu"),
        (0, {"missing": HIDDEN}, "warning", "unset it to use them."),
        (0, {"missing": HIDDEN, "expected": 8}, "failure", "GPUS_PER_NODE is 8"),
        (0, {}, "warning", "--use_cpu"),
        (0, {"expected": 8}, "failure", "GPUS_PER_NODE is 8, but no GPU is here"),
        (0, {"cpu": True, "expected": 8}, "ok", ""),
    ],
)
def test_gpus(count, change, verdict, says):
    found = machine.check_gpus([H200] * count, **(SEEN | change))
    assert (found.verdict, says in found.remedy) == (verdict, True), found


def test_gpus_are_listed_by_kind():
    assert (
        machine.list_gpus([H200, H200, {"name": "L4", "memory": 24 * GIB}])
        == "2 x NVIDIA H200 139.7 GiB, 1 x L4 24.0 GiB"
    )


@pytest.mark.parametrize(
    ("gpus", "wanted", "verdict", "shown"),
    [
        ([], "auto", "ok", "fp32 (auto)"),
        ([("NVIDIA H200", "9.0")], "auto", "ok", "bf16 (auto)"),
        ([("NVIDIA H200", "9.0"), ("Tesla T4", "7.5")], "auto", "ok", "fp16 (auto): Tesla T4 (compute capability 7.5)"),
        ([("Tesla T4", "7.5")], "bf16", "failure", "bf16"),
    ],
)  # fmt: skip
def test_the_precision_is_the_one_that_the_weakest_gpu_has(gpus, wanted, verdict, shown):
    devices = [{"name": name, "capability": capability} for name, capability in gpus]
    found = machine.check_precision(devices, wanted, "lora", "fp32")
    assert found.verdict == verdict and found.shown.startswith(shown)
    if verdict == "failure":
        assert found.remedy == (
            "precision bf16 is not supported by Tesla T4 (compute capability 7.5); use --precision fp16."
        )


def test_weights_that_a_t4_cannot_train_are_found_before_the_run():
    found = machine.check_precision([{"name": "Tesla T4", "capability": "7.5"}], "auto", "full", "bf16")
    assert found.verdict == "failure" and "use --full_weights fp32" in found.remedy
