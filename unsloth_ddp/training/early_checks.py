"""Check the training arguments without rows, model or GPU, as preflight and plan do before a run is started."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime

# Transformers accepts these only on a GPU, and this check runs on the CPU.
GPU_ONLY = ("tf32",)


def check_training_arguments(settings: Settings) -> None:
    """Build TRL's config, the optimizer and the schedule of a run on the CPU, with a model of one parameter.

    Call it in a process that no launcher has started, since TRL's config would join a process group.

    Raises:
        UserError: as in a run, for an unknown optimizer, schedule or trainer_args that the libraries refuse.
    """
    from unsloth_ddp.training.sft_config import make_config

    runtime = Runtime(Ranks(), backend="transformers", device_type="cpu", precision="fp32", device_name="CPU")
    anywhere = {name: value for name, value in settings.trainer_args.items() if name not in GPU_ONLY}
    on_cpu = dataclasses.replace(settings, trainer_args=anywhere, use_cpu=True, precision="fp32")
    make_config(on_cpu, runtime, BatchPlan(1, 1, 1), Path(settings.output_dir) / "preflight")
