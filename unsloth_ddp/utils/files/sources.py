"""Read how an option names a dataset: NAME, and after it, in this order, @SUBSET, [SPLIT] and :WEIGHT."""

import math
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from unsloth_ddp.utils.errors import UserError

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
WEIGHT = re.compile(r"(.+):([^:/\[\]]*)", re.DOTALL)
KEYS = ("path", "subset", "split", "weight")


class Source(NamedTuple):
    """A dataset of a run.

    Attributes:
        name: A file, a folder (with --streaming) or a Hub id.
        subset: The configuration of a Hub dataset.
        split: A split of a Hub dataset (train, train[:10%]), or a slice alone ([:10%]), which a file has too.
        weight: The number of its rows beside those of the other datasets.
    """

    name: str
    subset: str | None = None
    split: str | None = None
    weight: float | None = None

    @property
    def suffix(self) -> str:
        """Return what follows the name in an option."""
        split = self.split and (self.split if self.split.startswith("[") else f"[{self.split}]")
        weight = "" if self.weight is None else f":{self.weight:g}"
        return f"{f'@{self.subset}' if self.subset else ''}{split or ''}{weight}"

    def __str__(self) -> str:
        return self.name + self.suffix

    def split_of(self, default: str) -> str:
        """Return the split to read, where `default` is the one of datasets that name none."""
        return (default + self.split if self.split.startswith("[") else self.split) if self.split else default


def read_source(text: str) -> Source:
    """Return the dataset that a value of --dataset names; a path that exists is a name, whatever its characters.

    Raises:
        UserError: what follows the name is no weight.
    """
    name, weight, split, subset = text, None, None, None
    if os.path.exists(os.path.expanduser(text)):
        return Source(text)
    if text.count("[") != text.count("]"):
        raise UserError(
            f"dataset {text[:200]}: a bracket is not closed; write a slice as in {text.partition('[')[0]}[:10%]."
        )
    if (match := WEIGHT.fullmatch(name)) and not match[1].endswith(":"):
        name, weight = match[1], _weight(text, match[2])
    if name.endswith("]") and not os.path.exists(os.path.expanduser(name)):
        start = _opening_bracket(name)
        name, split = name[:start], name[start + 1 : -1].strip()
        if not split or not name:
            raise UserError(f"dataset {text}: the brackets hold no split; write one, such as {name or 'NAME'}[:10%].")
        split = f"[{split}]" if ":" in split and "[" not in split else split
    repository, at, after = name.rpartition("@")
    if at and after and HUB_ID.fullmatch(repository) and not os.path.exists(os.path.expanduser(name)):
        name, subset = repository, after
    return Source(name, subset, split, weight)


def _opening_bracket(text: str) -> int:
    """Return the index of the bracket that the last character closes; 0 where there is none."""
    depth = 0
    for index in range(len(text) - 1, -1, -1):
        depth += (text[index] == "]") - (text[index] == "[")
        if depth == 0:
            return index
    return 0


def _weight(text: str, value: Any) -> float:
    try:
        weight = float(value)
    except (TypeError, ValueError):
        weight = math.nan
    if isinstance(value, bool) or not 0 < weight < math.inf:
        raise UserError(
            f"dataset {text[:200]}: the weight is {str(value)[:100] or 'empty'}, but it takes a number above 0; a "
            "slice stands in brackets, such as [:10%]."
        )
    return weight


def source_text(value: Any) -> Any:
    """Return a mapping of a YAML file as the text that names the same dataset; any other value as it is.

    Raises:
        UserError: it has other keys than KEYS, or a value that is none.
    """
    if not isinstance(value, Mapping):
        return value
    unknown = [str(key) for key in value if key not in KEYS]
    if unknown or not isinstance(value.get("path"), str) or not value["path"].strip():
        what = f"{unknown[0][:100]} is not a key of a dataset" if unknown else "a dataset needs a path"
        raise UserError(f"{what}; the keys are {', '.join(KEYS)}.")
    path, weight = value["path"], value.get("weight")
    wrong = [key for key in ("subset", "split") if value.get(key) is not None and not isinstance(value[key], str)]
    if wrong:
        raise UserError(f"dataset {path}: {wrong[0]} is {value[wrong[0]]!r}, but it takes text; put it in quotes.")
    return str(Source(path, value.get("subset"), value.get("split"), None if weight is None else _weight(path, weight)))
