"""Test that the available host memory is the smallest of what the machine and a container's limit leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from unsloth_ddp.utils.host_memory import available_bytes


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MACHINE = {"proc/meminfo": "MemTotal:  9 kB\nMemAvailable:      5000 kB\nHugePages_Total:  0\n"}
V2 = {
    "sys/fs/cgroup/memory.current": "900000",
    "sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 60000\nactive_file 40000\n",
}
V1 = {
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "4000",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "4000",
    "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 300\ntotal_active_file 200",
}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, None),
        (MACHINE, 5_120_000),
        ({**MACHINE, **V2, "sys/fs/cgroup/memory.max": "max\n"}, 5_120_000),
        ({**MACHINE, **V2, "sys/fs/cgroup/memory.max": "1000000\n"}, 200_000),
        ({**V2, "sys/fs/cgroup/memory.max": "1000000\n"}, 200_000),
        ({**MACHINE, **V1}, 500),
        ({**V1, "proc/meminfo": "MemAvailable: 5000 kB\nSwapFree: 3 kB\n"}, 500 + 3072),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, files: dict[str, str], found: int | None) -> None:
    write(tmp_path, files)
    assert available_bytes(tmp_path) == found


def test_this_machine_has_some() -> None:
    found = available_bytes()
    assert found is None or found > 0
