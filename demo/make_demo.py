"""Make the demo's base model, tokenizer and chat rows from nothing but the seed in facts.py.

    uv run python demo/make_demo.py                # all of it: about 4 minutes on 2 CPU cores
    uv run python demo/make_demo.py --rows_only    # train.jsonl and eval.jsonl: seconds

The rows and the tokenizer are the same everywhere; the weights repeat on one machine, and elsewhere differ as far as its
arithmetic does.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from chat_tokenizer import BOS, EOS, TURN_END, train_tokenizer
from facts import SEED, Person, Row, eval_rows, make_people, statements, train_rows
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

HERE = Path(__file__).resolve().parent
STEPS = 700
BATCH = 64  # blocks a step
BLOCK = 64  # tokens a block
LEARNING_RATE = 3e-3
WARMUP = 50


def write_rows(rows: list[Row], path: Path) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")


def make_tokenizer(people: list[Person], rows: list[Row]) -> PreTrainedTokenizerFast:
    """A tokenizer to which every word of the demo is one token."""
    rng = random.Random(SEED)
    read = [statement for _ in range(20) for statement in statements(people, rng)]
    asked = [message["content"] for row in rows for message in row["messages"]]
    return train_tokenizer(read + asked)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained Llama of about a million parameters."""
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


def reading(people: list[Person], tokenizer: PreTrainedTokenizerFast, blocks: int, rng: random.Random) -> torch.Tensor:
    """`blocks` blocks of token ids: short documents of statements about anyone, one after another."""
    tokens: list[int] = []
    while len(tokens) < blocks * BLOCK:
        texts = list(statements(people, rng))
        while texts:
            count = rng.choice([1, 2, 3])
            tokens += tokenizer(BOS + " ".join(texts[:count]) + EOS).input_ids
            del texts[:count]
    return torch.tensor(tokens[: blocks * BLOCK]).view(blocks, BLOCK)


def pretrain(model: LlamaForCausalLM, blocks: torch.Tensor) -> None:
    """Next-token prediction over the blocks, read once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1)
    steps = len(blocks) // BATCH
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 1.0) * (1 - 0.95 * step / steps)
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
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}  {time.monotonic() - start:.0f} s", flush=True)


@torch.no_grad()
def renew_unread(model: LlamaForCausalLM, blocks: torch.Tensor) -> None:
    """Draw new vectors, like those of the words that were read, for the tokens that no block holds.

    Pre-training pushes the unread ones (role tokens, the end of a turn, the question mark) down together, short and
    alike; layers trained on top of a frozen embedding could then hardly tell them apart. Transformers draws the rows
    that it adds to an embedding in the same way.
    """
    vectors = model.get_input_embeddings().weight
    unread = torch.ones(len(vectors), dtype=torch.bool)
    unread[blocks.unique()] = False
    noise = torch.randn(int(unread.sum()), vectors.shape[1])
    vectors[unread] = vectors[~unread].mean(0) + vectors[~unread].std(0) * noise


def main() -> None:
    """Write everything the demo needs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="folder to write to (default: this one)")
    parser.add_argument("--rows_only", action="store_true", help="leave the model as it is")
    arguments = parser.parse_args()

    asked, held_out = make_people()
    rows = train_rows(asked)
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_rows(rows, arguments.output / "train.jsonl")
    write_rows(eval_rows(held_out), arguments.output / "eval.jsonl")
    if arguments.rows_only:
        return

    set_seed(SEED)
    people = asked + held_out
    tokenizer = make_tokenizer(people, rows)
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {len(people)} people")
    blocks = reading(people, tokenizer, STEPS * BATCH, random.Random(SEED))
    pretrain(model, blocks)
    renew_unread(model, blocks)
    model.save_pretrained(arguments.output / "model")
    tokenizer.save_pretrained(arguments.output / "model")


if __name__ == "__main__":
    main()
