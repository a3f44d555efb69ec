"""The rows of preflight's table as docs/preflight.md lists them."""

from __future__ import annotations

import re
from typing import Any

from tests.conftest import REPO


def documented() -> set[str]:
    """The names in the first column of the page's tables."""
    lines = [line for line in (REPO / "docs" / "preflight.md").read_text().splitlines() if line.startswith("| `")]
    return {name for line in lines for name in re.findall(r"`([^`]+)`", line.split("|")[1])}


def undocumented(report: dict[str, Any]) -> set[str]:
    """Rows of a report that the page does not list."""
    plain = {re.split(r": |, | \(", row["name"])[0] for row in report["checks"]}
    return {re.sub(r"^version of .*", "version of NAME", name) for name in plain} - documented()
