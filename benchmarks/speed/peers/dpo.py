"""Train DPO with TRL's or Unsloth's DPOTrainer, with the settings of their documentation, or tuned by hand.

TRL: the defaults of DPOConfig with a LoraConfig. Unsloth: its DPO notebook (PatchDPOTrainer, adamw_8bit, its own
gradient checkpointing). --checkpointing none, --optim, --logging_steps and --batch stand for tuning by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if "unsloth" in sys.argv:
    # Before everything else, so that it can replace parts of Transformers and TRL.
    from unsloth import FastLanguageModel, PatchDPOTrainer  # isort: skip

    PatchDPOTrainer()

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from benchmarks.speed.peers.measure import make_parser, train

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def unsloth_model(options: Any) -> tuple[Any, Any]:
    """Return Unsloth's model with an adapter, and its tokenizer."""
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=options.model, max_seq_length=options.max_length, load_in_4bit=False
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        target_modules=LINEAR,
        lora_alpha=16,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing=False if options.checkpointing == "none" else "unsloth",
        random_state=3407,
    )
    return model, tokenizer


def main() -> None:
    """Train, and write the measured speed."""
    parser = make_parser(__doc__)
    parser.add_argument("--peer", choices=["trl", "unsloth"], required=True)
    parser.add_argument("--optim", default=None)
    parser.add_argument("--checkpointing", choices=["default", "none"], default="default")
    parser.add_argument("--logging_steps", type=int, default=None)
    args = parser.parse_args()
    cpu = not torch.cuda.is_available()
    options: dict[str, Any] = {"optim": args.optim, "logging_steps": args.logging_steps}
    options["gradient_checkpointing"] = False if args.checkpointing == "none" else None
    if args.peer == "unsloth":
        model, tokenizer = unsloth_model(args)
        extra: dict[str, Any] = {"model": model, "ref_model": None, "processing_class": tokenizer}
        defaults = {"optim": "adamw_8bit", "logging_steps": 1, "learning_rate": 5e-6, "lr_scheduler_type": "linear"}
        options = defaults | {name: value for name, value in options.items() if value is not None}
    else:
        adapter = LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        extra = {"model": args.model, "peft_config": adapter}
        options["model_init_kwargs"] = {} if cpu else {"dtype": "bfloat16"}
    trainer = DPOTrainer(
        args=DPOConfig(
            output_dir="trained",
            per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=args.accumulation,
            max_length=args.max_length,
            beta=0.1,
            max_steps=10_000,
            save_strategy="no",
            report_to="none",
            **({"use_cpu": True, "bf16": False} if cpu else {}),
            **{name: value for name, value in options.items() if value is not None},
        ),
        train_dataset=load_dataset("json", data_files=args.rows, split="train"),
        **extra,
    )
    train(trainer, args, args.checkpointing)


if __name__ == "__main__":
    main()
