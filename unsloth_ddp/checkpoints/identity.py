"""Collect what identifies a run: its manifest keeps it, and a resume compares it (see manifest.compare_runs)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.batch_plan import BatchPlan
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.identity import model_identity


def run_identity(settings: Settings, runtime: Runtime) -> dict[str, Any]:
    """Return what identifies a run before its rows are known; every rank calls this."""
    identity = {name: getattr(settings, name) for name in manifest.GUARDED}
    model = Path(str(settings.model)).expanduser()
    identity |= {
        "model": str(model.resolve()) if model.exists() else settings.model,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "attn_implementation": settings.attn_implementation,
        "world_size": runtime.ranks.world_size,
        "device": runtime.device_name,
        "nodes": runtime.ranks.nodes,
        "sharding": runtime.sharding,
        "offload": runtime.offload,
        "backend": runtime.backend,
        "precision": runtime.precision,
    }
    return identity | runtime.broadcast_from_main(lambda: model_identity(settings))


def batch_identity(plan: BatchPlan) -> dict[str, Any]:
    """Return what a step holds; with packing it is known only once the rows are."""
    return {
        "per_device_train_batch_size": plan.per_device,
        "gradient_accumulation_steps": plan.accumulation,
        "global_batch_size": plan.global_batch,
    }
