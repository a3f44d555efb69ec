"""Unwrap a model from PEFT, and switch a model between evaluation and training for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def base_model(model: Any) -> Any:
    """Return the Transformers model inside PEFT's wrapper, or the model itself if it is not wrapped."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Turn dropout off inside the block, and restore the mode the model was in."""
    with _mode(model, training=False):
        yield


@contextmanager
def training_mode(model: Any) -> Iterator[None]:
    """Turn dropout on inside the block, and restore the mode the model was in."""
    with _mode(model, training=True):
        yield


@contextmanager
def _mode(model: Any, *, training: bool) -> Iterator[None]:
    was_training = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(was_training)
