"""Release the weights that ZeRO-3 gathered for a block's backward pass before the next block is recomputed."""

import logging
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

logger = logging.getLogger("unsloth_ddp")


def release_after_each_block(engine: Any) -> None:
    """Make DeepSpeed release a block's frozen weights when the recomputation of the next block begins.

    DeepSpeed assigns recomputed frozen weights to the module whose backward pass began last, and releases them when
    that pass ends. It does not detect the end if no positional input of the module needs gradients. This is the case
    for the whole model, whose inputs are token ids, and for attention, whose inputs Transformers passes by name. So the
    weights of all blocks stay gathered until the whole backward pass ends. This function calls the method that
    DeepSpeed calls at that end.

    Use it only with reentrant checkpointing, which recomputes a block before the backward pass of any module in it
    begins, so that no weight that is still needed is released.

    Args:
        engine: what deepspeed.initialize returned for ZeRO-3.
    """
    # Another version of DeepSpeed may not have it; the run takes more memory then.
    release_all = getattr(engine.optimizer.parameter_offload, "release_backward_leftovers", None)
    if release_all is None:
        logger.warning("this DeepSpeed cannot release the weights of single blocks in the backward pass")
        return

    def release(*_: Any) -> None:
        # The id is -1 outside of backward passes.
        if torch._C._current_graph_task_id() != -1:
            release_all()

    for module in engine.module.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.register_forward_pre_hook(release, prepend=True)
