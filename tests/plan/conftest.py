"""The shapes of the demo's model and of the models that were measured on GPUs."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from benchmarks.common.models import make_config
from benchmarks.correctness.gpu_check import make_rows
from tests.conftest import REPO
from unsloth_ddp.config.options import Settings
from unsloth_ddp.plan.__main__ import tokenize_rows
from unsloth_ddp.sizing.count import read_model_shape
from unsloth_ddp.sizing.shape import ModelShape

# Small round numbers, to compute with by hand.
SHAPE = ModelShape(
    parameters=1000, linear=800, largest_linear=50, head=100, vocabulary=10, adapter=40, layers=4, layer_input=20.0,
    layer_kept=300.0, outside_kept=8.0,
)  # fmt: skip


@pytest.fixture(scope="session")
def measured_job(tmp_path_factory):
    """The shapes of the models in gpu_check_large.json by name, made without weights, and the rows of those runs."""
    folder = tmp_path_factory.mktemp("large")
    make_rows(folder / "train.jsonl", 400, seed=0)
    for name in ("qwen3_8b", "qwen3_1.7b"):
        make_config(name).save_pretrained(folder / name)
        for path in (REPO / "demo" / "model").glob("*[tr]*"):
            if path.name.startswith(("tokenizer", "chat")):
                shutil.copy(path, folder / name)
    given = Settings(dataset=[str(folder / "train.jsonl")], max_length=1024)
    jobs = {name: dataclasses.replace(given, model=str(folder / name)) for name in ("qwen3_8b", "qwen3_1.7b")}
    return {name: read_model_shape(job) for name, job in jobs.items()}, tokenize_rows(jobs["qwen3_8b"])


@pytest.fixture(scope="session")
def demo_shape() -> ModelShape:
    """The shape of the demo's model."""
    return read_model_shape(Settings(model=str(REPO / "demo" / "model")))
