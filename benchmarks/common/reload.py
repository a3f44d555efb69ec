"""Load a finished run without Unsloth, in the precision it ran in, and print its evaluation loss.

python -m benchmarks.common.reload outputs/RUN
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from peft import PeftModel
from transformers import AutoConfig, AutoTokenizer


def hub_class(model: str) -> Any:
    """Return the class that a model's config.json names, as the Hub and vLLM take it."""
    return getattr(transformers, AutoConfig.from_pretrained(model).architectures[0])


def main(run: Path) -> None:
    """Print the token-mean loss over assistant tokens of the run's evaluation rows, in plain Transformers and PEFT."""
    settings = yaml.safe_load((run / "settings.yaml").read_text())
    tokenizer = AutoTokenizer.from_pretrained(run)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    precision = json.loads((run / "summary.json").read_text())["precision"]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    if (run / "adapter_config.json").is_file():
        quantization = None
        if settings["method"] == "qlora":
            from transformers import BitsAndBytesConfig

            quantization = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=dtype,
            )
        base = hub_class(settings["model"]).from_pretrained(
            settings["model"], dtype=dtype, device_map={"": device}, quantization_config=quantization
        )
        model = PeftModel.from_pretrained(base, run)
    else:
        model = hub_class(str(run)).from_pretrained(run, dtype=dtype, device_map={"": device})
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad(), torch.autocast(device, dtype=dtype, enabled=precision != "fp32"):
        for line in Path(settings["eval_dataset"][0]).read_text().splitlines():
            encoded = tokenizer.apply_chat_template(
                json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
            )
            ids = torch.tensor(encoded["input_ids"][: settings["max_length"]], device=device)
            mask = torch.tensor(encoded["assistant_masks"][: settings["max_length"]], device=device).bool()
            logits = model(ids[None]).logits[0, :-1].float()
            losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
            total, count = total + losses[mask[1:]].sum().item(), count + int(mask[1:].sum())
    print(json.dumps({"eval_loss": total / count}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
