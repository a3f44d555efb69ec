"""A YAML file read without trusting it: plain values only, no key twice, and nothing that unfolds to gigabytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from unsloth_ddp.utils.errors import one_line

# Far above any real settings; PyYAML takes about a second for this much.
LARGEST_BYTES = 1 << 20
MOST_VALUES = 100_000
LONGEST_SEXAGESIMAL = 100


class Unreadable(ValueError):
    """A file that is no YAML of plain values; the message says why."""


def read_yaml(path: Path) -> Any:
    """The content of a YAML file.

    Raises:
        OSError: it cannot be opened.
        Unreadable: it is too large, or not YAML, or more than plain values.
    """
    with path.open("rb") as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise Unreadable(f"over {LARGEST_BYTES:,} bytes are too large for a file of settings")
    try:
        loader = _Loader(content.decode("utf-8"))
        node = loader.get_single_node()
        if node is None:
            return None
        if _values(node, {}) > MOST_VALUES:
            raise Unreadable(f"its aliases unfold to over {MOST_VALUES:,} values")
        return loader.construct_document(node)
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise Unreadable(one_line(error)) from None


class _Loader(yaml.SafeLoader):
    """Refuses an option given twice, where PyYAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


def _values(node: yaml.Node, counted: dict[int, int | None]) -> int:
    """Number of values that a node unfolds to, its aliases followed; `counted` holds None for nodes being counted."""
    if isinstance(node, yaml.ScalarNode):
        # YAML 1.1 reads 1:30:00 as a number, in a time that grows with the square of its length.
        if node.tag.endswith((":int", ":float")) and ":" in node.value and len(node.value) > LONGEST_SEXAGESIMAL:
            raise Unreadable(f"a number of {len(node.value):,} characters")
        return 1
    if id(node) in counted:
        known = counted[id(node)]
        if known is None:
            raise Unreadable("an alias that contains itself")
        return known
    counted[id(node)] = None
    inner = node.value if isinstance(node, yaml.SequenceNode) else [item for pair in node.value for item in pair]
    counted[id(node)] = total = 1 + sum(_values(item, counted) for item in inner)
    return total
