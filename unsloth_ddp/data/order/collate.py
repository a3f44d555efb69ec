"""Collate rows into padded batches, and packs into one flat sequence."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from unsloth_ddp.data.arrow_rows import IMAGE_KEYS, OF_TOKENS, join_rows, split_rows
from unsloth_ddp.data.chat.labels import IGNORED, supervised_positions
from unsloth_ddp.data.images.processing import ImageProcessing
from unsloth_ddp.data.order.fixed_shape import FixedShape

# What a batch does not hold as it is in the examples.
COLLATED = (*OF_TOKENS, *IMAGE_KEYS, "desirable")
# Begins the names of a batch of mismatched rows (see mismatched.py).
MISMATCHED = "mismatched_"


@dataclass
class PadRight:
    """Collate rows into `input_ids`, `attention_mask` and `labels`, each (batch, longest row), int64.

    A pair is two rows, the chosen one first. With `processing` the values of images are added.
    """

    pad_token_id: int
    processing: ImageProcessing | None = None

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        rows = [row for example in examples for row in split_rows(example)]
        if self.processing and self.processing.always and not any(len(row["images"]) for row in rows):
            rows.append(self.processing.small_row)
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
        batch = {name: torch.from_numpy(values) for name, values in named.items()}
        return batch | self.processing.collate(rows, shape[1]) if self.processing else batch


@dataclass
class Flatten:
    """Collate packs into one sequence, with the row boundaries that attention needs.

    Returns `input_ids`, `labels` and `position_ids`, each (1, tokens), int64. Positions restart at 0 in every row, and
    Transformers finds the rows by them. With `padded`, rows may have images: their values are those of padded rows, and
    `position_ids` is (1 + dimensions, 1, tokens) for a model whose `positions` returns positions of several dimensions
    (M-RoPE), (dimensions, rows, longest row), for padded rows. `keys` selects additional keys for the backend:
    `packed_seq_lengths` (rows,), int32, for Unsloth; `cu_seq_lens_q/k` (rows + 1,), int32, and `max_length_q/k` for
    flash attention in Transformers, which would otherwise compute them in every layer and wait for the device each
    time. With `row_of_token` add `seq_idx`, (1, tokens), int32, for convolutions. With `prompts_once` the packs hold
    pairs, of which the second row leaves out the prompt; `cu_seq_lens_k` then has the boundaries of whole rows, and
    `shared_keys`, int64, the token with the key of each token in them.
    """

    keys: Literal["unsloth", "flash", "positions"]
    row_of_token: bool = False
    prompts_once: bool = False
    padded: PadRight | None = None
    positions: Callable[..., tuple[torch.Tensor, Any]] | None = None

    def __call__(self, packs: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        if self.padded is not None and self.padded.processing is not None:
            return self._with_images(self.padded(packs), list(self.padded.processing.of_tokens))
        ids, labels, lengths = (
            np.concatenate([pack[name] for pack in packs]) for name in ("input_ids", "labels", "lengths")
        )
        positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        of_tokens = {"input_ids": ids, "labels": labels, "position_ids": positions}
        whole, keys = lengths, None
        if self.prompts_once:
            repeated = repeated_prompts(ids, labels, lengths)
            stays, keys = keep_prompts_once(lengths, repeated)
            of_tokens = {name: values[stays] for name, values in of_tokens.items()}
            lengths = lengths - repeated
        batch: dict[str, Any] = {
            name: torch.as_tensor(values, dtype=torch.int64).unsqueeze(0) for name, values in of_tokens.items()
        }
        if keys is not None:
            batch["shared_keys"] = torch.as_tensor(keys, dtype=torch.int64)
        return batch | self._borders(lengths, whole)

    def _with_images(self, batch: dict[str, torch.Tensor], of_tokens: list[str]) -> dict[str, Any]:
        """Return padded rows without their padding, in one sequence."""
        mask = batch["attention_mask"]
        in_rows, lengths = mask == 1, mask.sum(dim=1).numpy()
        positions = (mask.cumsum(dim=1) - 1)[in_rows][None]
        if self.positions is not None:
            parameters = inspect.signature(self.positions).parameters
            places, _ = self.positions(**{name: batch[name] for name in parameters if name in batch})
            positions = torch.cat([positions[None], places[:, None, in_rows]])
        batch |= {name: batch[name][in_rows][None] for name in ("input_ids", "labels", *of_tokens)}
        del batch["attention_mask"]
        return batch | {"position_ids": positions} | self._borders(lengths, lengths)

    def _borders(self, lengths: np.ndarray, whole: np.ndarray) -> dict[str, Any]:
        """Return the keys beside positions for rows of these lengths; `whole` counts left-out prompts too."""
        batch: dict[str, Any] = {}
        if self.keys == "unsloth":
            batch["packed_seq_lengths"] = torch.as_tensor(lengths, dtype=torch.int32)
        elif self.keys == "flash":
            for name, of_rows in (("q", lengths), ("k", whole)):
                borders = np.append(0, np.cumsum(of_rows))
                batch[f"cu_seq_lens_{name}"] = torch.as_tensor(borders, dtype=torch.int32)
                batch[f"max_length_{name}"] = int(of_rows.max())
        if self.row_of_token:
            batch["seq_idx"] = torch.as_tensor(np.repeat(np.arange(len(lengths)), lengths), dtype=torch.int32)[None]
        return batch


@dataclass
class Collate:
    """Flatten packs and pad rows, since training may use packs while evaluation uses rows.

    Further values of each example are added, (examples, ...). With `head_chooses`, add the positions of the supervised
    tokens to the batch (see model/forward/supervised_head.py). With `by_row`, add `row_lengths`, (rows,), to batches of
    packs. With a `shape`, add `padded_batch`, the batch padded to that shape, to batches of packs that fit it (see
    fixed_shape.py).
    """

    pad: PadRight
    flatten: Flatten
    head_chooses: bool = False
    shape: FixedShape | None = None
    by_row: bool = False

    def pad_to_shape(self, shape: FixedShape | None) -> None:
        """Pad every batch of packs to this shape from now on; None stops it."""
        self.shape = shape

    def __call__(self, examples: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        if "desirable" in examples[0]:
            return self._labelled(examples)
        packed = "lengths" in examples[0]
        batch: dict[str, Any] = self.flatten(examples) if packed else self.pad(examples)
        batch |= {name: torch.from_numpy(values) for name, values in _further(examples).items()}
        if packed and self.by_row:
            of_rows = torch.from_numpy(np.concatenate([pack["lengths"] for pack in examples]))
            batch["row_lengths"] = batch["cu_seq_lens_q"].diff() if "shared_keys" in batch else of_rows
        if self.head_chooses:
            batch |= supervised_positions(batch["labels"])
        if packed and self.shape is not None:
            joined = (np.concatenate([pack[name] for pack in examples]) for name in ("input_ids", "labels", "lengths"))
            padded_batch = self.shape.pad(*joined)
            if padded_batch is not None:
                batch["padded_batch"] = padded_batch
        return batch

    def _labelled(self, examples: list[dict[str, np.ndarray]]) -> dict[str, Any]:
        """Return the labelled rows with `desirable`, bool (rows,), and the mismatched rows in a batch of their own."""
        rows = [row for example in examples for row in split_rows(example)]
        further = _further(examples)
        batch: dict[str, Any] = {}
        for half, prefix in enumerate(("", MISMATCHED)):
            half_batch = self([join_rows(rows[half::2])] if "lengths" in examples[0] else rows[half::2])
            half_batch |= {name: torch.from_numpy(values[:, half]) for name, values in further.items()}
            batch |= {prefix + name: value for name, value in half_batch.items()}
        desirable = np.concatenate([example["desirable"].ravel() for example in examples])
        return batch | {"desirable": torch.from_numpy(desirable > 0)}


def _further(examples: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return what a task has added to the examples, each (examples, ...); those of a pack are joined already."""
    join = np.concatenate if "lengths" in examples[0] else np.stack
    return {name: join([example[name] for example in examples]) for name in examples[0] if name not in COLLATED}


