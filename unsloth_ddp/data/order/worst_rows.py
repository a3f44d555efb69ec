"""Make the micro-batch of a run that needs the most memory: in tokens, supervised tokens, rows and pixels."""

import numpy as np

from unsloth_ddp.data.arrow_rows import join_rows
from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.data.dataset import TokenizedRows


def worst_micro_batch(rows: TokenizedRows, size: int, max_length: int) -> list[dict[str, np.ndarray]]:
    """Return `size` rows or packs with the most tokens and pixels, and the most supervised tokens of any `size` rows.

    Of streamed rows, which are not known yet, they are as many of `max_length`, supervised as the first rows are.
    """
    examples = largest(rows, size, max_length)
    if rows.streamed:
        return examples
    supervised = rows.supervised()[:-1]
    if rows.packing is not None:
        supervised = rows.packing.sums(supervised)
    return supervise(examples, int(np.sort(supervised)[-size:].sum()))


def supervise(examples: list[dict[str, np.ndarray]], tokens: int) -> list[dict[str, np.ndarray]]:
    """Return the examples with at least `tokens` supervised tokens, if they have so many, added from each one's end."""
    missing = tokens - sum(int((example["labels"] != IGNORED).sum()) for example in examples)
    changed = []
    for example in examples:
        unsupervised = np.flatnonzero(example["labels"] == IGNORED)
        added = unsupervised[max(0, len(unsupervised) - max(0, missing)) :]
        missing -= len(added)
        labels = np.array(example["labels"])
        labels[added] = example["input_ids"][added]
        changed.append(example | {"labels": labels})
    return changed


def largest(rows: TokenizedRows, size: int, max_length: int) -> list[dict[str, np.ndarray]]:
    """Return the `size` longest rows (packs); of streamed rows, which are not known yet, as many of `max_length`.

    Of rows with images, these are the longest one, to which all others are padded, and those with the most pixels; of
    packs, those with the most tokens and pixels.
    """
    lengths, examples = rows.lengths()[:-1], rows.examples
    longest = np.argsort(-lengths, kind="stable")
    work = rows.work_of_images()
    if work is not None and rows.packing is not None:
        longest = np.argsort(-lengths - work[:-1], kind="stable")
    elif work is not None:
        first = longest[0] if size > 1 else np.argmax(lengths + work[:-1])
        by_work = np.argsort(-work[:-1], kind="stable")
        longest = np.array([first, *by_work[by_work != first]])
    longest = longest[:size]
    if not rows.streamed:
        return [examples[int(index)] for index in longest]
    first = rows.rows[0] if rows.packing and work is None else examples[int(longest[0])]
    if work is not None:
        more = max(0, max_length - len(first["input_ids"]))
        longer = first | {name: np.pad(first[name], (0, more), "edge") for name in ("input_ids", "labels")}
        if rows.packing is not None:
            longer["lengths"] = np.append(first["lengths"][:-1], first["lengths"][-1] + more)
        return [longer] * size
    parts = {"parts": np.full_like(first["parts"], max_length)} if "parts" in first else {}
    tokens = max_length * (len(first["parts"]) if parts else 1)
    row = {**first, **{name: np.resize(first[name], tokens) for name in ("input_ids", "labels")}, **parts}
    return [row if rows.packing is None else join_rows([row])] * size
