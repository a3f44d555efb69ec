"""Read and tokenize windows of streamed rows ahead of training, in worker processes of the main process."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.arrow_rows import IMAGE_KEYS, ROW_KEYS
from unsloth_ddp.data.chat.template import variables_of
from unsloth_ddp.data.chat.tokenize import EncodedRow, encode_row
from unsloth_ddp.data.dataset import ROWS_AT_A_TIME, make_encoder
from unsloth_ddp.data.images.files import ImageFiles
from unsloth_ddp.data.images.processing import ImageProcessing
from unsloth_ddp.data.order.mismatched import join_mismatched
from unsloth_ddp.data.order.packing import Packing
from unsloth_ddp.data.order.reading_processes import StayWithParent
from unsloth_ddp.data.order.stream_order import FIRST, StreamPosition, stream_rows
from unsloth_ddp.data.sources.preference import converter
from unsloth_ddp.data.sources.revisions import dataset_revisions
from unsloth_ddp.data.sources.rows import SourceRow, is_file, streamed_sources, training_rows
from unsloth_ddp.data.template_values import TemplateColumns
from unsloth_ddp.data.vocabulary import Vocabulary
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.sources import read_source
from unsloth_ddp.utils.redaction import printable

T = TypeVar("T")
# A row or a pack as the collator takes it; a step counts these.
Unit = dict[str, Any]

# Rows that are packed together; with this many, the half-empty last pack of a window hardly matters.
PACKED_WINDOW = 1000
WINDOWS_AHEAD = 2


@dataclass(frozen=True)
class TokenizedWindow:
    """Consecutive rows of a stream, tokenized, from `start` on, without dropped rows.

    `problem` is the error of the row after them, or None. `ended` is the number of rows of the first epoch, if that
    epoch ends within this window.
    """

    start: StreamPosition
    rows: list[Unit]
    problem: str | None = None
    ended: int | None = None


@dataclass(eq=False)
class StreamedWindows(IterableDataset[TokenizedWindow]):
    """Endless windows of `size` rows; each of several workers reads all rows and tokenizes its share of the windows.

    `encode` tokenizes a row; with `drop`, rows that are overlong are left out. `join` completes the rows of a window.
    With `images`, rows keep what is needed to process their images.
    """

    read: Callable[[], Iterable[SourceRow]]
    encode: Callable[[SourceRow], EncodedRow]
    _: KW_ONLY
    size: int
    buffer: int
    seed: int
    drop: bool
    images: bool = False
    join: Callable[[list[Unit]], list[Unit]] = list
    start: StreamPosition = FIRST

    def __iter__(self) -> Iterator[TokenizedWindow]:
        worker = get_worker_info()
        turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        rows = stream_rows(self.read, self.buffer, self.seed, self.start)
        previous = (self.start.epoch, self.start.row)
        for number in itertools.count():
            drawn, problem = _take(rows, self.size)
            start = StreamPosition(*drawn[0][:3]) if drawn else self.start
            numbers = [previous, *((row.epoch, row.number) for row in drawn)]
            previous = numbers[-1]
            if number % workers == turn:
                window = TokenizedWindow(start, [], problem, _end_of_first_epoch(numbers))
                yield self._tokenized(window, [row.row for row in drawn])
            if problem is not None:
                return

    def _tokenized(self, window: TokenizedWindow, rows: list[SourceRow]) -> TokenizedWindow:
        for row in rows:
            try:
                encoded = self.encode(row)
            except UserError as error:
                return dataclasses.replace(window, problem=f"{row.location}: {error}")
            if (self.drop and encoded.overlong) or encoded.cuts_image:
                continue
            columns = {name: values for name in ROW_KEYS if (values := getattr(encoded, name, None))}
            unit: Unit = {name: np.array(values, dtype=np.int32) for name, values in columns.items()}
            if self.images:
                unit |= {name: getattr(encoded, name) for name in IMAGE_KEYS}
            window.rows.append(unit)
        return dataclasses.replace(window, rows=self.join(window.rows))


def _take(rows: Iterator[T], count: int) -> tuple[list[T], str | None]:
    """Return the next rows, and the error of the row after them or None."""
    items: list[T] = []
    try:
        for row in itertools.islice(rows, count):
            items.append(row)
    except UserError as error:
        return items, str(error)
    return items, None


def _end_of_first_epoch(numbers: Sequence[tuple[int, int]]) -> int | None:
    for (epoch, number), (next_epoch, _) in itertools.pairwise(numbers):
        if epoch == 0 and next_epoch == 1:
            return number + 1
    return None


def streamed_windows(
    settings: Settings,
    packing: Packing | None,
    tokenizer: Any,
    seed: int,
    template_date: str | None = None,
    processing: ImageProcessing | None = None,
    vocabulary: Vocabulary | None = None,
) -> StreamedWindows:
    """Return the windows of a run; call it before the tokenizer changes after the first rows were tokenized.

    Args:
        processing: of images, if the first rows have some.
        vocabulary: the tokens that rows may hold.
    """
    encoder = make_encoder(settings, tokenizer, template_date, processing, vocabulary)
    names = [read_source(text).name for text in settings.dataset]
    revisions = dataset_revisions(settings)
    files = ImageFiles.of(settings, [source for source in streamed_sources(names) if is_file(source)])
    sizes = _sizes(streamed_sources(names))

    def read() -> Iterator[SourceRow]:
        for sentence in _changes(sizes, now := _sizes(streamed_sources(names))):
            print(sentence, flush=True)
        sizes.clear()
        sizes.update(now)
        yield from training_rows(settings, revisions, streaming=True)

    convert = converter(settings.task, settings.columns)
    template = TemplateColumns(settings.chat_template_kwargs, variables_of(tokenizer.chat_template))

    def encode(row: SourceRow) -> EncodedRow:
        example = convert(row.columns)
        if example.images and processing is None:
            raise UserError(
                "the row has images and none of the first rows has; move a row with an image to the beginning."
            )
        example.images = [files.checked(image) for image in example.images]
        template.take(example, row.columns)
        return encode_row(encoder, example, settings.max_length)

    return StreamedWindows(
        read,
        encode,
        size=ROWS_AT_A_TIME if packing is None else PACKED_WINDOW,
        buffer=settings.shuffle_buffer,
        seed=seed,
        drop=settings.overlong == "drop",
        join=functools.partial(join_mismatched, max_length=settings.max_length) if settings.task == "kto" else list,
        images=processing is not None,
    )


def _sizes(sources: list[str]) -> dict[str, int]:
    paths = {source: Path(source).expanduser() for source in sources if is_file(source)}
    return {source: path.stat().st_size for source, path in paths.items() if path.exists()}


def _changes(sizes: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Return a sentence for each file with another size, in the one of several workers that tells it."""
    worker = get_worker_info()
    if worker is not None and worker.id:
        return []
    differ = sorted(source for source in sizes.keys() | now.keys() if sizes.get(source) != now.get(source))
    return [
        f"{printable(source)} has {now.get(source, 0):,} bytes and had {sizes.get(source, 0):,} before, so this epoch "
        "holds other rows than the one before."
        for source in differ
    ]


def read_ahead(windows: StreamedWindows, start: StreamPosition, workers: int) -> Iterator[TokenizedWindow]:
    """Yield the windows from `start` on; `workers` processes make them WINDOWS_AHEAD windows ahead."""
    windows.start = start
    stay = StayWithParent()
    loader = DataLoader(
        windows,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=WINDOWS_AHEAD,
        collate_fn=lambda window: window,
        worker_init_fn=stay,
        # A spawned process would import and load everything again.
        multiprocessing_context="fork",
        # Otherwise the workers' seeds would be drawn from the generator that dropout uses.
        generator=torch.Generator(),
    )
    try:
        yield from loader
    finally:
        stay.close()
