"""Read the weights of an adapter into a model, and refuse keys that are missing or not used.

PEFT only warns of such keys, and the model then answers as its base.
"""

from pathlib import Path
from typing import Any

from unsloth_ddp.utils.errors import UserError, one_line


def load_weights(model: Any, folder: Path, base: str) -> None:
    """Read an adapter into a model with an adapter of the same form.

    Raises:
        UserError: naming a weight that the adapter lacks, or that the model does not have.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    try:
        read: Any = set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    except (MemoryError, AssertionError):
        raise
    except Exception as error:
        raise UserError(f"The adapter in {folder} cannot be loaded: {one_line(error)}.") from None
    if read.unexpected_keys:
        raise UserError(
            f"The adapter in {folder} holds {sorted(read.unexpected_keys)[0]}, which its base model {base} does not "
            "have; check whether the base model was replaced."
        )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad or ".lora_" in name}
    if absent := sorted(trained.intersection(read.missing_keys)):
        raise UserError(
            f"The adapter in {folder} lacks {len(absent)} of its {len(trained)} weights (the first: {absent[0]}); "
            "check whether its file was replaced or settings.yaml was edited."
        )
