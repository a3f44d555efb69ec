"""Select the rows of a run: slices of a dataset, several datasets mixed by weights, and renamed columns."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from unsloth_ddp.utils.errors import UserError

Row = TypeVar("Row")
# A split with a slice of it, each end with or without %.
SLICE = re.compile(r"([\w.-]*)(?:\[(-?\d+)?(%)?:(-?\d+)?(%)?\])?")


def read_slice(
    name: str, split: str, *, of_file: bool, streaming: bool = False
) -> tuple[str, list[int | None], list[bool]]:
    """Return the name of a split, the ends of the slice of it, and whether each is a percentage.

    Raises:
        UserError: the slice cannot be read, or not of rows that are streamed; a file has no such split.
    """
    if not (match := SLICE.fullmatch(split)):
        raise UserError(
            f"dataset {name}[{split}] is no slice that can be read; write one such as [:1000] or [10%:20%]."
        )
    if of_file and match[1] != "train":
        raise UserError(
            f"dataset {name}[{split}]: a file has no splits; name the file of the split, or a slice ([:1000])."
        )
    ends = [int(end) if end else None for end in (match[2], match[4])]
    percent = [bool(match[3]), bool(match[5])]
    if streaming and (any(percent) or any(end is not None and end < 0 for end in ends)):
        raise UserError(
            f"dataset {name}[{split}]: the number of streamed rows is not known; give a slice by numbers, such as "
            "[:1000]."
        )
    if any(end is not None and share and abs(end) > 100 for end, share in zip(ends, percent, strict=True)):
        raise UserError(f"dataset {name}[{split}]: a slice ends at 100%; write one such as [:10%].")
    return match[1], ends, percent


def sliced(
    name: str, split: str, read: Callable[[], Iterator[Row]], *, of_file: bool, streaming: bool = False
) -> Iterator[Row]:
    """Yield the rows of a slice of a file or a stream; rows are counted first where that takes it.

    Raises:
        UserError: the slice holds no rows.
    """
    _, ends, percent = read_slice(name, split, of_file=of_file, streaming=streaming)
    if ends == [None, None]:
        yield from read()
        return
    if any(percent) or any(end is not None and end < 0 for end in ends):
        rows = sum(1 for _ in read())
        ends = [
            end if end is None else round(end * rows / 100) if share else end
            for end, share in zip(ends, percent, strict=True)
        ]
        ends = [end if end is None or end >= 0 else max(0, rows + end) for end in ends]
    row = None
    for row in itertools.islice(read(), *ends):
        yield row
    if row is None:
        raise UserError(f"dataset {name}[{split}] holds no rows; give another slice.")


def mixed(rows: Sequence[Iterator[Row]], weights: Sequence[float | None]) -> Iterator[Row]:
    """Yield the rows of several datasets one dataset after the other, or mixed by their weights if one has a weight.

    With weights no row is repeated: the mixture ends with the first dataset of which it needs another row. A dataset
    without a weight has 1.
    """
    if not any(weights):
        yield from itertools.chain.from_iterable(rows)
        return
    yielded = [0] * len(rows)
    while True:
        number = min(range(len(rows)), key=lambda i: (yielded[i] + 1) / (weights[i] or 1))
        try:
            row = next(rows[number])
        except StopIteration:
            return
        yielded[number] += 1
        yield row


def renamed(columns: Any, names: Mapping[Any, str]) -> Any:
    """Return the columns of a row under other names, all renamed at once.

    Raises:
        UserError: two columns would have one name.
    """
    if not isinstance(columns, dict):
        return columns
    result: dict[Any, Any] = {}
    for name, value in columns.items():
        new = names.get(name, name)
        if result.get(new) is not None and value is not None:
            raise UserError(
                f"the row has two columns {new} after --columns; rename the other one too, such as {new}=other_{new}."
            )
        result[new] = result.get(new) if value is None else value
    return result
