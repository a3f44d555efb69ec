"""Draw the image rows of the demo, and pre-train its image-text model.

    uv run python demo/make_shapes.py                # everything: some minutes of one CPU core
    uv run python demo/make_shapes.py --rows_only    # only the rows (shapes_*.parquet): seconds

Every row shows one shape of one color, at a random place and in a random size, and asks for its name. The model was
pre-trained on captions of other drawings ("circle, red"), and on no question. The rows are the same on every machine,
the weights but for rounding.
"""

from __future__ import annotations

import argparse
import io
import random
from pathlib import Path
from typing import Any

import datasets
import torch
from PIL import Image, ImageDraw
from transformers import (
    AutoTokenizer,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    get_cosine_schedule_with_warmup,
)

HERE = Path(__file__).resolve().parent
SEED = 1
SIDE, PATCH = 56, 14
CAPTIONS, STEPS, BATCH, LEARNING_RATE, WARMUP = 3000, 1000, 32, 2e-3, 50
COLORS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 119, 180),
    "orange": (255, 153, 0),
    "black": (30, 30, 30),
}
SHAPES = ("circle", "square", "triangle", "ring")
QUESTIONS = ("What is drawn here?", "Which shape is this?", "Name the color and the shape.")
TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}{{- '<|' + message.role + '|>' }}{%- if message.content is string "
    "%}{{- message.content }}{%- else %}{%- for part in message.content %}{%- if part.type == 'image' %}{{- "
    "'<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif "
    "%}{{- '<|end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def draw(color: str, shape: str, rng: random.Random) -> bytes:
    """Return a PNG of a shape."""
    image = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    size = rng.randint(24, 44)
    left, top = rng.randint(2, SIDE - size - 2), rng.randint(2, SIDE - size - 2)
    box = (left, top, left + size, top + size)
    pen = ImageDraw.Draw(image)
    if shape == "square":
        pen.rectangle(box, fill=COLORS[color])
    elif shape == "triangle":
        pen.polygon([(left, box[3]), (box[2], box[3]), ((left + box[2]) // 2, top)], fill=COLORS[color])
    else:
        pen.ellipse(
            box, **({"fill": COLORS[color]} if shape == "circle" else {"outline": COLORS[color], "width": size // 6})
        )
    written = io.BytesIO()
    image.save(written, "PNG", optimize=True)
    return written.getvalue()


def rows(count: int, rng: random.Random) -> list[dict]:
    """Return chats about drawings, every name equally often."""
    names = [(color, shape) for color in COLORS for shape in SHAPES]
    found = []
    for number in range(count):
        color, shape = names[number % len(names)]
        chat = [
            {"role": "user", "content": rng.choice(QUESTIONS)},
            {"role": "assistant", "content": f"{'an' if color == 'orange' else 'a'} {color} {shape}"},
        ]
        found.append({"messages": chat, "images": [{"bytes": draw(color, shape, rng), "path": None}]})
    rng.shuffle(found)
    return found


def write(found: list[dict], path: Path) -> None:
    """Write rows as Datasets does."""
    features = datasets.Features(
        {
            "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
            "images": datasets.List(datasets.Image()),
        }
    )
    datasets.Dataset.from_list(found, features=features).to_parquet(path)


def make_model() -> tuple[Qwen3VLForConditionalGeneration, Qwen3VLProcessor]:
    """Return a Qwen3-VL of some 500,000 random weights, with the demo's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(HERE / "model", extra_special_tokens=TOKENS, chat_template=TEMPLATE)
    ids: dict[str, Any] = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32, "vocab_size": len(tokenizer), "max_position_embeddings": 512, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]},
            "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": PATCH,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2, "out_hidden_size": 64, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=True,
        **ids,
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = Qwen3VLForConditionalGeneration(config)
    pixels = SIDE * SIDE
    images = Qwen2VLImageProcessor(
        patch_size=PATCH, temporal_patch_size=2, merge_size=2, size={"shortest_edge": pixels, "longest_edge": pixels}
    )
    return model, Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(), chat_template=TEMPLATE)


def pretrain(model: Any, processor: Any, rng: random.Random) -> None:
    """Train all weights on captions of drawings."""
    names = [(color, shape) for color in COLORS for shape in SHAPES]
    drawn = [rng.choice(names) for _ in range(CAPTIONS)]
    images = [Image.open(io.BytesIO(draw(color, shape, rng))).convert("RGB") for color, shape in drawn]
    pixels = processor.image_processor(images, return_tensors="pt")
    each = pixels["pixel_values"].view(CAPTIONS, -1, pixels["pixel_values"].shape[-1])
    begin = f"{processor.tokenizer.bos_token}<|vision_start|>{processor.image_token * 4}<|vision_end|>"
    texts = [f"{begin} {shape}, {color}{processor.tokenizer.eos_token}" for color, shape in drawn]
    encoded = processor.tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    shown = ids == processor.image_token_id
    labels = ids.masked_fill((mask == 0) | shown, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP, STEPS)
    model.train()
    for step in range(STEPS):
        chosen = torch.tensor(rng.sample(range(CAPTIONS), BATCH))
        loss = model(
            input_ids=ids[chosen], attention_mask=mask[chosen], labels=labels[chosen],
            mm_token_type_ids=shown[chosen].int(),
            pixel_values=each[chosen].flatten(0, 1), image_grid_thw=pixels["image_grid_thw"][chosen],
        ).loss  # fmt: skip
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}/{STEPS}: loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Write rows and model beside this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows_only", action="store_true", help="leave the model as it is")
    given = parser.parse_args()
    rng = random.Random(SEED)
    write(rows(400, rng), HERE / "shapes_train.parquet")
    write(rows(100, rng), HERE / "shapes_eval.parquet")
    if given.rows_only:
        return
    model, processor = make_model()
    pretrain(model, processor, rng)
    model.eval().save_pretrained(HERE / "vision_model")
    processor.save_pretrained(HERE / "vision_model")


if __name__ == "__main__":
    main()
