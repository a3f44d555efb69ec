"""Read how much host memory is available to new allocations, within the limits of a container or job."""

from __future__ import annotations

from pathlib import Path

# Limit, use, and the field of memory.stat that counts the file pages of that use which the kernel frees on demand.
GROUPS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "inactive_file"),
    (
        "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "sys/fs/cgroup/memory/memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that processes can still allocate on this machine; None where the system does not tell.

    Args:
        root: of the file system.
    """
    found = [room for room in (_of_machine(root), *(_of_group(root, *group) for group in GROUPS)) if room is not None]
    return min(found) if found else None


def _of_machine(root: Path) -> int | None:
    kib = _fields(root / "proc/meminfo").get("MemAvailable:")
    return None if kib is None else kib * 1024


def _of_group(root: Path, limit: str, use: str, freed: str) -> int | None:
    try:
        allowed, used = int((root / limit).read_text()), int((root / use).read_text())
    except (OSError, ValueError):  # no such group, or no limit
        return None
    return max(0, allowed - used + _fields((root / use).parent / "memory.stat").get(freed, 0))


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number on every line."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
