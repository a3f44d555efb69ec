"""The soak's verdict, and a short soak for real."""

from __future__ import annotations

import pytest

from benchmarks.robustness.soak import Sample, judge, soak


def samples(mib_per_step: float = 0.0, files_per_step: float = 0.0, threads_per_step: float = 0.0) -> list[Sample]:
    """1000 steps that waver by 2 MiB and, while they save, by two files; 300 MiB more over the first hundred."""
    return [
        Sample(
            seconds=step / 2,
            step=step,
            mib=500 + 3 * min(step, 100) + step % 3 + mib_per_step * step,
            files=40 + 2 * (step % 20 == 0) + int(files_per_step * step),
            threads=12 + int(threads_per_step * step),
        )
        for step in range(1, 1000, 5)
    ]


@pytest.mark.parametrize(
    ("growth", "grows"),
    [
        ({}, []),
        ({"mib_per_step": 0.003}, []),
        ({"mib_per_step": 0.006}, ["memory"]),
        ({"files_per_step": 0.01}, ["open_files"]),
        ({"threads_per_step": 0.002}, ["threads"]),
    ],
)
def test_what_grows_is_named(growth, grows):
    found = judge(samples(**growth))
    assert [name for name, flat in found["flat"].items() if not flat] == grows
    assert found["mib_per_1000_steps"] == pytest.approx(1000 * growth.get("mib_per_step", 0), abs=0.5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_soak(tmp_path):
    """Too short for a bound on memory in 1000 steps; files, threads and checkpoints are bounded all the same."""
    found = soak(300, tmp_path, every=0.5)
    assert found["steps"] == 300
    assert found["most_checkpoints_at_once"] <= 3
    for rank in (0, 1):
        verdict = found["ranks"][rank]
        assert verdict["samples_after_warm_up"] >= 10
        assert verdict["flat"]["open_files"] and verdict["flat"]["threads"], verdict
        assert verdict["mib"][1] - verdict["mib"][0] < 30, verdict
