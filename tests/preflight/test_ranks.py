"""Preflight as several ranks, one node's facts changed at a time; hosts of their own are in tests/cluster/."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL, demo_rows, write_jsonl
from tests.preflight.rows import undocumented
from tests.ranks import Result, run_ranks


def as_nodes(per_node: int, ranks: int):
    """The environment of each rank when every `per_node` of them are a node."""

    def environ_of(rank: int) -> dict[str, str]:
        return {
            "LOCAL_RANK": str(rank % per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "NNODES": str(ranks // per_node),
            "NODE_RANK": str(rank // per_node),
        }

    return environ_of


def preflight(cwd: str, argv: list[str], changed: dict[int, list[Any]]) -> None:
    """`python -m unsloth_ddp.preflight`; rank N with the options `changed[N]`, or first changed by a function in it."""
    from unsloth_ddp.preflight import __main__

    os.chdir(cwd)
    for change in changed.get(int(os.environ["RANK"]), []):
        if callable(change):
            change()
        else:
            argv = [*argv, change]
    sys.argv = ["preflight", *argv]
    __main__.main()


def another_trl() -> None:
    """This rank's node has another version of a package."""
    from unsloth_ddp.preflight.node import identity

    found = identity.read_versions() | {"trl": "0.1"}
    identity.read_versions = lambda: found


def wrong_sums() -> None:
    """This rank sees wrong numbers."""
    from unsloth_ddp.preflight.between.bandwidth import CollectiveBenchmark

    true = CollectiveBenchmark._time
    CollectiveBenchmark._time = lambda self, *given: (true(self, *given)[0], False)


def hanging_folder() -> None:
    """This rank's node cannot look into the output folder: the server of its file system is gone."""
    from unsloth_ddp.preflight import run as runs
    from unsloth_ddp.preflight.node import disks

    runs.FOLDER_SECONDS = 1
    disks.find_token = lambda *given: time.sleep(100)


def hangs() -> None:
    """This rank never comes through the measurement."""
    from unsloth_ddp.preflight import run as runs
    from unsloth_ddp.preflight.between.bandwidth import CollectiveBenchmark

    runs.MEASURE_SECONDS = 3
    CollectiveBenchmark.run = lambda self, store: time.sleep(100)


def fails() -> None:
    """This rank's group does not form."""
    from unsloth_ddp.preflight.between.bandwidth import CollectiveBenchmark

    CollectiveBenchmark.run = broken


def broken(self: Any, store: Any) -> None:
    """A collective that fails as NCCL's do."""
    raise RuntimeError("NCCL error: unhandled system error\nlast error: no socket interface found")


@pytest.fixture
def run(tmp_path):
    """Run preflight as these ranks: its result, and node 0's report."""

    def go(count: int, per_node: int = 1, changed: dict[int, list[Any]] | None = None, argv: str = "--use_cpu"):
        words = [*argv.split(), "--output_dir", str(tmp_path / "outputs"), "--json", str(tmp_path / "report.json")]
        result = run_ranks(
            count,
            preflight,
            str(tmp_path),
            ["--timeout", "20", *words],
            changed or {},
            folder=tmp_path / "out",
            environ_of=as_nodes(per_node, count),
            # The launcher of one node does not end the processes of another, which may still be printing.
            end=per_node > 1,
        )
        return result, Report(tmp_path / "report.json")

    return go


class Report:
    """The JSON report, by row."""

    def __init__(self, path: Path) -> None:
        self.json = json.loads(path.read_text()) if path.exists() else {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        (row,) = [row for row in self.json["checks"] if row["name"] == name]
        return row

    @property
    def failures(self) -> list[str]:
        """The names of the rows that failed."""
        return [row["name"] for row in self.json["checks"] if row["verdict"] == "failure"]


def only_rank_0_showed_a_table(result: Result) -> bool:
    return ["Verdict" in text for text in result.outputs] == [True] + [False] * (len(result.outputs) - 1)


@pytest.mark.slow
def test_two_nodes_of_two_ranks(run, tmp_path):
    result, report = run(4, per_node=2)
    result.check()
    assert only_rank_0_showed_a_table(result)
    assert report.failures == []
    assert {t["scope"]: t["ranks"] for t in report.json["timings"]} == {"inside": 2, "between": 2, "all": 4}
    assert {t["node"] for t in report.json["timings"] if t["scope"] == "inside"} == {0, 1}
    assert all(t["right"] and t["seconds"] > 0 for t in report.json["timings"])
    assert report["output folder shared"]["values"]["1"] == "shared with node 0"
    assert report["sums are right"]["verdict"] == "ok"
    assert undocumented(report.json) == set()
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
def test_one_node_that_differs_in_everything_is_named_in_every_row(run, tmp_path):
    for name, rows in (("a", demo_rows()[:5]), ("b", demo_rows()[5:9])):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "rows.jsonl", rows)
    changed = {
        2: [
            *("--dataset", str(tmp_path / "b" / "rows.jsonl"), "--seed", "7"),
            *("--output_dir", str(tmp_path / "elsewhere")),
            another_trl,
        ]
    }
    for rank in (0, 1):
        changed[rank] = ["--dataset", str(tmp_path / "a" / "rows.jsonl")]
    result, report = run(3, changed=changed, argv=f"--use_cpu --model {DEMO_MODEL}")
    assert result.codes[0] == 1
    assert report.failures == ["version of trl", "settings", "data: dataset rows.jsonl"]
    assert report["version of trl"]["values"]["2"] == "0.1"
    assert "seed=7" in report["settings"]["values"]["2"]
    values = report["data: dataset rows.jsonl"]["values"]
    assert values["0"] == values["1"] != values["2"]
    assert report["output folder shared"]["values"] == {
        "0": str(tmp_path / "outputs"), "1": "shared with node 0", "2": "its own disk"
    }  # fmt: skip
    assert undocumented(report.json) == set()
    assert "found 3 failures (version of trl, settings, data: dataset rows.jsonl)" in result.outputs[2]


