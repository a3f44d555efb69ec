"""Write training rows of known lengths, built from the demo's chats, for benchmarks that cannot download data."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

from benchmarks.common.runs import REPO

# Of the demo's tokenizer; a pair is a question and its answer.
TOKENS_A_PAIR = 13
MEAN_LOG, SPREAD_LOG, LONGEST = 5.36, 0.8, 2048
# So much longer than asked for, so that no row falls short of it.
MARGIN = 1.1


def chat_rows(path: Path, count: int, seed: int, longest: int = LONGEST, times: int = 1) -> None:
    """Write chats of log-normal length: mean about 300 tokens, or `times` as many, and at most about `longest`."""
    rng, mean = random.Random(seed), MEAN_LOG + math.log(times)
    _write(path, count, rng, lambda: round(min(longest, rng.lognormvariate(mean, SPREAD_LOG)) / TOKENS_A_PAIR))


def full_rows(path: Path, count: int, seed: int, tokens: int) -> None:
    """Write chats that are longer than `tokens`, so that each is cut to exactly that length."""
    _write(path, count, random.Random(seed), lambda: math.ceil(MARGIN * tokens / TOKENS_A_PAIR))


def preference_rows(path: Path, count: int, seed: int, longest: int = LONGEST // 2) -> None:
    """Write pairs of answers: lengths are log-normal, a row of about 300 and at most `longest` tokens."""
    rng, pairs = random.Random(seed), _pairs()

    def message(role: str) -> dict[str, str]:
        tokens = min(longest // 2, rng.lognormvariate(MEAN_LOG - math.log(2), SPREAD_LOG))
        chosen = rng.choices(pairs, k=max(1, round(tokens / TOKENS_A_PAIR)))
        return {"role": role, "content": " ".join(message["content"] for pair in chosen for message in pair)}

    with path.open("w") as file:
        for _ in range(count):
            row = {"prompt": [message("user")], "chosen": [message("assistant")], "rejected": [message("assistant")]}
            file.write(json.dumps(row) + "\n")


def labelled_rows(pairs: Path, path: Path) -> None:
    """Write the answers of a file of pairs as labelled answers, in turn one that is desirable and one that is not."""
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    with path.open("w") as file:
        for number, row in enumerate(rows):
            answer = row["chosen"] if number % 2 else row["rejected"]
            file.write(json.dumps({"prompt": row["prompt"], "completion": answer, "label": bool(number % 2)}) + "\n")


def _pairs() -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"][:2] for line in (REPO / "demo/train.jsonl").read_text().splitlines()]


def _write(path: Path, count: int, rng: random.Random, next_pairs: Callable[[], int]) -> None:
    pairs = _pairs()
    with path.open("w") as file:
        for _ in range(count):
            chosen = rng.choices(pairs, k=max(1, next_pairs()))
            file.write(json.dumps({"messages": [message for pair in chosen for message in pair]}) + "\n")
