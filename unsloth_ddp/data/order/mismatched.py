"""Join each labelled row, a prompt x and its answer y, with a mismatched row: x and the answer y' of another row.

KTO estimates the divergence of the model from its reference on mismatched rows (https://arxiv.org/abs/2402.01306,
section 4.2). TRL takes y' from the same micro-batch, so its estimate depends on the layout. Here y' is fixed for the
run: the rows with an answer form a cycle in random order, and each takes the answer of the next. So every answer is y'
once an epoch.
"""

import datasets
import numpy as np

from unsloth_ddp.data.arrow_rows import ListColumn
from unsloth_ddp.data.chat.labels import IGNORED

# What an example holds of a row.
Row = dict[str, np.ndarray]
SEED = 0


def partners(answered: np.ndarray, *, shuffled: bool) -> np.ndarray:
    """Return the row whose answer each row takes, int64 (rows,); a row without an answer takes its own.

    Args:
        answered: whether each row has an answer, bool (rows,).
        shuffled: whether the cycle has a random order, or that of the rows.
    """
    partner_rows, cycle = np.arange(len(answered)), np.flatnonzero(answered)
    if shuffled:
        np.random.default_rng(SEED).shuffle(cycle)
    partner_rows[cycle] = np.roll(cycle, -1)
    return partner_rows


def answer_start(labels: np.ndarray) -> int:
    """Return the position of the first token of the answer, at least 1; the length of the row if it has none."""
    answer = np.flatnonzero(labels[1:] != IGNORED)
    return int(answer[0]) + 1 if len(answer) else len(labels)


def with_mismatched(row: Row, other: Row, max_length: int) -> Row:
    """Return a row followed by its prompt with the answer of `other`, which is cut to `max_length` tokens.

    Returns `input_ids` and `labels`, (tokens of both,), and `parts`, their numbers of tokens, (2,).
    """
    start, begin = answer_start(row["labels"]), answer_start(other["labels"])
    ids = np.concatenate([row["input_ids"][:start], other["input_ids"][begin:]])[:max_length]
    labels = np.concatenate([np.full(start, IGNORED, dtype=np.int32), other["labels"][begin:]])[:max_length]
    row_labels = row["labels"].copy()
    row_labels[0] = IGNORED
    return {
        "input_ids": np.concatenate([row["input_ids"], ids]),
        "labels": np.concatenate([row_labels, labels]),
        "parts": np.array([len(row_labels), len(labels)], dtype=np.int32),
    }


def join_mismatched(rows: list[Row], max_length: int) -> list[Row]:
    """Return the rows of a window of a stream, each with its mismatched row."""
    answered = np.array([answer_start(row["labels"]) < len(row["labels"]) for row in rows], dtype=bool)
    return [
        row | with_mismatched(row, rows[other], max_length)
        for row, other in zip(rows, partners(answered, shuffled=False).tolist(), strict=True)
    ]


def join_mismatched_rows(
    tokenized: datasets.Dataset, features: datasets.Features, max_length: int, rows_at_a_time: int
) -> datasets.Dataset:
    """Return a tokenized set with its mismatched rows, on disk as the set is.

    Args:
        features: of the set that is returned.
    """
    ids, labels = (ListColumn(tokenized.data.column(name)) for name in ("input_ids", "labels"))
    others = partners(tokenized.data.column("supervised").to_numpy() > 0, shuffled=True)

    def row(index: int) -> Row:
        return {"input_ids": ids[index], "labels": labels[index]}

    def join(_: list[int], indices: list[int]) -> dict[str, list[np.ndarray]]:
        joined = [with_mismatched(row(index), row(int(others[index])), max_length) for index in indices]
        return {name: [example[name] for example in joined] for name in joined[0]}

    # The fingerprint is given, because the one of the function would be computed from all tokens.
    return tokenized.map(
        join,
        with_indices=True,
        input_columns=["supervised"],
        batched=True,
        batch_size=rows_at_a_time,
        features=features,
        load_from_cache_file=False,
        new_fingerprint=f"{tokenized._fingerprint}-mismatched",
    )
