"""Fixtures shared by all tests: small rows of every kind, and the expensive runs, made once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parent.parent
DEMO_MODEL = REPO / "demo" / "model"


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def demo_rows(name: str = "train") -> list[dict[str, Any]]:
    """The demo's chat rows."""
    return [json.loads(line) for line in (REPO / "demo" / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights and the demo's tokenizer; well-conditioned, so rounding stays small."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=len(tokenizer),
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def uneven_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """13 chats of very different lengths; two of them have no supervised token within 64 tokens."""
    single = [row for row in demo_rows() if len(row["messages"]) == 2]
    longer = [row for row in demo_rows() if len(row["messages"]) > 2]
    rows = [row for pair in zip(single[:18], longer[:18], strict=True) for row in pair]
    late = {
        "messages": [{"role": "user", "content": "Who are you? " * 30}, {"role": "assistant", "content": "Nobody."}]
    }
    rows = [*rows[:4], late, *rows[4:10], late, rows[10]]
    return write_jsonl(tmp_path_factory.mktemp("rows") / "uneven.jsonl", rows)
