"""Compute model FLOPs utilization (MFU): the model's FLOP per second as a share of the GPU's peak.

The FLOP of a token are counted as in unsloth_ddp.plan: 2 n forward, 2 n for input gradients, and 2 for each trained
weight, where n is the number of weights that a token is multiplied with. Attention scores are not counted. Neither is
recomputation, which is work of the hardware and not of the model.
"""

import math
import re
from typing import Any

from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.adapter.experts import EXPERTS, full_shape, number_in
from unsloth_ddp.model.modules import embedding_ids

# FLOP a second of dense 16-bit matrix products with 32-bit sums, by words of the name that torch gives. NVIDIA's tables
# print the figure "with sparsity" alone, which is twice the dense one, or both ("dense | sparse").
PEAK_FLOPS = {
    # HGX B200 (https://www.nvidia.com/en-us/data-center/hgx/): 4.5 PFLOPS a GPU with sparsity.
    ("B200",): 2250e12,
    # https://www.nvidia.com/en-us/data-center/h200/: 1,979 (SXM) and 1,671 (NVL) TFLOPS with sparsity.
    ("H200",): 989e12,
    ("H200", "NVL"): 835e12,
    # https://www.nvidia.com/en-us/data-center/h100/: 1,979 (SXM) and 1,671 (NVL) TFLOPS with sparsity; data sheet of
    # 2022: 1,513 (PCIe).
    ("H100",): 989e12,
    ("H100", "NVL"): 835e12,
    ("H100", "PCIe"): 756e12,
    # https://www.nvidia.com/en-us/data-center/a100/: 312 | 624 TFLOPS, SXM and PCIe alike.
    ("A100",): 312e12,
    # Data sheets of the A40 (149.7 | 299.4 TFLOPS), A10 (125 | 250), L40S (362.05 | 733), L4 (242, sparse), T4 (65).
    ("A40",): 149.7e12,
    ("A10",): 125e12,
    ("L40S",): 362.05e12,
    ("L4",): 121e12,
    ("T4",): 65e12,
    # "NVIDIA RTX Blackwell GPU Architecture", rows of tensor FLOPS with FP32 accumulate: 209.5 | 419, 165.2 | 330.4 and
    # 71.2 | 142.4 TFLOPS. With FP16 sums, which training does not use, they are twice as fast.
    ("RTX", "5090"): 209.5e12,
    ("RTX", "4090"): 165.2e12,
    ("RTX", "3090"): 71.2e12,
}
# Other products with these words have other rates.
OTHER_PRODUCTS = {"MIG", "Laptop", "D", "Ti"}


class Utilization:
    """Turn the tokens per second of all GPUs into MFU, where the GPU's peak and the model's work are known."""

    def __init__(self, model: Any, runtime: Runtime) -> None:
        self._processes = runtime.ranks.world_size
        self._peak = peak_flops(runtime.device_name, runtime.precision)
        self._work = flops_a_token(model) if self._peak is not None else None

    def metrics(self, tokens_per_second: float) -> dict[str, float]:
        """Return {"mfu": share}, or nothing where it is not known."""
        if self._peak is None or self._work is None:
            return {}
        return {"mfu": tokens_per_second / self._processes * self._work / self._peak}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP a second of a GPU in 16 bit; None for another precision or a GPU that is not listed."""
    words = set(re.split(r"[\s-]+", device_name))
    listed = [name for name in PEAK_FLOPS if words.issuperset(name)]
    if precision == "fp32" or not listed or words & OTHER_PRODUCTS:
        return None
    return PEAK_FLOPS[max(listed, key=len)]


def flops_a_token(model: Any) -> float | None:
    """Return the model FLOP of a token; None for models of which a token uses only a part (experts, images)."""
    config = model.config.get_text_config()
    if number_in(config, EXPERTS) or getattr(model.config, "vision_config", None) is not None:
        return None
    head, embeddings = model.get_output_embeddings(), embedding_ids(model)
    if head is not None:
        # Tokens are multiplied with a tied embedding too, as the output head.
        embeddings -= {id(parameter) for parameter in head.parameters(recurse=False)}
    used = trained = 0
    for parameter in model.parameters():
        shape = full_shape(parameter)
        if len(shape) < 2 or id(parameter) in embeddings:
            continue
        used += math.prod(shape)
        trained += math.prod(shape) if parameter.requires_grad else 0
    return 4.0 * used + 2.0 * trained
