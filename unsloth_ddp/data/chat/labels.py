"""Find the tokens of a text that are supervised, and the supervised tokens of a row or a batch from its labels."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# PyTorch's cross entropy ignores this label.
IGNORED = -100
# Matrix products are fastest with whole tiles, and the loss is compiled for more than one token.
MULTIPLE = 128
# Largest fraction of selected tokens; selecting needs a copy, which does not pay off for nearly all tokens.
MOST_SELECTED = 0.9


@dataclass
class Tokens:
    """The tokens of a text.

    Args:
        ids: token ids; more than `offsets` has, once tokens are appended.
        offsets: the characters of each token.
    """

    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]

    def __post_init__(self) -> None:
        self._starts, self._ends = map(list, zip(*self.offsets, strict=True)) if self.offsets else ([], [])

    def is_blank(self, position: int) -> bool:
        """Return whether a token of the text is only white space."""
        return position < len(self.offsets) and not self.text[slice(*self.offsets[position])].strip()

    def behind(self, character: int) -> int:
        """Return the first token that ends behind a character; the number of tokens if there is none."""
        return bisect_right(self._ends, character)

    def of_span(self, span: tuple[int, int]) -> tuple[int, int]:
        """Return the first token that stands in a span, and the one behind the last."""
        return self.behind(span[0]), bisect_left(self._starts, span[1])

    def of_turn(self, span: tuple[int, int], special_ids: Collection[int]) -> tuple[int, int]:
        """Return the tokens of a span, white space at its end aside, with the special token that ends its turn."""
        start, end = span
        first, last = self.of_span((start, start + len(self.text[start:end].rstrip())))
        last = max(first, last)
        if last == first or self.ids[last - 1] not in special_ids:
            behind = last
            while behind < len(self.ids) and self.is_blank(behind):
                behind += 1
            if behind == len(self.ids):
                last = behind
            elif self.ids[behind] in special_ids:
                last = behind + 1
        return first, last

    def end_in(self, stops: Collection[int]) -> bool:
        """Return whether the last token that is not white space is one of `stops`."""
        for position in reversed(range(len(self.offsets))):
            if self.ids[position] in stops or not self.is_blank(position):
                return self.ids[position] in stops
        return False


def selected_positions(supervised: int, tokens: int) -> int:
    """Return at how many of the tokens of a micro-batch logits are computed: tiles of supervised ones, or all."""
    tiled = max(1, -(-supervised // MULTIPLE)) * MULTIPLE
    return tokens if tiled > MOST_SELECTED * tokens else tiled


def first_supervised(labels: Sequence[int]) -> int | None:
    """Return the first supervised token that is predicted, which the first of a row is not; None if there is none."""
    return next((place for place, label in enumerate(labels) if label != IGNORED and place), None)


def stop_tokens(labels: list[int], is_blank: Callable[[int], bool], special_ids: Collection[int]) -> list[int]:
    """Return the special token that ends the last supervised run of tokens; empty if the run does not end in one.

    If that run holds only special tokens, for example an EOS after the end of the turn, the run before it counts too.

    Args:
        labels: (tokens,), IGNORED where a token is not supervised.
        is_blank: returns whether a token is only white space.
        special_ids: the tokenizer's special tokens.
    """
    stops: list[int] = []
    position = len(labels) - 1
    while position >= 0:
        while (
            position >= 0
            and labels[position] not in special_ids
            and (labels[position] == IGNORED or is_blank(position))
        ):
            position -= 1
        if position < 0 or labels[position] not in special_ids:
            break
        stops.append(labels[position])
        while position >= 0 and labels[position] in special_ids:
            position -= 1
        if position >= 0 and labels[position] != IGNORED:
            break
    return stops


def supervise_from_same_token(rows: Sequence[tuple[list[int], list[int]]]) -> None:
    """Supervise both rows of a pair from the first token in which they differ or that either supervises.

    A token may join the end of the prompt to the beginning of one answer, and an answer may lack the tag that the
    generation prompt ends with. So the tokens before both answers are the same.

    Args:
        rows: input ids and labels of the two rows, which have the same text before their answers.
    """
    firsts = [first_supervised(labels) for _, labels in rows]
    begins = [first for first in firsts if first is not None]
    if len(begins) < len(rows):
        return
    (ids, _), (others, _) = rows
    same = min(begins)
    if ids[:same] != others[:same]:
        same = next(place for place in range(same) if ids[place] != others[place])
    for (row, labels), begin in zip(rows, begins, strict=True):
        labels[same:begin] = row[same:begin]


def supervised_positions(labels: Tensor) -> dict[str, Tensor]:
    """Return the positions that predict a supervised label, and these labels; empty if nearly all positions do.

    Args:
        labels: (rows, tokens), IGNORED where a token is not supervised.

    Returns:
        `supervised_positions`, indices into rows x tokens, and `shift_labels`, the label that follows each; both int64
        (1, n). n is padded to a multiple of MULTIPLE with positions whose label is IGNORED.
    """
    import torch

    following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    positions = torch.nonzero(following != IGNORED).flatten()
    selected = selected_positions(len(positions), labels.numel())
    if selected == labels.numel():
        return {}
    missing = selected - len(positions)
    return {
        "supervised_positions": torch.nn.functional.pad(positions, (0, missing))[None],
        "shift_labels": torch.nn.functional.pad(following[positions], (0, missing), value=IGNORED)[None],
    }
