"""Read a YAML file of plain values in which no key is given twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from unsloth_ddp.utils.errors import one_line

# Far above any settings: a data or weights file given as --config by mistake is not parsed for minutes.
LARGEST_BYTES = 1 << 20


class Unreadable(ValueError):
    """The file is not YAML of plain values; the message gives the reason."""


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file.

    Raises:
        OSError: it cannot be opened.
        Unreadable: it is too large, or not YAML, or holds more than plain values.
    """
    with path.open("rb") as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise Unreadable(f"it has over {LARGEST_BYTES:,} bytes, too many for a file of settings")
    try:
        return yaml.load(content.decode("utf-8"), Loader=_Loader)  # noqa: S506 (a SafeLoader)
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise Unreadable(one_line(error)) from None


class _Loader(yaml.SafeLoader):
    """Refuses a key given twice, of which PyYAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)
