"""Find the characters of a text that a tokenizer cannot write, so that the model would read another text.

A tokenizer without byte fallback leaves such a character out or writes <unk>, and a normalizer may replace it.
"""

import unicodedata
from collections.abc import Sequence
from typing import Any

LONGEST_SHOWN = 20
ASCII = frozenset(map(chr, range(128)))


class Characters:
    """Look for characters that a tokenizer cannot write; each character is tried once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._tried: set[str] = set()
        self._unwritable: set[str] = set()

    def unwritable_in(self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> set[str]:
        """Return the characters and words of a text that do not stand in its tokens.

        Args:
            ids: the tokens of the text, which may have more behind them.
            offsets: the characters of each token.
        """
        # Most rows are ASCII, which Python knows of a text without reading it.
        if untried := (ASCII if text.isascii() else set(text)) - self._tried:
            self._tried |= untried
            if not self._writes(f"a{''.join(sorted(untried))}a", unknown=False):
                self._unwritable |= {character for character in untried if not self._writes(character)}
        unknown = self.tokenizer.unk_token_id
        words: set[str] = set()
        if unknown is not None and unknown in ids:
            words = {text[start:end] for token, (start, end) in zip(ids, offsets, strict=False) if token == unknown}
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
