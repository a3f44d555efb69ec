"""A stand-in for the `datasets` library: a few rows whose unknown columns hold `Text`.

What a program does to a dataset really happens (its functions are called on rows), because that is where a helper
that a conversion lost would be missed. Standard library only.
"""

from collections.abc import Iterator
from typing import Any

from events import RECORDER
from stubs import RULES, VALUES, Forgiving, Stub, Text

ROWS = 8


class Row(dict):
    """A row: columns that nobody set hold text."""

    def __missing__(self, key: Any) -> Any:
        return Text("1", f"row[{key}]")

    def __contains__(self, key: Any) -> bool:
        return True

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        return dict.pop(self, key, self[key])


class Batch(dict):
    """Several rows by column: columns that nobody set hold that many texts."""

    def __init__(self, columns: dict[str, Any], size: int) -> None:
        super().__init__(columns)
        self.size = size

    def __missing__(self, key: Any) -> Any:
        return [Text("1", f"row[{key}]") for _ in range(self.size)]


class FakeDataset:
    """Behaves like a `datasets.Dataset` of a few rows, and like a DatasetDict where a split name is asked for."""

    _name = "dataset"

    def __init__(self, rows: list[Row] | None = None, is_dict: bool = False) -> None:
        self.rows = rows if rows else [Row() for _ in range(ROWS)]
        self.is_dict = is_dict
        self.splits: dict[str, FakeDataset] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"dataset.{name}")

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(["train", "test"]) if self.is_dict else iter(self.rows)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) and type(key) is str:
            if self.is_dict or key in ("train", "test", "validation"):
                return self.splits.setdefault(key, FakeDataset(self.rows))
            return Forgiving(row[key] for row in self.rows)
        if isinstance(key, slice):
            rows = self.rows[key] or self.rows[:1]
            return Batch({name: [row[name] for row in rows] for name in self.columns()}, len(rows))
        return self.rows[int(key) % len(self.rows)]

    def __setitem__(self, key: str, value: Any) -> None:
        self.splits[key] = value

    def columns(self) -> list[str]:
        """The columns that are known."""
        return list(self.rows[0])

    @property
    def column_names(self) -> list[str]:
        return self.columns() or ["text"]

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def keys(self) -> list[str]:
        return list(self.splits) or ["train"]

    def items(self) -> list[tuple[str, Any]]:
        return [(name, self[name]) for name in self.keys()]

    def values(self) -> list[Any]:
        return [self[name] for name in self.keys()]

    def map(self, function: Any = None, batched: bool = False, with_indices: bool = False, **kwargs: Any) -> Any:
        RECORDER.add("data", "map")
        kwargs = kwargs.get("fn_kwargs") or {}
        if batched:
            batch = Batch({name: [row[name] for row in self.rows] for name in self.columns()}, len(self.rows))
            got = call_user(function, batch, *([list(range(len(self)))] if with_indices else []), **kwargs)
            rows = [Row(row) for row in self.rows]
            if isinstance(got, dict):
                for name, values in got.items():
                    for row, value in zip(rows, Forgiving(values), strict=False):
                        row[name] = value
            return FakeDataset(rows, self.is_dict)
        rows = []
        for index, row in enumerate(self.rows):
            got = call_user(function, Row(row), *([index] if with_indices else []), **kwargs)
            rows.append(Row({**row, **got}) if isinstance(got, dict) else Row(row))
        return FakeDataset(rows, self.is_dict)

    def filter(self, function: Any = None, with_indices: bool = False, **kwargs: Any) -> Any:
        RECORDER.add("data", "filter")
        for index, row in enumerate([] if kwargs.get("batched") else self.rows):
            call_user(function, row, *([index] if with_indices else []))
        return FakeDataset(self.rows, self.is_dict)

    def same(self, *args: Any, **kwargs: Any) -> Any:
        return FakeDataset(self.rows, self.is_dict)

    def shuffle(self, seed: Any = None, *args: Any, **kwargs: Any) -> Any:
        RECORDER.add("random", "shuffle", seeded=seed is not None or kwargs.get("generator") is not None)
        return self.same()

    select = remove_columns = cast_column = cast = take = skip = shard = sort = with_format = same
    select_columns = flatten = flatten_indices = class_encode_column = set_format = with_transform = same

    def train_test_split(self, *args: Any, **kwargs: Any) -> Any:
        seeded = any(kwargs.get(name) is not None for name in ("seed", "generator")) or kwargs.get("shuffle") is False
        RECORDER.add("random", "train_test_split", seeded=seeded)
        made = FakeDataset(self.rows, is_dict=True)
        made["train"], made["test"] = FakeDataset(self.rows), FakeDataset(self.rows)
        return made

    def rename_column(self, old: str, new: str) -> Any:
        return FakeDataset([Row({**row, new: row[old]}) for row in self.rows], self.is_dict)

    def rename_columns(self, names: dict[str, str]) -> Any:
        made = self
        for old, new in names.items():
            made = made.rename_column(old, new)
        return made

    def add_column(self, name: str, values: Any, *args: Any, **kwargs: Any) -> Any:
        values = Forgiving(values)
        return FakeDataset([Row({**row, name: values[index]}) for index, row in enumerate(self.rows)])

    def add_item(self, row: Any) -> Any:
        return FakeDataset([*self.rows, Row(row)])

    def __repr__(self) -> str:
        return "Dataset(stub)"


