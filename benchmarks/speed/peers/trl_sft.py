"""Train with TRL's SFTTrainer and PEFT, with default settings but for what the benchmark fixes for all contestants.

--packing packs rows as TRL documents it. TRL recommends a FlashAttention package for packed rows. Without one,
Transformers reads the borders of rows from their positions and gives sdpa a (tokens x tokens) mask for each
micro-batch, which keeps rows apart and computes the scores between them too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks.speed.peers.measure import make_parser, train


def main() -> None:
    """Train, and write the measured speed."""
    options = make_parser(__doc__).parse_args()
    cpu = not torch.cuda.is_available()
    # All parameters are trained in fp32 under autocast, TRL's default; frozen weights are kept in bf16 as usual.
    model_init = {} if options.method == "full" or cpu else {"dtype": "bfloat16"}
    extra: dict[str, Any] = {}
    if options.method != "full":
        extra["peft_config"] = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    if options.method == "qlora":
        extra["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    trainer = SFTTrainer(
        model=options.model,
        args=SFTConfig(
            output_dir="trained",
            model_init_kwargs=model_init,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulation,
            max_length=options.max_length,
            packing=options.packing,
            max_steps=10_000,
            save_strategy="no",
            report_to="none",
            **({"use_cpu": True, "bf16": False} if cpu else {}),
        ),
        train_dataset=load_dataset("json", data_files=options.rows, split="train"),
        **extra,
    )
    train(trainer, options, "torch" if trainer.args.gradient_checkpointing else "none")


if __name__ == "__main__":
    main()
