"""The data of a run: read and checked before any model is loaded, tokenized once per node, shared by its ranks.

The first process of each node reads and tokenizes into a folder beside the datasets cache; the others wait and map
the same files into memory. Which rows a rank sees in which order is decided in batch.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
import xxhash

from unsloth_ddp.config.parse import Settings
from unsloth_ddp.data.arrow_rows import ArrowRows
from unsloth_ddp.data.batch_plan import BatchPlan
from unsloth_ddp.data.formats import Example, to_example
from unsloth_ddp.data.labels import IGNORED, supervised_positions
from unsloth_ddp.data.packing import Packing, PackingDecision, Request, plan_step
from unsloth_ddp.data.sources import checked_files, is_file, left_out, read_rows
from unsloth_ddp.data.tokenize import Encoder
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import UserError

ROWS_AT_A_TIME = 100
# Rows that stand for all of a stream until they are seen: what is planned is planned from them.
STREAM_HEAD = 1000
EXAMPLE_FEATURES = datasets.Features({"place": datasets.Value("string"), "example": datasets.Value("string")})
TOKEN_FEATURES = datasets.Features(
    {
        "input_ids": datasets.List(datasets.Value("int32")),
        "labels": datasets.List(datasets.Value("int32")),
        "overlong": datasets.Value("bool"),
        "supervised": datasets.Value("int32"),
    }
)


@dataclass(frozen=True)
class Counts:
    """What a set holds: rows, tokens, supervised (next-token) predictions, rows that were over max_length."""

    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    dropped: int = 0
    longest: int = 0


@dataclass(frozen=True)
class TokenizedRows:
    """A tokenized set. `dataset` holds one row more than `counts.rows`: the filler at its end (see batch.RowOrder).

    `packing` says which rows share a pack, where they are packed. Of a set that is `streamed` it is only the first
    STREAM_HEAD rows of the source.
    """

    dataset: datasets.Dataset
    counts: Counts
    packing: Packing | None = None
    streamed: bool = False

    @property
    def units(self) -> int:
        """What the batch plan counts: packs, or rows."""
        return self.counts.rows if self.packing is None else len(self.packing)

    @property
    def examples(self) -> ArrowRows | PackedRows:
        """The units, and the filler at their end."""
        rows = ArrowRows(self.dataset)
        return rows if self.packing is None else PackedRows(rows, self.packing)

    def lengths(self) -> np.ndarray:
        """Tokens of each unit and of the filler, int64 (units + 1,)."""
        rows = row_lengths(self.dataset)
        return rows if self.packing is None else np.append(self.packing.tokens, rows[-1])


@contextlib.contextmanager
def node_folder(runtime: Runtime) -> Iterator[Path]:
    """A folder that the ranks of each node share for this run; it is removed at the end.

    Where a run of several ranks fails it stays, since a rank may still be reading; a later run removes it.
    """

    def make() -> str:
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        host = socket.gethostname()
        _remove_stale(cache.glob(f"unsloth_ddp-{host}-*-*"))
        return tempfile.mkdtemp(prefix=f"unsloth_ddp-{host}-{os.getpid()}-", dir=cache)

    folder = runtime.broadcast_from_node_main(make)
    failed = True
    try:
        yield Path(folder)
        runtime.barrier()
        failed = False
    finally:
        if runtime.ranks.is_local_main and (runtime.ranks.world_size == 1 or not failed):
            shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(folders: Iterable[Path]) -> None:
    """Remove what killed or failed runs left: folders a day old whose process is gone."""
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):
            pid = int(folder.name.split("-")[-2])
            if time.time() - folder.stat().st_mtime > 86400 and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(folder, ignore_errors=True)


def read_examples(settings: Settings, runtime: Runtime, folder: Path) -> None:
    """Read every row of the run into `folder` and refuse the first bad one, naming file and line.

    Of training rows that are streamed only the first are read.
    """
    datasets.disable_progress_bars()

    def read() -> None:
        train = _examples(
            settings.dataset, settings.dataset_split, settings.dataset_config, folder, streaming=settings.streaming
        )
        if settings.eval_dataset:
            evaluation = _examples(settings.eval_dataset, settings.eval_dataset_split, settings.dataset_config, folder)
            evaluation.save_to_disk(folder / "examples_eval")
        elif settings.eval_fraction:
            train, evaluation = split_rows(train, settings.eval_fraction, settings.seed)
            evaluation.save_to_disk(folder / "examples_eval")
        train.save_to_disk(folder / "examples_train")

    runtime.on_main(read, per_node=True)


def held_out_examples(folder: Path, limit: int) -> list[Example]:
    """The first `limit` evaluation rows, as they were read."""
    path = folder / "examples_eval"
    if not limit or not path.exists():
        return []
    rows = datasets.load_from_disk(path)
    return [Example(**json.loads(row["example"])) for row in rows.select(range(min(limit, len(rows))))]


def split_rows(rows: datasets.Dataset, fraction: float, seed: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Set a seeded fraction of the rows aside for evaluation."""
    aside = round(len(rows) * fraction)
    if not 0 < aside < len(rows):
        raise UserError(
            f"eval_fraction {fraction} of {len(rows)} rows is {aside} rows; choose one that leaves rows on both sides."
        )
    parts = rows.train_test_split(test_size=aside, seed=seed)
    return parts["train"], parts["test"]