def repeated_prompts(ids: np.ndarray, labels: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return how many tokens at the start of each row repeat those of the row before, int (rows,); 0 for chosen rows.

    Only tokens that neither row is trained on count. The last of them is not left out, as it predicts the answer's
    first token.

    Args:
        ids, labels: int (tokens,), of the rows of pairs, one after the other.
        lengths: int (rows,).
    """
    starts = np.cumsum(lengths) - lengths
    repeated = np.zeros_like(lengths)
    for row in range(1, len(lengths), 2):
        shorter = int(min(lengths[row - 1], lengths[row]))
        first, second = (slice(start, start + shorter) for start in starts[row - 1 : row + 1])
        same = (ids[first] == ids[second]) & (labels[first] == IGNORED) & (labels[second] == IGNORED)
        repeated[row] = max(0, (shorter if same.all() else int(np.argmin(same))) - 1)
    return repeated


def keep_prompts_once(lengths: np.ndarray, repeated: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens are kept, bool (tokens,), and which of these has the key of each token, int (tokens,).

    Args:
        lengths: int (rows,), of whole rows.
        repeated: int (rows,), from `repeated_prompts`.
    """
    starts = np.cumsum(lengths) - lengths
    token = np.arange(lengths.sum())
    position = token - np.repeat(starts, lengths)
    stays = position >= np.repeat(repeated, lengths)
    in_row_before = np.repeat(np.roll(starts, 1), lengths) + position
    return stays, (np.cumsum(stays) - 1)[np.where(stays, token, in_row_before)]
