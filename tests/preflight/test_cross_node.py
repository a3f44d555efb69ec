"""What nodes have to agree on: each verdict with its remedy, from plain values by node."""

from __future__ import annotations

import pytest

from unsloth_ddp.preflight import checks
from unsloth_ddp.preflight.between import bandwidth, cross_node
from unsloth_ddp.preflight.between.arrivals import Arrival, check_arrivals
from unsloth_ddp.preflight.between.bandwidth import CollectiveTiming
from unsloth_ddp.preflight.checks import Check
from unsloth_ddp.utils.units import GIB


def present(*ranks: int, nodes: int = 3, per_node: int = 1, **change) -> list[Arrival]:
    """One arrival a rank, on hosts a, b, c, ... in order."""
    world = nodes * per_node
    return [Arrival(r, r // per_node, "abcdefgh"[i], nodes, world, per_node) for i, r in enumerate(ranks)]


def test_all_arrived():
    found = check_arrivals(3, 3, present(0, 2, 1), 1, "a:6001")
    assert (found.verdict, found.values) == ("ok", {0: "a", 1: "c", 2: "b"})


def test_who_is_missing_is_named_with_where_and_how_long():
    found = check_arrivals(3, 3, present(0), 60, "a:6001")
    assert found.values == {0: "a", 1: "did not arrive", 2: "did not arrive"}
    assert found.remedy.startswith("Nodes 1-2 did not arrive at a:6001 within 60 s: start preflight there too")


def test_a_rank_taken_twice_names_both_hosts_and_who_is_missing_then():
    found = check_arrivals(3, 3, present(0, 1, 1), 2, "a:6001", in_time=True)
    assert found.verdict == "failure"
    assert found.remedy.splitlines() == [
        "Node rank 1 was taken 2 times, by b and c: give every node a NODE_RANK of its own.",
        "So node 2 is missing.",
    ]
    assert found.values[1] == "b and c"


def test_a_rank_that_cannot_be_is_named():
    found = check_arrivals(3, 3, present(0, 1, 5), 2, "a:6001", in_time=True)
    assert "c says it is node 5 of 3, but ranks go from 0 to 2" in found.remedy
    assert found.values[5] == "c"


def test_nodes_that_were_told_different_jobs():
    told = [Arrival(0, 0, "a", 2, 2, 1), Arrival(1, 1, "b", 3, 3, 1)]
    assert "b has NNODES 3, node 0 has 2" in check_arrivals(2, 2, told, 1, "a:1").remedy
    uneven = [
        Arrival(0, 0, "a", 2, 4, 2),
        Arrival(1, 0, "a", 2, 4, 2),
        Arrival(2, 1, "b", 2, 8, 4),
        Arrival(3, 1, "b", 2, 8, 4),
    ]
    assert "b starts 4 processes of 8, but node 0 starts 2 of 4" in check_arrivals(4, 2, uneven, 1, "a:1").remedy


def test_a_missing_process_of_a_node_that_came_is_told_by_rank():
    found = check_arrivals(4, 2, present(0, 1, 2, nodes=2, per_node=2), 9, "a:1")
    assert found.remedy == "Rank 3 did not arrive within 9 s; look at its output."
    whole = check_arrivals(4, 2, present(0, 1, nodes=2, per_node=2), 9, "a:1")
    assert whole.remedy.startswith("Node 1 did not arrive")


V = {"python": "3.12.3", "torch": "2.14.0", "trl": "1.15.0", "tensorboard": "2.21"}


@pytest.mark.parametrize(
    ("change", "name", "verdict"),
    [
        ({"trl": "1.14.0"}, "version of trl", "failure"),
        ({"tensorboard": "2.20"}, "version of tensorboard", "warning"),
        ({"python": "3.12.4"}, "version of python", "warning"),
        ({"python": "3.11.9"}, "version of python", "failure"),
    ],
)
def test_a_version_that_differs_has_its_row(change, name, verdict):
    alike, row = cross_node.compare_versions({0: V, 1: V | change})
    assert (row.name, row.verdict, row.values[1]) == (name, verdict, *change.values())
    assert next(iter(change)) not in alike.values[0]


def test_a_package_that_one_node_lacks():
    lacking = {name: version for name, version in V.items() if name != "trl"}
    _, row = cross_node.compare_versions({0: V, 1: lacking})
    assert (row.values[1], row.verdict) == ("not installed", "failure")
    assert [c.verdict for c in cross_node.compare_versions({0: V, 1: dict(V)})] == ["ok"]


def test_the_kit_is_compared_by_its_files():
    assert cross_node.compare_code({0: "aa", 1: "aa"}).verdict == "ok"
    assert cross_node.compare_code({0: "aa", 1: "bb"}).verdict == "failure"


def test_settings_that_differ_are_named_with_their_values():
    found = cross_node.compare_settings({0: {"lr": 1, "seed": 2}, 1: {"lr": 1, "seed": 3}}, paths=["dataset"])
    assert (found.verdict, found.values) == ("failure", {0: "seed=2", 1: "seed=3"})
    assert cross_node.compare_settings({0: {"lr": 1}, 1: {"lr": 1}}, paths=[]).verdict == "ok"


def test_paths_may_differ():
    paths = cross_node.compare_settings({0: {"dataset": ["/a"]}, 1: {"dataset": ["/b"]}}, paths=["dataset"])
    assert paths.verdict == "warning"


FILE = {"content": "1 file, 2,048 bytes, xxh3 ab"}


@pytest.mark.parametrize(
    ("other", "verdict", "says"),
    [
        ({"content": "1 file, 2,048 bytes, xxh3 ff"}, "failure", "different datasets"),
        ({"refused": "model m: config.json is not JSON"}, "failure", "config.json is not JSON"),
        ({"missing": "/x/rows.jsonl"}, "failure", "missing on node 1"),
        ({"hub": "c0ffee"}, "failure", "different datasets"),
    ],
)
def test_a_file_that_differs_has_its_row(other, verdict, says):
    rows = cross_node.compare_files(
        "data", {0: {"rows.jsonl": FILE, "more.jsonl": FILE}, 1: {"rows.jsonl": other, "more.jsonl": FILE}}, "dataset"
    )
    assert [row.name for row in rows] == ["data", "data: rows.jsonl"]
    assert (rows[0].verdict, rows[0].values[1]) == ("ok", "more.jsonl 1 file, 2,048 bytes, xxh3 ab")
    assert (rows[1].verdict, says in rows[1].remedy) == (verdict, True)


def test_a_file_missing_everywhere_is_a_failure_on_one_node_too():
    (row,) = cross_node.compare_files("data", {0: {"rows.jsonl": {"missing": "rows.jsonl"}}}, "dataset")
    assert row.verdict == "failure"
    assert row.remedy == "rows.jsonl is missing: give a path that exists with --dataset."


@pytest.mark.parametrize(
    ("commits", "verdict"),
    [(("a", "a"), "ok"), (("a", "b"), "failure"), (("a", None), "warning"), ((None, None), "ok")],
)
def test_hub_sources_are_compared_by_commit(commits, verdict):
    rows = cross_node.compare_files("model", {n: {"model": {"hub": c}} for n, c in enumerate(commits)}, "model")
    assert [row.verdict for row in rows] == [verdict]


@pytest.mark.parametrize(
    ("zero", "one", "verdict"),
    [
        ({"NCCL_DEBUG": "INFO"}, {"NCCL_DEBUG": "INFO"}, "ok"),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, {"NCCL_SOCKET_IFNAME": "eno1"}, "ok"),
        ({"NCCL_IB_DISABLE": "1"}, {}, "warning"),
        ({"NVIDIA_TF32_OVERRIDE": "0"}, {}, "failure"),
    ],
)
def test_environment_flags(zero, one, verdict):
    assert cross_node.compare_variables({0: zero, 1: one}).verdict == verdict


def gpu(name: str = "H200", capability: str = "9.0") -> dict:
    return {"name": name, "memory": 141 * GIB, "capability": capability}


@pytest.mark.parametrize(
    ("zero", "one", "verdict"),
    [
        ([gpu()] * 2, [gpu()] * 2, "ok"),
        ([gpu()] * 2, [gpu()], "failure"),
        ([gpu()] * 2, [gpu("H100")] * 2, "warning"),
        ([gpu()] * 2, [gpu("A100", "8.0")] * 2, "failure"),
        ([], [], "ok"),
    ],
)
def test_gpus_are_alike(zero, one, verdict):
    assert cross_node.compare_gpus({0: zero, 1: one}).verdict == verdict


@pytest.mark.parametrize(
    ("seen", "sharded", "verdict", "says"),
    [
        ({}, False, "ok", ""),
        ({1: True, 2: True}, True, "ok", ""),
        ({1: True, 2: False}, False, "warning", "node 0 alone"),
        ({1: False}, True, "failure", "NFS"),
        ({1: None}, False, "warning", "by hand"),
    ],
)
def test_the_output_folder_is_shared_or_says_what_that_asks(seen, sharded, verdict, says):
    found = cross_node.check_shared_folder("/out", seen, sharded)
    assert (found.verdict, says in found.remedy) == (verdict, True)


def test_bus_bandwidth_follows_the_ring():
    # 1 GB in a second: over 4 ranks 2 x 3/4 of it moves over every link.
    assert CollectiveTiming("all", 0, 4, 10**9, 1.0).gbit == pytest.approx(12.0)
    assert CollectiveTiming("all", 0, 2, 10**9, 1.0).gbit == pytest.approx(8.0)


def timing(scope: str, gbit: float, node: int = 0, right: bool = True) -> CollectiveTiming:
    # Two ranks send as many bytes over a link as the buffer has.
    return CollectiveTiming(scope, node, 2, 10**9, 8 / gbit, right)


@pytest.mark.parametrize(
    ("gbit", "verdict", "says"),
    [(200, "ok", ""), (50, "ok", "100 Gbit/s are recommended"), (5, "warning", "NCCL_SOCKET_IFNAME")],
)
def test_speed_between_nodes_meets_the_bars(gbit, verdict, says):
    row, right = bandwidth.check_bandwidth([timing("between", gbit)], "nccl", [0, 1])
    assert (row.verdict, says in row.remedy, right.verdict) == (verdict, True, "ok")
    assert list(row.values) == [0, 1]


def test_inside_a_node_there_is_no_bar_and_all_ranks_together_may_be_faster():
    rows = bandwidth.check_bandwidth([timing("inside", 1, node=0), timing("inside", 2, node=1)], "nccl", [0, 1])
    assert rows[0].verdict == "ok"
    assert rows[0].values == {0: "953.7 MiB 8.0 s 1 Gbit/s", 1: "953.7 MiB 4.0 s 2 Gbit/s"}
    rows = bandwidth.check_bandwidth([timing("between", 8), timing("all", 40)], "nccl", [0, 1])
    assert rows[0].verdict == "ok"


def test_wrong_sums_are_a_failure_that_names_the_node():
    rows = bandwidth.check_bandwidth([timing("all", 50), timing("all", 50, node=1, right=False)], "nccl", [0, 1])
    assert (rows[-1].name, rows[-1].verdict, list(rows[-1].values)) == ("sums are right", "failure", [1])


@pytest.mark.parametrize(("backend", "says"), [("nccl", "NCCL_IB_GID_INDEX"), ("gloo", "GLOO_SOCKET_IFNAME")])
def test_a_group_that_does_not_form_says_which_ranks_and_what_to_try(backend, says):
    found = bandwidth.failed_group(backend, {2: "NCCL error\nunhandled", 3: ""}, {2: 1, 3: 1}, 150)
    assert found.values == {1: "rank 2: NCCL error unhandled; rank 3: did not end within 150 s"}
    assert (found.verdict, says in found.remedy) == ("failure", True)


def test_what_would_hang_a_group_keeps_it_from_being_tried():
    bad = [
        Check(name, {0: ""}, "failure") for name in ("host name", "data: rows", "version of nccl", "answers: report")
    ]
    assert bandwidth.find_blockers(bad) == ["host name", "version of nccl", "answers: report"]
    assert bandwidth.find_blockers([Check("host name", {0: ""}, "warning")]) == []


def test_the_summary_names_the_rows():
    rows = [Check("a", {0: ""}, "failure"), Check("b", {0: ""}, "warning"), Check("c", {0: ""}, "failure")]
    assert checks.summarize_checks(rows) == "2 failures (a, c) and 1 warning (b)"
    assert checks.summarize_checks([]) == "all ok"