def _examples(
    sources: list[str], split: str, config: str | None, folder: Path, *, streaming: bool = False
) -> datasets.Dataset:
    files = checked_files(sources, streaming=streaming)
    empty = [file for file in files if file not in sources and Path(file).stat().st_size == 0]
    if streaming and (lists := left_out(sources)):
        more = f" and {len(lists) - 1} more .json files are" if len(lists) > 1 else " is"
        print(f"{lists[0]}{more} not read: a folder stands for its .jsonl, .parquet and .csv files.")

    def rows() -> Iterator[dict[str, str]]:
        for source in files:
            place = ""
            for place, columns in read_rows(source, split, config, streaming=streaming):
                try:
                    example = to_example(columns)
                    yield {"place": place, "example": json.dumps(dataclasses.asdict(example))}
                except UserError as error:
                    raise UserError(f"{place}: {error}") from None
            # A folder may hold empty shards; a file that is named was meant to hold rows.
            if not place and source in sources:
                raise UserError(f"dataset {source} holds no rows; leave it out, or look why it is empty.")
            if not place and source not in empty:
                empty.append(source)

    read = itertools.islice(rows(), STREAM_HEAD) if streaming else rows()
    examples = _from_rows(read, EXAMPLE_FEATURES, folder, ", ".join(sources))
    if empty:
        what = (
            f"{empty[0]} and {len(empty) - 1} more files hold no rows and add"
            if len(empty) > 1
            else f"{empty[0]} holds no rows and adds"
        )
        print(f"{what} nothing to the stream; look why, if rows were meant to be there.")
    return examples


def _from_rows(
    rows: Iterator[dict[str, Any]], features: datasets.Features, folder: Path, sources: str
) -> datasets.Dataset:
    path = Path(tempfile.mkdtemp(dir=folder)) / "rows.arrow"
    with datasets.arrow_writer.ArrowWriter(features=features, path=str(path)) as writer:
        for row in rows:
            writer.write(row)
        count, _ = writer.finalize()
    if not count:
        raise UserError(f"dataset {sources} holds no rows.")
    return datasets.Dataset.from_file(str(path))


