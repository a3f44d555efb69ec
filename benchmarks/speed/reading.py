"""Measure how many rows a second are read, checked and tokenized, compared with another commit of the kit.

    git worktree add --detach ../other COMMIT
    python -m benchmarks.speed.reading ../other --json benchmarks/results/speed/reading.json

Rows of each kind are read and tokenized as a run does, with TRL's template of each model and a tokenizer
of 8,000 tokens trained on this repository's docs. Both checkouts read blocks of 50 rows in turn, in one process, and
the time is that of its CPU, so that other work on the machine matters little. The first block is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
TEMPLATES = {"qwen3": "Qwen3", "llama3_1": "Llama 3.1", "gemma3": "Gemma 3"}
# Rows that one checkout reads before the other reads them.
BLOCK = 50
SPECIAL = "<|im_start|> <|im_end|> <|begin_of_text|> <|eot_id|> <start_of_turn> <end_of_turn> <think> </think>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Return the {name}.", "parameters": PARAMETERS}}
    for name in ("weather", "forecast")
]


def rows_of(kind: str, count: int) -> list[dict[str, Any]]:
    """Return rows of a kind, with texts of the docs' words; the same for the same arguments."""
    rng = random.Random(kind)
    texts = [path.read_text() for path in sorted((REPO / "docs").glob("*.md"))]
    # Markup in a text may be refused.
    words = [word for text in texts for word in text.split() if re.fullmatch(r"[\w.,;:'()-]+", word)]

    def text(shortest: int, longest: int) -> str:
        start = rng.randrange(len(words) - longest)
        return " ".join(words[start : start + rng.randint(shortest, longest)])

    def ask() -> dict[str, Any]:
        return {"role": "user", "content": text(5, 60)}

    def answer(shortest: int = 20) -> dict[str, Any]:
        return {"role": "assistant", "content": text(shortest, 150)}

    def chat() -> list[dict[str, Any]]:
        system = [{"role": "system", "content": text(5, 30)}] if rng.random() < 0.3 else []
        return system + [turn for _ in range(rng.randint(1, 4)) for turn in (ask(), answer())]

    def called() -> list[dict[str, Any]]:
        function = {"name": "weather", "arguments": {"city": text(1, 2), "days": rng.randint(1, 9)}}
        call = {"type": "function", "id": "abcdefgh1", "function": function}
        returned = {"role": "tool", "name": "weather", "tool_call_id": "abcdefgh1", "content": text(5, 40)}
        return [ask(), {"role": "assistant", "content": "", "tool_calls": [call]}, returned, answer()]

    def reasoned() -> list[dict[str, Any]]:
        turns = chat()
        turns[-1]["content"] = f"<think>\n{text(20, 150)}\n</think>\n\n{turns[-1]['content']}"
        return turns

    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "chats": lambda: {"messages": chat()},
        "tool chats": lambda: {"messages": called(), "tools": TOOLS},
        "reasoning": lambda: {"messages": reasoned()},
        "pairs": lambda: {"prompt": chat()[:-1], "chosen": [answer()], "rejected": [answer(10)]},
        "completions": lambda: {"prompt": text(5, 60) + " ", "completion": text(20, 150)},
    }
    return [makers[kind]() for _ in range(count)]


KINDS = ("chats", "tool chats", "reasoning", "pairs", "completions")


def tokenizer_of(template: str) -> Any:
    """Return a byte-level BPE of 8,000 tokens with one of TRL's templates."""
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    inner.train([str(path) for path in sorted((REPO / "docs").glob("*.md"))], trainer)
    source = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text(encoding="utf-8")
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=source, additional_special_tokens=SPECIAL.split(), **special
    )


class Kit:
    """The kit of a checkout, imported under a name of its own, so that two of them run in one process."""

    def __init__(self, checkout: Path, name: str, folder: Path) -> None:
        for path in sorted((checkout / "unsloth_ddp").rglob("*")):
            copy = folder / name / path.relative_to(checkout / "unsloth_ddp")
            if path.suffix == ".py":
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(re.sub(r"\bunsloth_ddp\b", name, path.read_text(encoding="utf-8")), encoding="utf-8")
            elif path.suffix == ".jinja":
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, copy)
        self.name = name

    def module(self, path: str) -> Any:
        """Return a module by its path in the package."""
        return importlib.import_module(f"{self.name}.{path}")

    def reader(self, tokenizer: Any, task: str) -> Callable[[Path], None]:
        """Return a function that reads, checks and tokenizes the rows of a file."""
        encoder = self.module("data.chat.tokenize").Encoder(tokenizer, supervise_all=False)
        encode_row = self.module("data.chat.tokenize").encode_row
        example_type = self.module("data.sources.formats").Example
        checked_rows = self.module("data.sources.checked_rows").checked_rows
        options: dict[str, Any] = {"task": task}
        with contextlib.suppress(ImportError):
            # Commits of November 2026 and earlier give templates no columns.
            columns = self.module("data.template_values").TemplateColumns
            variables = self.module("data.chat.template").variables_of(tokenizer.chat_template)
            options["template"] = columns({}, variables)

        def read(path: Path) -> None:
            for _, example in checked_rows(str(path), "train", **options):
                encode_row(encoder, example_type.from_json(example.to_json()), 2048)

        return read


def compared(kits: dict[str, Kit], folder: Path, count: int) -> dict[str, dict[str, float]]:
    """Return the rows a second of each kind under each template, read by two kits in turn."""
    cells: dict[str, dict[str, float]] = {}
    for template, model in TEMPLATES.items():
        tokenizer = tokenizer_of(template)
        for kind in KINDS:
            if template == "gemma3" and kind in ("tool chats", "reasoning"):
                continue  # its template takes no tools, and has no form for reasoning
            rows = [json.dumps(row) + "\n" for row in rows_of(kind, count + BLOCK)]
            blocks = [folder / f"{number}.jsonl" for number in range(len(rows) // BLOCK)]
            for number, path in enumerate(blocks):
                path.write_text("".join(rows[number * BLOCK : (number + 1) * BLOCK]))
            readers = {name: kit.reader(tokenizer, "dpo" if kind == "pairs" else "sft") for name, kit in kits.items()}
            seconds = dict.fromkeys(kits, 0.0)
            for number, path in enumerate(blocks):
                for name in list(kits)[:: 1 if number % 2 else -1]:
                    began = time.thread_time()
                    readers[name](path)
                    # The first block imports what is imported on first use.
                    seconds[name] += time.thread_time() - began if number else 0
            rates = {name: count / spent for name, spent in seconds.items()}
            this, other = rates.values()
            cells[f"{model}, {kind}"] = {name: round(rate, 1) for name, rate in rates.items()} | {"ratio": this / other}
            print(f"{model}, {kind}: {this:.0f} and {other:.0f} rows a second, {this / other:.3f}", flush=True)
    return cells


def commit_of(checkout: Path) -> str:
    """Return the commit that is checked out."""
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=checkout, text=True).strip()


def main() -> None:
    """Measure and print the rows a second, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--rows", type=int, default=1000, help="rows of each kind")
    parser.add_argument("--json", type=Path, help="where the result is written")
    options = parser.parse_args()
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    commits = {"this": commit_of(REPO), "other": commit_of(options.other)}
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        kits = {name: Kit(path, name, Path(folder)) for name, path in (("this", REPO), ("other", options.other))}
        cells = compared(kits, Path(folder), options.rows)
    mean = statistics.geometric_mean(cell["ratio"] for cell in cells.values())
    result = {"commits": commits, "rows": options.rows, "mean_ratio": mean, "rows_a_second": cells}
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
