"""Generate the demo's base model, tokenizer and chat rows from the seed in facts.py.

    uv run python demo/make_demo.py                # everything: 5 to 10 minutes of one CPU core
    uv run python demo/make_demo.py --rows_only    # only the rows (*.jsonl): seconds

The rows and the tokenizer are the same on every machine. The weights are the same in every run on one machine, and
differ between machines by rounding.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from chat_tokenizer import BOS, EOS, TURN_END, train_tokenizer
from facts import SEED, Person, Row, eval_rows, labelled, make_people, pairs, statements, train_rows
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

HERE = Path(__file__).resolve().parent
STEPS = 1200
BATCH = 32  # blocks a step
BLOCK = 64  # tokens a block
LEARNING_RATE = 3e-3
WARMUP = 50


def write_rows(rows: list[Row], path: Path) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")


def make_tokenizer(people: list[Person], rows: list[Row]) -> PreTrainedTokenizerFast:
    """Return a tokenizer that encodes every word of the demo as one token."""
    rng = random.Random(SEED)
    read = [statement for _ in range(20) for statement in statements(people, rng)]
    asked = [message["content"] for row in rows for message in row["messages"]]
    return train_tokenizer(read + asked)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained Llama of about a million parameters."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def make_blocks(
    people: list[Person], tokenizer: PreTrainedTokenizerFast, blocks: int, rng: random.Random
) -> torch.Tensor:
    """Return token ids of shape (blocks, BLOCK): short documents of random statements, one after another."""
    tokens: list[int] = []
    while len(tokens) < blocks * BLOCK:
        texts = list(statements(people, rng))
        while texts:
            count = rng.choice([1, 2, 3])
            tokens += tokenizer(BOS + " ".join(texts[:count]) + EOS).input_ids
            del texts[:count]
    return torch.tensor(tokens[: blocks * BLOCK]).view(blocks, BLOCK)


def pretrain(model: LlamaForCausalLM, blocks: torch.Tensor) -> None:
    """Train on next-token prediction over the blocks, one pass."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    steps = len(blocks) // BATCH
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 1.0) * (1 - step / steps)
    )
    start = time.monotonic()
    for step, batch in enumerate(blocks.split(BATCH)):
        logits = model(input_ids=batch).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}  {time.monotonic() - start:.0f} s", flush=True)


@torch.no_grad()
def redraw_unseen_embeddings(model: LlamaForCausalLM, blocks: torch.Tensor) -> None:
    """Draw new embeddings for the tokens that no block contains, with the mean and deviation of the others.

    Pre-training makes the embeddings of unseen tokens (role tokens, the end of a turn, the question mark) short and
    nearly equal, so that an adapter on top of a frozen embedding could hardly distinguish them. Transformers draws the
    rows that it adds to an embedding in a similar way.
    """
    vectors = model.model.embed_tokens.weight
    unseen = torch.ones(len(vectors), dtype=torch.bool)
    unseen[blocks.unique()] = False
    noise = torch.randn(int(unseen.sum()), vectors.shape[1])
    vectors[unseen] = vectors[~unseen].mean(0) + vectors[~unseen].std(0) * noise


def main() -> None:
    """Write the rows, and unless --rows_only the tokenizer and the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="folder to write to (default: this one)")
    parser.add_argument("--rows_only", action="store_true", help="leave the model as it is")
    arguments = parser.parse_args()

    asked, held_out = make_people()
    rows = train_rows(asked)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_rows(rows, arguments.output / "train.jsonl")
    write_rows(eval_rows(held_out), arguments.output / "eval.jsonl")
    write_rows(pairs(asked), arguments.output / "pairs_train.jsonl")
    write_rows(pairs(held_out), arguments.output / "pairs_eval.jsonl")
    write_rows(labelled(asked), arguments.output / "labelled_train.jsonl")
    write_rows(labelled(held_out), arguments.output / "labelled_eval.jsonl")
    if arguments.rows_only:
        return

    set_seed(SEED)
    people = asked + held_out
    tokenizer = make_tokenizer(people, rows)
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {len(people)} people")
    blocks = make_blocks(people, tokenizer, STEPS * BATCH, random.Random(SEED))
    pretrain(model, blocks)
    redraw_unseen_embeddings(model, blocks)
    model.save_pretrained(arguments.output / "model")
    tokenizer.save_pretrained(arguments.output / "model")


if __name__ == "__main__":
    main()