def tokenize_examples(
    settings: Settings, runtime: Runtime, folder: Path, tokenizer: Any
) -> tuple[TokenizedRows, TokenizedRows | None]:
    """The training and the evaluation set (None without one), tokenized by one process of each node.

    Raises:
        UserError: the chat template cannot render a row, or a set has no supervised token.
    """

    def tokenize() -> None:
        encoder = Encoder(tokenizer, supervise_all=settings.loss_on == "all")
        for name in ("train", "eval"):
            if (folder / f"examples_{name}").exists():
                examples = datasets.load_from_disk(folder / f"examples_{name}")
                tokenized = _tokenize(examples, encoder, settings, "training" if name == "train" else "evaluation")
                tokenized.save_to_disk(folder / name)

    runtime.on_main(tokenize, per_node=True)
    evaluation = _tokenized_rows(folder / "eval") if (folder / "eval").exists() else None
    train = _tokenized_rows(folder / "train")
    return dataclasses.replace(train, streamed=settings.streaming), evaluation


def longest_row(settings: Settings, *sets: TokenizedRows | None) -> int:
    """Tokens of the longest row of these sets; --max_length where they are streamed, and so not known."""
    found = [one for one in sets if one is not None]
    return settings.max_length if any(one.streamed for one in found) else max(one.counts.longest for one in found)


def encode_row(encoder: Encoder, example: Example, max_length: int) -> dict[str, Any]:
    """`input_ids` and `labels` of an example, at most `max_length` each, and whether it was `overlong`.

    Raises:
        UserError: as Encoder.encode.
    """
    encoded = encoder.encode(example)
    cut = {name: values[:max_length] for name, values in encoded.items()}
    return {**cut, "overlong": len(encoded["input_ids"]) > max_length}


