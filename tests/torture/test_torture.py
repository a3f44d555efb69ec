"""A short job killed at random moments, resumed to its end; `UNSLOTH_DDP_TORTURE_RUNS` says how often."""

from __future__ import annotations

import os
import time

import pytest

from benchmarks.torture import is_bad, torture

RUNS = int(os.environ.get("UNSLOTH_DDP_TORTURE_RUNS", "20"))


@pytest.mark.torture
@pytest.mark.timeout(300 + 120 * RUNS)
def test_whatever_kills_the_job_it_ends_bit_identical(tmp_path):
    found = torture("kit", RUNS, 1, tmp_path, lambda so_far: print(so_far["each"][-1]), time.time() + 86400)
    assert found["runs"] == RUNS
    bad = [each for each in found["each"] if is_bad(each)]
    assert not bad, bad
