"""Decide the precision that a run computes in, from the options and the GPU."""

from typing import Literal

from unsloth_ddp.utils.errors import UserError

Precision = Literal["bf16", "fp16", "fp32"]
# Compute capability of the first GPUs with bf16 and with flash attention (Ampere). A T4 has 7.5, a V100 7.0.
AMPERE = (8, 0)


def has_bf16(capability: tuple[int, int]) -> bool:
    """Return whether NVIDIA GPUs of this compute capability multiply bf16 in hardware."""
    return capability >= AMPERE


def choose_precision(option: str, gpu: str | None, bf16: bool) -> Precision:
    """Return the precision of a run; auto is bf16 or fp16 on a GPU, whichever it has, and fp32 on a CPU.

    Args:
        option: --precision.
        gpu: the name of the GPU; None for a run on the CPU.
        bf16: the GPU has bf16.

    Raises:
        UserError: the device does not have what is wanted.
    """
    if option == "bf16" and gpu is not None and not bf16:
        raise UserError(f"precision bf16 is not supported by {gpu}; use --precision fp16.")
    if option == "fp16" and gpu is None:
        raise UserError("precision fp16 needs a GPU; use --precision fp32 or bf16 on a CPU.")
    if option == "auto":
        return "fp32" if gpu is None else "bf16" if bf16 else "fp16"
    return "bf16" if option == "bf16" else "fp16" if option == "fp16" else "fp32"


def check_full_weights(method: str, full_weights: str, precision: str) -> None:
    """Refuse weights in 16 bit that are trained in fp16: gradients of fp16 need a scaler, which takes fp32 weights."""
    if method == "full" and full_weights == "bf16" and precision == "fp16":
        raise UserError(
            "full_weights bf16 needs precision bf16, and this run computes in fp16, which trains fp32 weights only; "
            "use --full_weights fp32, or --method lora if that does not fit."
        )
