"""Read a YAML file of plain values in which no key is given twice."""

from pathlib import Path
from typing import Any

import yaml

from unsloth_ddp.utils.errors import UserError, one_line, os_reason

# Far above any settings: a data or weights file given as --config by mistake is not parsed for minutes.
LARGEST_BYTES = 1 << 20
# With aliases, a few lines can stand for more values than fit into memory, as soon as they are shown or copied.
MOST_CHARACTERS = 4 * LARGEST_BYTES


class Unreadable(ValueError):
    """The file is not YAML of plain values; the message gives the reason."""


def read_mapping(path: Path, title: str) -> dict[str, Any]:
    """Return the names and values of a YAML file, which errors call `title`.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        content = read_yaml(path)
    except OSError as error:
        raise UserError(f"{title} cannot be read: {os_reason(error)}.") from None
    except Unreadable as error:
        raise UserError(f"{title} is not YAML: {str(error).rstrip('.')}.") from None
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise UserError(f"{title} holds no options, which stand as one `name: value` a line.")
    return content


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
        values = yaml.load(content.decode("utf-8"), Loader=_Loader)  # noqa: S506 (a SafeLoader)
        if _written_out(values, {}) > MOST_CHARACTERS:
            raise Unreadable("its aliases (*name) stand for too many values; write them out")
        return values
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable("nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        if error.problem is None or error.problem_mark is None:
            raise Unreadable(one_line(error)) from None
        # "but found another document" follows what was expected.
        begun = f"{error.context}, " if error.context and error.problem.startswith("but ") else ""
        raise Unreadable(f"{one_line(begun + error.problem)} (line {error.problem_mark.line + 1})") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise Unreadable(one_line(error)) from None


def _written_out(value: Any, counted: dict[int, int]) -> int:
    """Return about how many characters a value has if every alias in it is written out.

    Args:
        counted: of the lists and mappings seen so far, by id.

    Raises:
        Unreadable: a list or mapping holds itself.
    """
    if not isinstance(value, (dict, list, tuple, set)):
        return len(value) + 1 if isinstance(value, (str, bytes)) else 1
    if id(value) not in counted:
        counted[id(value)] = -1
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        counted[id(value)] = 1 + sum(_written_out(item, counted) for item in inner)
    if counted[id(value)] < 0:
        raise Unreadable("an alias (*name) stands for a value that it is part of")
    return counted[id(value)]


class _Loader(yaml.SafeLoader):
    """Refuses a key given twice, of which PyYAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            keys.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """Return a number as YAML 1.2 reads it: 010 is 10, not octal, and 1:30:00 is text, not a number in base 60."""
        text = str(self.construct_scalar(node))
        if ":" in text:
            return text
        if node.tag.endswith("int") and text.lstrip("+-").replace("_", "").isdecimal():
            return int(text)
        return self.construct_yaml_float(node) if node.tag.endswith("float") else self.construct_yaml_int(node)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)
