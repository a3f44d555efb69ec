"""Put the measured speed of several GPUs beside a published table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Speed of several GPUs over one, as the multi-node guide publishes it (2 A100s a node).
GUIDE = {2: 1.9, 4: 3.5, 8: 6.4}


def scaling_rows(cells: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each run on several GPUs whose contestant also ran on one, fewest GPUs first."""
    done = [one for one in cells if one["exit_code"] == 0]
    single: dict[tuple[str, ...], list[float]] = {}
    for one in done:
        if one["processes"] == 1:
            single.setdefault(_kind(one), []).append(one["tokens_per_second_a_gpu"])
    rows = []
    for one in sorted(done, key=lambda one: (_kind(one), one["scaling"], one["processes"])):
        count = one["processes"]
        if count == 1 or _kind(one) not in single:
            continue
        alone = sorted(single[_kind(one)])[len(single[_kind(one)]) // 2]
        measured = one["tokens_per_second_a_gpu"] / alone
        published = GUIDE.get(count)
        rows.append(
            [
                f"{one['work']} {one['shape']} {one['method']}",
                str(count),
                one["scaling"],
                f"{count * measured:.2f}x",
                f"{measured:.1%}",
                f"{published}x ({published / count:.0%})" if published else "-",
            ]
        )
    return rows


SCALING_HEAD = ["work", "GPUs", "scaling", "speed over one GPU", "efficiency", "published"]


def _kind(cell: Mapping[str, Any]) -> tuple[str, ...]:
    return cell["work"], cell["shape"], cell["method"], cell["contestant"]