def _tokenize(examples: datasets.Dataset, encoder: Encoder, settings: Settings, purpose: str) -> datasets.Dataset:
    def encode(row: str, place: str) -> dict[str, Any]:
        try:
            encoded = encode_row(encoder, Example(**json.loads(row)), settings.max_length)
        except UserError as error:
            return {"input_ids": [], "labels": [], "overlong": False, "supervised": 0, "problem": f"{place}: {error}"}
        supervised = sum(label != IGNORED for label in encoded["labels"][1:])
        return {**encoded, "supervised": supervised, "problem": ""}

    def encode_all(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        encoded = [encode(row, place) for row, place in zip(batch["example"], batch["place"], strict=True)]
        return {name: [row[name] for row in encoded] for name in encoded[0]}

    tokenized = examples.map(
        encode_all,
        batched=True,
        batch_size=ROWS_AT_A_TIME,
        remove_columns=examples.column_names,
        num_proc=settings.dataset_num_proc if settings.dataset_num_proc > 1 else None,
        features=datasets.Features({**TOKEN_FEATURES, "problem": datasets.Value("string")}),
    )
    problems = _column(tokenized, "problem")
    problems = problems.filter(pc.not_equal(problems, ""))
    if len(problems):
        raise UserError(problems[0].as_py())
    tokenized = tokenized.remove_columns("problem")
    if settings.overlong == "drop":
        kept = np.flatnonzero(~_column(tokenized, "overlong").to_numpy())
        if not len(kept):
            raise UserError(
                f"All of the {len(tokenized):,} {purpose} rows read are over max_length {settings.max_length}, so none is "
                "left; raise it."
            )
        dropped = len(tokenized) - len(kept)
        tokenized = tokenized.select(kept).flatten_indices()
    else:
        dropped = 0
    counts = _count(tokenized, dropped)
    if not counts.supervised:
        raise UserError(
            f"The {purpose} set has no supervised token in {counts.rows} rows; check that the rows have assistant turns "
            f"within max_length {settings.max_length}, or use --loss_on all."
        )
    tokenized.info.description = json.dumps(dataclasses.asdict(counts))
    filler = {
        "input_ids": [tokenized[0]["input_ids"][:1]],
        "labels": [[IGNORED]],
        "overlong": [False],
        "supervised": [0],
    }
    with_filler = datasets.concatenate_datasets(
        [tokenized, datasets.Dataset.from_dict(filler, features=TOKEN_FEATURES)]
    )
    with_filler.info.description = json.dumps(dataclasses.asdict(counts))
    return with_filler


def _count(tokenized: datasets.Dataset, dropped: int) -> Counts:
    lengths = row_lengths(tokenized)
    return Counts(
        rows=len(tokenized),
        tokens=int(lengths.sum()),
        supervised=pc.sum(_column(tokenized, "supervised")).as_py(),
        truncated=pc.sum(_column(tokenized, "overlong")).as_py(),
        dropped=dropped,
        longest=int(lengths.max()),
    )


def _column(rows: datasets.Dataset, name: str) -> Any:
    """A column as Arrow has it: going through a million rows one by one takes minutes."""
    assert rows._indices is None, "the rows are a selection, and the table holds more"
    return rows.data.column(name)


def row_lengths(tokenized: datasets.Dataset) -> np.ndarray:
    """Tokens of every row, int64 (rows,), read from the table's offsets and not from its tokens."""
    ids = tokenized.with_format("arrow", columns=["input_ids"])
    return np.concatenate([pc.list_value_length(part["input_ids"]).to_numpy() for part in ids.iter(100_000)]).astype(
        np.int64
    )


def facts(settings: Settings, runtime: Runtime, plan: BatchPlan, rows: TokenizedRows) -> dict[str, Any]:
    """What identifies the rows of a run and how they fill its steps; see manifest.compare.

    Rows that are streamed are known by their sources and by the checksum of the first of them.
    """
    found: dict[str, Any] = {
        "packing": "off" if rows.packing is None else f"packs of up to {rows.packing.capacity} tokens",
        "rows": "streamed" if rows.streamed else rows.counts.rows,
        "steps": plan.steps(rows.units, settings.num_train_epochs, settings.max_steps),
        "data": fingerprint(rows, runtime),
    }
    if rows.streamed:
        found |= {"sources": _source_names(settings), "shuffle_buffer": settings.shuffle_buffer}
    return found


def _source_names(settings: Settings) -> str:
    hub = " ".join(word for word in (settings.dataset_split, settings.dataset_config) if word)
    return ", ".join(str(Path(s).expanduser().resolve()) if is_file(s) else f"{s} {hub}" for s in settings.dataset)


def fingerprint(rows: TokenizedRows, runtime: Runtime) -> str:
    """A checksum of every token id and label of the set, in order; the same on any machine and on every rank.

    Raises:
        UserError: nodes with data of their own hold different rows.
    """
    found = runtime.gather(runtime.on_main(lambda: _checksum(rows), per_node=True))
    sums = {rank // runtime.ranks.local_world_size: digest for rank, digest in enumerate(found) if digest}
    for node, digest in sums.items():
        if digest != sums[0]:
            raise UserError(
                f"Node {node} holds other training rows than node 0 (checksum {digest[:8]} instead of {sums[0][:8]}); "
                "copy the same files to every node."
            )
    return sums[0]


def _checksum(rows: TokenizedRows) -> str:
    digests = []
    for name in ("input_ids", "labels"):
        values, lengths = xxhash.xxh3_128(), xxhash.xxh3_128()
        for chunk in rows.dataset.data.column(name).chunks:
            values.update(chunk.flatten().to_numpy(zero_copy_only=False).astype("<i4", copy=False).data)
            lengths.update(np.diff(chunk.offsets.to_numpy()).astype("<i8").data)
        digests += [values.hexdigest(), lengths.hexdigest()]
    return str(xxhash.xxh3_128("".join(digests).encode()).hexdigest())


def _tokenized_rows(path: Path) -> TokenizedRows:
    tokenized = datasets.load_from_disk(path)
    counts = Counts(**json.loads(tokenized.info.description))
    return TokenizedRows(tokenized.with_format("numpy", columns=["input_ids", "labels"]), counts)


def fill_steps(
    request: Request, rows: TokenizedRows, choice: PackingDecision
) -> tuple[BatchPlan, TokenizedRows, PackingDecision]:
    """The plan of a run, the rows with the packs it counts, and whether they are packed after all (packing.plan_step)."""
    plan, packing, choice = plan_step(request, row_lengths(rows.dataset)[: rows.counts.rows], choice)
    return plan, dataclasses.replace(rows, packing=packing), choice


@dataclass
class PadRight:
    """Collate rows into `input_ids`, `attention_mask` and `labels`, each (batch, longest row), int64."""

    pad_token_id: int

    def __call__(self, rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        shape = (len(rows), max(len(row["input_ids"]) for row in rows))
        ids = np.full(shape, self.pad_token_id, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.int64)
        for index, row in enumerate(rows):
            length = len(row["input_ids"])
            ids[index, :length] = row["input_ids"]
            labels[index, :length] = row["labels"]
            mask[index, :length] = 1
        named = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        return {name: torch.from_numpy(values) for name, values in named.items()}


@dataclass
class PackedRows:
    """A map-style dataset of packs: each item has the ids and labels of its rows behind each other, and their lengths."""

    rows: ArrowRows
    packing: Packing

    def __len__(self) -> int:
        return len(self.packing) + 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """A pack as of `join_rows`; the last index is the filler."""
        filler = index == len(self.packing)
        members = [len(self.rows) - 1] if filler else self.packing.members(index).tolist()
        rows = [self.rows[member] for member in members]
        return join_rows([row["input_ids"] for row in rows], [row["labels"] for row in rows])


def join_rows(input_ids: list[np.ndarray], labels: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Rows as one pack: `input_ids` and `labels` (tokens,), `lengths` (rows,).

    Nothing predicts the first token of a row, so its label is ignored, as position 0 is where rows stand alone.
    """
    lengths = np.array([len(ids) for ids in input_ids], dtype=np.int64)
    joined = np.concatenate(labels)
    joined[np.cumsum(lengths) - lengths] = IGNORED
    return {"input_ids": np.concatenate(input_ids), "labels": joined, "lengths": lengths}


@dataclass
class Flatten:
    """Collate packs into one sequence, with what tells attention where rows begin.

    `input_ids`, `labels` and `position_ids`, each (1, tokens), int64; positions begin at 0 in every row, which is how
    Transformers finds the rows. `keys` names what else the backend reads: Unsloth `packed_seq_lengths` (rows,), int32;
    flash attention in Transformers `cu_seq_lens_q/k` (rows + 1,), int32, and `max_length_q/k`, which it would
    otherwise work out in every layer, waiting for the device.
    """

    keys: Literal["unsloth", "flash", "positions"]

    def __call__(self, packs: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        lengths = np.concatenate([pack["lengths"] for pack in packs])
        ends = np.cumsum(lengths)
        positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
        batch: dict[str, Any] = {
            name: torch.as_tensor(np.concatenate([pack[name] for pack in packs]), dtype=torch.int64).unsqueeze(0)
            for name in ("input_ids", "labels")
        }
        batch["position_ids"] = torch.as_tensor(positions, dtype=torch.int64).unsqueeze(0)
        if self.keys == "unsloth":
            batch["packed_seq_lengths"] = torch.as_tensor(lengths, dtype=torch.int32)
        elif self.keys == "flash":
            borders = torch.as_tensor(np.append(0, ends), dtype=torch.int32)
            batch |= {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders}
            batch |= {"max_length_q": int(lengths.max()), "max_length_k": int(lengths.max())}
        return batch


@dataclass
class Collate:
    """Packs are flattened, rows are padded: training may see the one while evaluation sees the other.

    With `head_chooses` a batch also says where its supervised tokens are (see head.py).
    """

    pad: PadRight
    flatten: Flatten
    head_chooses: bool = False

    def find_supervised(self, wanted: bool) -> None:
        """Add the positions of supervised tokens to every batch, or not, from now on."""
        self.head_chooses = wanted

    def __call__(self, examples: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        batch = self.flatten(examples) if "lengths" in examples[0] else self.pad(examples)
        return batch | supervised_positions(batch["labels"]) if self.head_chooses else batch
