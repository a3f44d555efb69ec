"""Count the bytes that an optimizer keeps for each trained weight."""

OF_THE_WEIGHTS_TYPE = ("adamw_torch", "adamw_torch_fused", "adagrad", "rmsprop")
OF_BITSANDBYTES = (
    "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "ademamix_8bit", "paged_ademamix_8bit", "lion_8bit",
    "paged_lion_8bit", "rmsprop_bnb_8bit",
)  # fmt: skip


def optimizer_bytes(name: str, weight_bytes: int, embedding: bool = False) -> float:
    """Return the bytes of optimizer state for one weight; an unknown optimizer counts as Adam.

    torch's optimizers keep states in the weight's dtype. Those of bitsandbytes and torchao keep fp32 states, or
    quantized states with an fp32 scale for each 256, whatever the weight's dtype. For embeddings Transformers makes
    bitsandbytes keep fp32 states.

    Args:
        name: Transformers' name of the optimizer.
        weight_bytes: bytes of one weight.
        embedding: whether the weight belongs to an embedding.
    """
    if name == "sgd" or "adafactor" in name:
        return 0
    states = 3 if "ademamix" in name else 1 if any(word in name for word in ("lion", "adagrad", "rmsprop")) else 2
    packed = 1.0 if "8bit" in name else 0.5 if "4bit" in name else None
    if packed and not (embedding and name in OF_BITSANDBYTES):
        return states * (packed + 4 / 256)
    return states * (weight_bytes if name in OF_THE_WEIGHTS_TYPE else 4)