def call_user(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the program's function on a made-up row: what the row cannot satisfy is noted, a missing name is raised."""
    if function is None:
        return None
    try:
        return function(*args, **kwargs)
    except NameError:
        raise
    except Exception as error:
        RECORDER.add("row_error", type(error).__name__, text=str(error)[:100])
        return None


def load(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not stub._name.endswith("load_from_disk"):  # which writes nothing that another could find half done
        RECORDER.add("data", "load", text=str(args[:1])[:80])
    split = kwargs.get("split")
    if isinstance(split, list | tuple):
        return [FakeDataset() for _ in split]
    return FakeDataset(is_dict=split is None)


def from_rows(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dataset.from_list and from_dict keep the rows that the program made."""
    given = args[0] if args else next(iter(kwargs.values()), None)
    if isinstance(given, dict):
        columns = {name: list(values)[:ROWS] for name, values in given.items()}
        size = max([len(values) for values in columns.values()], default=0)
        return FakeDataset([Row({n: v[i] for n, v in columns.items() if i < len(v)}) for i in range(size)])
    if isinstance(given, list | tuple):
        return FakeDataset([Row(row) for row in given[:ROWS] if isinstance(row, dict)])
    return FakeDataset()


def from_generator(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    generator = call_user(args[0] if args else kwargs.get("generator"))
    rows = []
    for _ in range(ROWS):
        row = call_user(next, generator, None) if generator is not None else None
        if row is None:
            break
        rows.append(Row(row))
    return FakeDataset(rows)


def passed_on(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions that take a dataset and give it back changed."""
    first = args[0] if args else next((v for v in kwargs.values() if isinstance(v, FakeDataset)), None)
    if isinstance(first, list | tuple) and first:
        first = first[0]
    return first if isinstance(first, FakeDataset) else FakeDataset()


def install() -> None:
    """Register the names."""
    for name in ("datasets.load_dataset", "datasets.load_from_disk", "datasets.load_dataset_builder"):
        RULES[name] = load
    for name in ("from_list", "from_dict"):
        RULES[f"datasets.Dataset.{name}"] = from_rows
    for name in ("from_pandas", "from_csv", "from_json", "from_parquet", "from_text"):
        RULES[f"datasets.Dataset.{name}"] = lambda stub, args, kwargs: FakeDataset()
    RULES["datasets.Dataset.from_generator"] = RULES["datasets.IterableDataset.from_generator"] = from_generator
    RULES["datasets.concatenate_datasets"] = RULES["datasets.interleave_datasets"] = passed_on
    RULES["datasets.DatasetDict"] = passed_on
    for name in ("standardize_sharegpt", "standardize_data_formats", "to_sharegpt", "apply_chat_template"):
        RULES[f"unsloth.{name}"] = RULES[f"unsloth.chat_templates.{name}"] = passed_on
    VALUES["datasets.Dataset"] = Stub("datasets.Dataset")
