"""Show a tokenized row as the model sees it."""

import re
from itertools import accumulate, groupby, pairwise
from typing import Any

from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.data.dataset import TokenizedRows
from unsloth_ddp.utils.redaction import printable
from unsloth_ddp.utils.units import counted

SUPERVISED_START, SUPERVISED_END = "[[", "]]"
MOST_CHARACTERS = 1500
# A special token, such as that of images, more than three times in a row.
REPEATED = re.compile(r"([<\[][^<>\[\]\s]+[>\]])\1{3,}")


def preview_first_row(rows: TokenizedRows, tokenizer: Any, max_length: int) -> str:
    """Return the first training row decoded, for the start of a run; of a pair, both answers with their prompt."""
    first = rows.dataset.with_format(None)[0]
    cut_at = max_length if first["overlong"] else None
    named = ["The first training row"]
    if "desirable" in first:
        # The mismatched row is the kit's.
        named[0] += ", desirable," if first["desirable"][0] else ", undesirable,"
    elif "parts" in first:
        named = [f"{named[0]} with its {answer} answer" for answer in ("chosen", "rejected")]
    begins = [0, *accumulate(first.get("parts") or [len(first["labels"])])]
    return "\n".join(
        preview_row(tokenizer, first["input_ids"][begin:end], first["labels"][begin:end], cut_at, name)
        for name, (begin, end) in zip(named, pairwise(begins), strict=False)
    )


def preview_row(tokenizer: Any, input_ids: list[int], labels: list[int], cut_at: int | None, named: str) -> str:
    """Return a row decoded, with its supervised parts in double brackets.

    Args:
        labels: (tokens,), IGNORED where a token is not supervised.
        cut_at: the --max_length at which the row was cut, or None.
        named: the name of the row.
    """
    # The first token is never predicted.
    labels = [IGNORED, *labels[1:]]
    parts, end, decoded = [], 0, ""
    for supervised, run in groupby(labels, key=lambda label: label != IGNORED):
        start, end = end, end + len(list(run))
        # Many tokenizers drop leading space, so a part is decoded as what it adds to the text before it.
        so_far = tokenizer.decode(token_ids=input_ids[:end], skip_special_tokens=False)
        goes_on = so_far.startswith(decoded)
        text = (
            so_far[len(decoded) :]
            if goes_on
            else tokenizer.decode(token_ids=input_ids[start:end], skip_special_tokens=False)
        )
        decoded = so_far
        text = "\n".join(printable(line) for line in text.split("\n"))
        parts.append(f"{SUPERVISED_START}{text}{SUPERVISED_END}" if supervised else text)
    shown = REPEATED.sub(lambda match: f"{match[1]} x {len(match[0]) // len(match[1])} ", "".join(parts))
    if (left_out := len(shown) - MOST_CHARACTERS) > 0:
        half = MOST_CHARACTERS // 2
        shown = f"{shown[:half]}\n... {left_out:,} characters ...\n{shown[-half:]}"
    supervised_tokens = sum(label != IGNORED for label in labels)
    cut = f", cut at --max_length {cut_at}" if cut_at and len(input_ids) >= cut_at else ""
    return (
        f"{named} as the model sees it ({counted(len(input_ids), 'token')}{cut}; {SUPERVISED_START}supervised"
        f"{SUPERVISED_END}, {counted(supervised_tokens, 'token')}):\n{shown}"
    )
