"""Collect what identifies a run: its manifest keeps it, and a resume compares it (see manifest.compare_runs)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.adapter.experts import full_shape
from unsloth_ddp.model.files.identity import model_identity


def run_identity(settings: Settings, runtime: Runtime) -> dict[str, Any]:
    """Return what identifies a run before its rows are known; every rank calls this."""
    identity = {name: getattr(settings, name) for name in manifest.GUARDED}
    identity |= {
        "model": _named(settings.model),
        "reference_model": _named(settings.reference_model),
        "gradient_checkpointing": settings.gradient_checkpointing,
        "attn_implementation": settings.attn_implementation,
        **runtime.layout(),
    }
    identity |= runtime.broadcast_from_main(lambda: model_identity(settings))
    if reference := settings.of_reference:
        of_reference = runtime.broadcast_from_main(lambda: model_identity(reference))
        identity |= {f"reference_{name}": value for name, value in of_reference.items()}
    return identity


def _named(model: str | None) -> str | None:
    """Return the full path of a folder, or the Hub id."""
    return str(Path(model).expanduser().resolve()) if model and Path(model).expanduser().exists() else model


def trained_identity(model: Any) -> dict[str, str]:
    """Return what identifies the trained weights of a model by their names and shapes, before any is sharded."""
    shapes = {name: full_shape(weight) for name, weight in model.named_parameters() if weight.requires_grad}
    digest = xxhash.xxh3_64(json.dumps(sorted(shapes.items())).encode()).hexdigest()
    return {"trained": f"{len(shapes)} tensors ({digest})"}


def batch_identity(plan: BatchPlan) -> dict[str, Any]:
    """Return what a step holds; with packing it is known only once the rows are."""
    return {
        "per_device_train_batch_size": plan.per_device,
        "gradient_accumulation_steps": plan.accumulation,
        "global_batch_size": plan.global_batch,
    }
