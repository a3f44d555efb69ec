"""Hold the tokens of a text with the characters that each stands for, and find characters that no token stands for.

A tokenizer without byte fallback leaves such a character out or writes <unk>, and a normalizer may replace it.
"""

import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.data.chat.template import Span

LONGEST_SHOWN = 20
ASCII = frozenset(map(chr, range(128)))


@dataclass
class Tokens:
    """The tokens of a text.

    Args:
        ids: token ids; more than `offsets` has, once tokens are appended.
        offsets: the characters of each token.
    """

    text: str
    ids: list[int]
    offsets: list[Span]

    def __post_init__(self) -> None:
        self._starts, self._ends = map(list, zip(*self.offsets, strict=True)) if self.offsets else ([], [])

    def is_blank(self, position: int) -> bool:
        """Return whether a token of the text is only white space."""
        return position < len(self.offsets) and not self.text[slice(*self.offsets[position])].strip()

    def behind(self, character: int) -> int:
        """Return the first token that ends behind a character; the number of tokens if there is none."""
        return bisect_right(self._ends, character)

    def of_span(self, span: Span) -> Span:
        """Return the first token that stands in a span, and the one behind the last."""
        return self.behind(span[0]), bisect_left(self._starts, span[1])

    def of_turn(self, span: Span, special_ids: Collection[int]) -> Span:
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


class Characters:
    """Look for characters that a tokenizer cannot write; each character is tried once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._tried: set[str] = set()
        self._unwritable: set[str] = set()

    def unwritable_in(self, tokens: Tokens) -> set[str]:
        """Return the characters and words of a text that do not stand in its tokens."""
        text = tokens.text
        # Most rows are ASCII, which Python knows of a text without reading it.
        if untried := (ASCII if text.isascii() else set(text)) - self._tried:
            self._tried |= untried
            if not self._writes(f"a{''.join(sorted(untried))}a", unknown=False):
                self._unwritable |= {character for character in untried if not self._writes(character)}
        unknown = self.tokenizer.unk_token_id
        words: set[str] = set()
        if unknown is not None and unknown in tokens.ids:
            pairs = zip(tokens.ids, tokens.offsets, strict=False)
            words = {text[start:end] for token, (start, end) in pairs if token == unknown}
            # The text may name the token, which is also the EOS of some models.
            words -= {self.tokenizer.unk_token, ""}
        lost = self._unwritable.intersection(text) if self._unwritable else set()
        return lost | {word[:LONGEST_SHOWN] for word in words}

    def _writes(self, characters: str, *, unknown: bool = True) -> bool:
        """Return whether the tokens of a text hold it; `unknown` if they hold the unknown token.

        That token may stand for a character that is written in words; where it is not, the tokens of the row show it.
        """
        # White space at the ends of a text may be dropped.
        text = f"a{characters}a" if characters.isspace() else characters
        ids = self.tokenizer(text=text, add_special_tokens=False)["input_ids"]
        if self.tokenizer.unk_token_id in ids:
            return unknown
        written = self.tokenizer.decode(token_ids=ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        # Forms that Unicode defines as equal are no loss.
        return any(unicodedata.normalize(form, text) in unicodedata.normalize(form, written) for form in ("NFC", "NFD"))
