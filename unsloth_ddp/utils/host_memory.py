"""Read how much host memory is available to new allocations, within the limit of a container."""

from collections.abc import Sequence
from pathlib import Path

# Limit, use, and the fields of memory.stat that count file pages, which the kernel frees on demand. Those of a model's
# files are active once they are read twice.
GROUPS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", ("inactive_file", "active_file")),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that processes can still allocate on this machine, swap included; None if that is unknown."""
    machine = _fields(root / "proc/meminfo")
    amounts = [room for group in GROUPS if (room := _of_group(root, *group)) is not None]
    if "MemAvailable:" in machine:
        amounts.append(machine["MemAvailable:"] * 1024)
    # A container may be allowed less of the swap, whose limit is not read.
    return min(amounts) + machine.get("SwapFree:", 0) * 1024 if amounts else None


def _of_group(root: Path, limit: str, use: str, freed: Sequence[str]) -> int | None:
    try:
        allowed, used = int((root / limit).read_text()), int((root / use).read_text())
    except (OSError, ValueError):  # no such group, or no limit
        return None
    counts = _fields((root / use).parent / "memory.stat")
    return max(0, allowed - used + sum(counts.get(name, 0) for name in freed))


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number on every line."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
