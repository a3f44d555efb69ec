"""A stand-in for Unsloth where there is no GPU: its loader's interface over Transformers and PEFT.

Only for tests of converted notebooks. It takes Unsloth's arguments and ignores what only a GPU or Unsloth's kernels
could honour (device_map, quantization, gradient checkpointing), so a run shows that the script's processes train
together as the notebook's one process does, and nothing about Unsloth itself.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def is_bfloat16_supported() -> bool:
    """No GPU, no bfloat16."""
    return False


class FastLanguageModel:
    """What the example notebooks use of Unsloth's class of this name."""

    @staticmethod
    def from_pretrained(model_name: str, max_seq_length: int = 2048, **unused: Any) -> tuple[Any, Any]:
        """The model in float32 on the CPU, and its tokenizer."""
        model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(model_name, model_max_length=max_seq_length)

    @staticmethod
    def get_peft_model(
        model: Any,
        r: int = 16,
        target_modules: Any = None,
        lora_alpha: int = 16,
        lora_dropout: float = 0.0,
        random_state: int = 3407,
        **unused: Any,
    ) -> Any:
        """The model with LoRA adapters, the same for the same random_state."""
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(random_state)
        config = LoraConfig(
            r=r, target_modules=target_modules, lora_alpha=lora_alpha, lora_dropout=lora_dropout, task_type="CAUSAL_LM"
        )
        return get_peft_model(model, config)

    @staticmethod
    def for_inference(model: Any) -> Any:
        """Evaluation mode."""
        return model.eval()

    @staticmethod
    def for_training(model: Any) -> Any:
        """Training mode."""
        return model.train()
