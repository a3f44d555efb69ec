"""Train an image-text model with Unsloth as its vision notebooks show: its collator, adamw_8bit, every step logged.

The notebooks load 4-bit weights and adapt the tower too, with 2 rows x 4. --bits, --adapt, --optim, --checkpointing,
--logging_steps, --workers and --keep_size stand for tuning by hand.
"""

from __future__ import annotations

# Before everything else, so that it can replace parts of Transformers and TRL.
from unsloth import FastVisionModel  # isort: skip
from unsloth.trainer import UnslothVisionDataCollator  # isort: skip

import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks.speed.peers.measure import add_unsloth_options, make_parser, train


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the chats with their images in memory, as the notebooks keep them; paths are relative to the file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        for message in row["messages"]:
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
            for part in message["content"]:
                if part["type"] == "image":
                    part["image"] = Image.open(path.parent / part["image"]).convert("RGB")
    return rows


def main() -> None:
    """Train, and write the measured speed."""
    parser = add_unsloth_options(make_parser(__doc__))
    parser.add_argument("--bits", type=int, choices=[4, 16], default=4)
    parser.add_argument("--adapt", choices=["all", "text"], default="all", help="what gets adapters")
    parser.add_argument("--workers", type=int, default=0, help="processes that read rows")
    parser.add_argument("--keep_size", action="store_true", help="images as they are, not scaled down by the collator")
    options = parser.parse_args()
    cpu = not torch.cuda.is_available()
    stored = {"gradient_checkpointing": False} if options.checkpointing == "none" else {}
    model, processor = FastVisionModel.from_pretrained(
        options.model,
        max_seq_length=options.max_length,
        load_in_4bit=options.bits == 4,
        use_gradient_checkpointing=False if stored else "unsloth",
    )
    model = FastVisionModel.get_peft_model(
        model,
        finetune_vision_layers=options.adapt == "all",
        finetune_language_layers=True,
        finetune_attention_modules=True,
        finetune_mlp_modules=True,
        r=16,
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        random_state=3407,
        use_gradient_checkpointing=False if stored else "unsloth",
    )
    FastVisionModel.for_training(model, use_gradient_checkpointing=not stored)
    collator = UnslothVisionDataCollator(model, processor, **({"resize": "max"} if options.keep_size else {}))
    trainer = SFTTrainer(
        model=model,
        processing_class=processor.tokenizer,
        data_collator=collator,
        train_dataset=read_rows(Path(options.rows)),
        args=SFTConfig(
            output_dir="trained",
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulation,
            warmup_steps=5,
            max_steps=10_000,
            learning_rate=2e-4,
            logging_steps=options.logging_steps,
            optim=options.optim,
            weight_decay=0.001,
            lr_scheduler_type="linear",
            seed=3407,
            save_strategy="no",
            report_to="none",
            # The notebooks give these for rows with images.
            remove_unused_columns=False,
            dataset_text_field="",
            dataset_kwargs={"skip_prepare_dataset": True},
            max_length=options.max_length,
            dataloader_num_workers=options.workers,
            **({"use_cpu": True, "bf16": False} if cpu else {}),
            **stored,
        ),
    )
    train(trainer, options, options.checkpointing)


if __name__ == "__main__":
    main()