def another_node_rank() -> None:
    """This rank's node was given another number than the launcher's."""
    os.environ["NODE_RANK"] = "0"


@pytest.mark.slow
def test_a_node_whose_variables_contradict_the_launcher_is_named_to_all(run):
    result, report = run(2, changed={1: [another_node_rank]})
    assert result.codes == [1, 1]
    assert report.failures == ["environment"]
    assert report["environment"]["remedy"] == (
        "Node 1: NODE_RANK is 0, but to the launcher this is 1; give the launcher the same number."
    )
    assert "found 1 failure (environment)" in result.outputs[1]


def without_a_place() -> None:
    """This rank's launcher set something that no launcher sets."""
    os.environ["LOCAL_WORLD_SIZE"] = ""


@pytest.mark.slow
def test_a_node_without_a_place_is_missing_to_the_others_within_their_limit(run):
    result, report = run(2, changed={1: [without_a_place]}, argv="--use_cpu --timeout 3")
    assert result.codes == [1, 1]
    assert report.failures == ["arrived"]
    assert "Node 1 did not arrive at" in report["arrived"]["remedy"] and "within 3 s" in report["arrived"]["remedy"]
    assert "1 failure (environment)" in result.outputs[1]


@pytest.mark.slow
def test_sharding_needs_a_shared_output_folder(tmp_path):
    changed = {1: ["--output_dir", str(tmp_path / "elsewhere")]}
    words = ["--use_cpu", "--output_dir", str(tmp_path / "outputs"), "--timeout", "20"]
    result = run_ranks(
        2,
        preflight,
        str(tmp_path),
        words,
        changed,
        folder=tmp_path / "out",
        environ={"UNSLOTH_FSDP2": "1"},
        environ_of=as_nodes(1, 2),
    )
    assert result.codes[0] == 1
    assert "1 failure (output folder shared)" in result.outputs[0]


@pytest.mark.slow
def test_an_output_folder_that_hangs_is_not_waited_for(run):
    result, report = run(2, changed={1: [hanging_folder]})
    result.check()
    assert report["output folder shared"]["values"]["1"] == "not known"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        pytest.param(fails, "rank 1: NCCL error: unhandled system error last error", marks=pytest.mark.slow),
        pytest.param(hangs, "rank 1: did not end within 3 s", marks=pytest.mark.slow),
    ],
)
def test_a_measurement_that_fails_or_hangs_names_the_rank(run, what, says):
    # The others wait in vain for rank 1, so they are cut short too.
    changed = {1: [what], 0: [hangs]}
    result, report = run(2, changed=changed)
    assert result.codes[0] == 1
    (row,) = [r for r in report.json["checks"] if r["name"].startswith("process group")]
    assert row["verdict"] == "failure"
    assert row["values"]["1"].startswith(says)
    assert undocumented(report.json) == set()
    # It would hang for 100 seconds.
    assert result.seconds < 90


def another_secret() -> None:
    """This rank's node was given another secret than the others, as a stranger would."""
    os.environ["UNSLOTH_DDP_SECRET"] = "guessed"


def the_jobs_secret() -> None:
    os.environ["UNSLOTH_DDP_SECRET"] = "made by the launch file"


@pytest.mark.slow
def test_a_node_without_the_jobs_secret_is_refused(run):
    result, report = run(2, changed={0: [the_jobs_secret], 1: [another_secret]})
    assert result.codes == [1, 1]
    assert report.failures == ["arrived"]
    # Either node may be the first to read what the other wrote.
    assert re.search(r"who/[12] is not signed with this job's UNSLOTH_DDP_SECRET", report["arrived"]["remedy"])
    result, report = run(2, changed={rank: [the_jobs_secret] for rank in (0, 1)})
    result.check()


@pytest.mark.slow
def test_wrong_sums_are_told(run):
    result, report = run(2, changed={1: [wrong_sums]})
    assert result.codes[0] == 1
    assert report.failures == ["sums are right"]
    assert list(report["sums are right"]["values"]) == ["1"]
