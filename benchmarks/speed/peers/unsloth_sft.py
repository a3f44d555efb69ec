"""Train with Unsloth as its guide and notebooks show: adamw_8bit, its own gradient checkpointing, every step logged.

--packing sets SFTConfig(packing=True). --optim, --checkpointing and --logging_steps stand for tuning by hand.
"""

from __future__ import annotations

# Before everything else, so that it can replace parts of Transformers and TRL.
from unsloth import FastLanguageModel  # isort: skip

import sys
from pathlib import Path
from typing import Any

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks.speed.peers.measure import add_unsloth_options, make_parser, train

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> None:
    """Train, and write the measured speed."""
    options = add_unsloth_options(make_parser(__doc__)).parse_args()
    # Unsloth's SFTConfig turns checkpointing on again unless it is turned off there too.
    stored = {"gradient_checkpointing": False} if options.checkpointing == "none" else {}
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=options.model,
        max_seq_length=options.max_length,
        load_in_4bit=options.method == "qlora",
        full_finetuning=options.method == "full",
    )
    if options.method != "full":
        model = FastLanguageModel.get_peft_model(
            model,
            r=16,
            target_modules=LINEAR,
            lora_alpha=16,
            lora_dropout=0,
            bias="none",
            use_gradient_checkpointing=False if stored else "unsloth",
            random_state=3407,
        )

    def as_text(rows: dict[str, Any]) -> dict[str, Any]:
        return {"text": [tokenizer.apply_chat_template(chat, tokenize=False) for chat in rows["messages"]]}

    rows = load_dataset("json", data_files=options.rows, split="train")
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=rows.map(as_text, batched=True, remove_columns=rows.column_names),
        args=SFTConfig(
            output_dir="trained",
            dataset_text_field="text",
            max_length=options.max_length,
            packing=options.packing,
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
            **stored,
        ),
    )
    train(trainer, options, options.checkpointing)


if __name__ == "__main__":
    main()
