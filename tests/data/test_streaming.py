"""Streamed rows: their order, and the windows and steps they fill; test_streamed_runs.py has the runs."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from tests.conftest import DEMO_MODEL
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.chat.tokenize import EncodedRow
from unsloth_ddp.data.order import stream_windows
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.stream_order import FIRST, StreamPosition, shuffled, stream_rows
from unsloth_ddp.data.order.stream_steps import StepFiller
from unsloth_ddp.data.order.stream_windows import StreamedWindows, streamed_windows
from unsloth_ddp.data.sources.rows import SourceRow, left_out, of_other_splits, read_rows, streamed_sources
from unsloth_ddp.utils.errors import UserError

# ---- the order of the rows ----


def numbers(count: int) -> Callable[..., Iterator[SourceRow]]:
    """Reads that many rows which are numbers."""
    return lambda shift=0: (SourceRow(f"rows:{n}", {"n": n + shift}) for n in range(count))


def test_a_buffer_of_none_keeps_the_order_of_the_source() -> None:
    assert list(shuffled(iter(range(20)), 0, seed=1, epoch=0)) == list(range(20))
    assert [placed.row for placed in itertools.islice(stream_rows(numbers(3), 0, seed=1), 4)] == [
        *numbers(3)(),
        *numbers(1)(),
    ]


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_an_epoch_holds_each_row_once_in_an_order_of_its_own(size: int) -> None:
    first, again, second, other = (
        list(shuffled(iter(range(100)), size, seed, epoch)) for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))
    )
    assert first == again
    assert sorted(first) == sorted(second) == sorted(other) == list(range(100))
    # A row cannot come before it was read.
    assert all(row <= place + size for place, row in enumerate(first))
    if size > 1:
        assert len({tuple(order) for order in (first, second, other)}) == 3
        assert first != list(range(100))


def test_the_order_is_the_one_of_every_release() -> None:
    """Checkpoints of an older release would go on with other rows."""
    assert list(shuffled(iter(range(12)), 4, seed=42, epoch=0)) == [0, 3, 2, 1, 7, 5, 4, 6, 11, 10, 8, 9]


def test_a_stream_goes_on_anywhere() -> None:
    whole = list(itertools.islice(stream_rows(numbers(10), 4, seed=3), 35))
    assert [placed.epoch for placed in whole] == [0] * 10 + [1] * 10 + [2] * 10 + [3] * 5
    assert [placed.number for placed in whole[:12]] == [*range(10), 0, 1]
    for place in (1, 9, 10, 27):
        start = StreamPosition(*whole[place][:3])
        assert list(itertools.islice(stream_rows(numbers(10), 4, seed=3, start=start), 35 - place)) == whole[place:]


@pytest.mark.parametrize(
    "changed", [lambda: numbers(10)(shift=1), lambda: numbers(5)(), lambda: reversed([*numbers(10)()])]
)
def test_rows_that_changed_before_the_checkpoint_are_refused(changed) -> None:
    start = StreamPosition(*list(itertools.islice(stream_rows(numbers(10), 4, seed=3), 17))[16][:3])
    assert (start.epoch, start.row) == (1, 6)
    with pytest.raises(UserError, match="the stream no longer begins with the 6 rows trained before"):
        next(stream_rows(changed, 4, seed=3, start=start))
    # --resume_anyway
    found = next(stream_rows(changed, 4, seed=3, start=dataclasses.replace(start, seen=None)))
    assert (found.epoch, found.number) in ((1, 6), (2, 0))
    # What comes later may be another.
    start = StreamPosition(*list(itertools.islice(stream_rows(numbers(10), 0, seed=3), 5))[4][:3])
    longer = next(stream_rows(lambda: itertools.chain(numbers(10)(), numbers(3)(shift=50)), 0, 3, start))
    assert longer.row.columns == {"n": 4}


def test_sources_that_hold_nothing_any_more_end_the_stream() -> None:
    passes = iter([numbers(2)(), []])
    with pytest.raises(UserError, match="the stream has ended"):
        list(stream_rows(lambda: next(passes), 0, seed=1))


# ---- windows and steps ----

LENGTHS = np.random.default_rng(0).integers(2, 30, size=57)
MAX_LENGTH = 24


def read_lengths(bad: int | None = None) -> Iterator[SourceRow]:
    """Rows that are only as long as LENGTHS says; row `bad` cannot be read."""
    for number, length in enumerate(LENGTHS.tolist()):
        if number == bad:
            raise UserError(f"rows:{number} is bad.")
        yield SourceRow(f"rows:{number}", (number, length))


def encode_length(row: SourceRow) -> EncodedRow:
    number, length = row.columns
    ids = [number] * min(length, MAX_LENGTH)
    return EncodedRow(ids, ids, overlong=length > MAX_LENGTH)


def windows(start: StreamPosition = FIRST, **changed: Any) -> StreamedWindows:
    asked: dict[str, Any] = {"size": 10, "buffer": 8, "seed": 5, "drop": False, "start": start}
    return StreamedWindows(changed.pop("read", read_lengths), changed.pop("encode", encode_length), **(asked | changed))


def rows_of(share: list[list[dict[str, np.ndarray]]]) -> list[list[list[int]]]:
    """The rows of each unit of each micro-batch, which know their number by their tokens."""
    return [[list(dict.fromkeys(unit["input_ids"].tolist())) for unit in batch] for batch in share]


def take_steps(steps: StepFiller, found: Any, count: int, used: int = 0) -> list[tuple[list[Any], StreamPosition]]:
    filled = itertools.islice(steps.fill(found, used), count)
    return [([rows_of(share) for share in shares], position) for shares, position in filled]


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("capacity", [None, MAX_LENGTH])
def test_steps_go_on_from_every_position_with_the_same_rows(capacity: int | None, drop: bool) -> None:
    steps = StepFiller(BatchPlan(2, 2, 1), capacity, keep_order=False, seed=5)
    whole = take_steps(steps, windows(drop=drop), 40)
    assert whole[-1][1].epoch > 1
    for place, (_, position) in enumerate(whole[:20]):
        found = windows(position, drop=drop)
        assert take_steps(steps, found, 39 - place, position.used) == whole[place + 1 :]


@pytest.mark.parametrize("capacity", [None, MAX_LENGTH])
def test_a_step_holds_the_same_rows_in_every_layout(capacity: int | None) -> None:
    def rows(plan: BatchPlan) -> list[Any]:
        taken = take_steps(StepFiller(plan, capacity, False, 5), windows(), 12)
        return [sorted(unit for share in shares for batch in share for unit in batch) for shares, _ in taken]

    layouts = [BatchPlan(8, 1, 1), BatchPlan(1, 8, 1), BatchPlan(2, 2, 2), BatchPlan(2, 1, 4)]
    one, *others = [rows(plan) for plan in layouts]
    assert all(other == one for other in others)
    assert sum(len(unit) for step in one for unit in step) > (8 * 12 if capacity else 8 * 12 - 1)


def test_rows_that_are_too_long_are_left_out_before_steps_are_filled() -> None:
    steps = StepFiller(BatchPlan(4, 1, 1), None, keep_order=True, seed=5)
    kept = [number for number, length in enumerate(LENGTHS) if length <= MAX_LENGTH]
    assert len(kept) < len(LENGTHS)
    taken = take_steps(steps, windows(buffer=0, drop=True), len(kept) // 4)
    assert sorted(row for shares, _ in taken for batch in shares[0] for (row,) in batch) == kept[: len(kept) // 4 * 4]


def test_packs_hold_each_row_once_and_are_in_the_order_of_the_source_where_it_is_kept() -> None:
    steps = StepFiller(BatchPlan(1, 1, 1), MAX_LENGTH, keep_order=True, seed=5)
    packs = [shares[0][0][0] for shares, _ in take_steps(steps, windows(buffer=0, size=len(LENGTHS)), 20)]
    assert [pack[0] for pack in packs] == sorted(pack[0] for pack in packs)
    rows = [row for pack in packs for row in pack]
    assert len(set(rows)) == len(rows) and len(rows) > 30


def test_a_row_longer_than_the_packs_were_planned_for_gets_a_longer_pack() -> None:
    steps = StepFiller(BatchPlan(1, 1, 1), 5, keep_order=True, seed=5)
    units = steps.units(next(iter(windows())))
    assert sum(len(unit["lengths"]) for unit in units) == 10


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_share_the_windows_out(workers: int) -> None:
    expected = itertools.islice(windows(), 7)
    loader = DataLoader(windows(), batch_size=None, num_workers=workers, collate_fn=lambda window: window)
    found = itertools.islice(loader, 7)
    for one, other in zip(found, expected, strict=True):
        assert [row["input_ids"].tolist() for row in one.rows] == [row["input_ids"].tolist() for row in other.rows]
        assert (one.start, one.ended) == (other.start, other.ended)


def test_the_end_of_the_first_epoch_is_told_once() -> None:
    ended = [window.ended for window in itertools.islice(windows(), 20)]
    assert [number for number in ended if number is not None] == [len(LENGTHS)]
    # Also where the window ends with the epoch.
    ended = [window.ended for window in itertools.islice(windows(size=len(LENGTHS)), 3)]
    assert ended == [None, len(LENGTHS), None]


def encode_but_23(row: SourceRow) -> dict[str, Any]:
    if row.columns[0] == 23:
        raise UserError("the chat template cannot render the row.")
    return encode_length(row)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"read": lambda: read_lengths(bad=23)}, "rows:23 is bad."),
        ({"encode": encode_but_23}, "rows:23: the chat template cannot render the row."),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_row_is_told_when_it_is_needed_and_not_before(changed: dict, sentence: str, workers: int) -> None:
    loader = DataLoader(
        windows(buffer=0, **changed), batch_size=None, num_workers=workers, collate_fn=lambda window: window
    )
    filled = StepFiller(BatchPlan(4, 1, 1), None, keep_order=True, seed=5).fill(iter(loader))
    trained = [row for _ in range(5) for batch in rows_of(next(filled)[0][0]) for (row,) in batch]
    assert sorted(trained) == list(range(20))
    with pytest.raises(UserError, match=sentence):
        next(filled)


def test_no_pack_is_trained_of_a_window_that_is_not_whole() -> None:
    steps = StepFiller(BatchPlan(1, 1, 1), MAX_LENGTH, keep_order=False, seed=5)

    def trained(found: StreamedWindows) -> list[Any]:
        taken = []
        with pytest.raises(UserError, match="rows:23"):
            for shares, _ in steps.fill(found):
                taken += rows_of(shares[0])[0]
        return taken

    packs = trained(windows(buffer=0, encode=encode_but_23))
    assert sorted(row for pack in packs for row in pack) == list(range(20))
    fixed = [rows_of(shares[0])[0][0] for shares, _ in itertools.islice(steps.fill(windows(buffer=0)), len(packs))]
    assert fixed == packs


def test_a_folder_stands_for_its_files_by_name(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/2.parquet", "a/1.csv", "notes.txt", ".hidden.jsonl", ".cache/x.jsonl", "a/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = streamed_sources([str(tmp_path), "owner/name", f"{tmp_path}/b.jsonl"])
    names = [f"{tmp_path}/{name}" for name in ("a/1.csv", "a/2.parquet", "b.jsonl")]
    assert found == [*names, "owner/name", f"{tmp_path}/b.jsonl"]
    assert left_out([str(tmp_path), "owner/name", f"{tmp_path}/b.jsonl"]) == [f"{tmp_path}/a/config.json"]


def test_files_of_a_folder_that_may_hold_rows_and_are_not_read_are_known(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl.gz", "b.json.gz", "c.zst", "d.arrow", "README.md", ".hidden.json"):
        (tmp_path / name).touch()
    assert left_out([str(tmp_path)]) == [f"{tmp_path}/{name}" for name in ("b.json.gz", "c.zst", "d.arrow")]


def test_files_of_a_folder_that_are_named_as_another_split_are_known(tmp_path: Path) -> None:
    folder = tmp_path / "test"
    others = ["data/test-00000-of-00001.parquet", "eval.csv", "validation/0.jsonl", "x_dev.jsonl"]
    for name in (*others, "data/train-00000-of-00001.parquet", "latest.jsonl", "devices.csv", "contest/0.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert of_other_splits([str(folder), "owner/test"]) == [f"{folder}/{name}" for name in others]
    assert of_other_splits([f"{folder}/eval.csv"]) == []


def test_the_files_of_a_folder_are_in_order_wherever_they_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [(str(tmp_path), ["a"], ["c.csv", "b.csv"]), (f"{tmp_path}/a", [], ["2.csv", "1.csv"])]
    monkeypatch.setattr(os, "walk", lambda *given, **options: iter(listed))
    assert streamed_sources([str(tmp_path)]) == [
        f"{tmp_path}/{name}" for name in ("a/1.csv", "a/2.csv", "b.csv", "c.csv")
    ]


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Any, onerror: Any, **options: Any) -> Any:
        onerror(PermissionError(errno.EACCES, "Permission denied"))

    monkeypatch.setattr(os, "walk", refuse)
    with pytest.raises(UserError, match="cannot be listed: Permission denied"):
        streamed_sources([str(tmp_path)])


def test_sources_that_cannot_be_streamed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a folder without a \.jsonl"):
        streamed_sources([str(tmp_path)])
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match=r"is a folder without a \.jsonl, \.parquet, \.csv file"):
        streamed_sources([str(tmp_path)])
    # A file that is named is one of rows.
    assert streamed_sources([f"{tmp_path}/list.json"]) == [f"{tmp_path}/list.json"]


@pytest.mark.parametrize("worker", [None, 0, 1])
def test_a_file_that_changes_between_two_epochs_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], worker: int | None
) -> None:
    info = None if worker is None else SimpleNamespace(id=worker)
    monkeypatch.setattr(stream_windows, "get_worker_info", lambda: info)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n')
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    read = streamed_windows(Settings(dataset=[str(tmp_path)], streaming=True), None, tokenizer, seed=1).read
    assert len(list(read())) == len(list(read())) == 1
    assert capsys.readouterr().out == ""
    with path.open("a") as file:
        file.write('{"text": "b"}\n')
    (tmp_path / "more.jsonl").write_text('{"text": "c"}\n')
    assert len(list(read())) == len(list(read())) == 3
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" before, so")[0] for line in said] == (
        [] if worker else [f"{tmp_path}/more.jsonl has 14 bytes and had 0", f"{path} has 28 bytes and had 14"]
    )


def test_a_hub_set_is_streamed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load_dataset(*args: Any, **more: Any) -> list[dict[str, str]]:
        asked.update(more, args=args)
        return [{"text": "a"}, {"text": "b"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    rows = list(read_rows("owner/name", "train", "en", streaming=True))
    assert rows == [
        SourceRow("owner/name train row 1", {"text": "a"}),
        SourceRow("owner/name train row 2", {"text": "b"}),
    ]
    assert asked == {"args": ("owner/name", "en"), "split": "train", "revision": None, "streaming": True}


@pytest.mark.parametrize("streaming", [True, False])
def test_a_hub_set_that_breaks_off_says_what_helps(streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        raise ConnectionError("connection\nlost")

    monkeypatch.setattr("datasets.load_dataset", lambda *given, **more: broken())
    rows = read_rows("owner/name", "train", streaming=streaming)
    assert next(rows).columns == {"text": "a"}
    with pytest.raises(UserError, match=r"split train, cannot be read after row 1 \(connection lost\); ") as refused:
        next(rows)
    # What was not streamed is on the disk, and begins again.
    assert ("resumes from the newest checkpoint" in str(refused.value)) is streaming
