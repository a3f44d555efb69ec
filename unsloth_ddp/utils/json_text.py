"""Parse JSON text in which no key is given twice; Python's own parser silently keeps the last value."""

from __future__ import annotations

import json
from typing import Any


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)[:100]!r} is given twice")
    return found


# As json.loads: malformed text raises json.JSONDecodeError, other faults ValueError (with the reason) or RecursionError.
DECODER = json.JSONDecoder(object_pairs_hook=_unique)
