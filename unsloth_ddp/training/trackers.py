"""Keep a tracker that fails from ending the training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class BestEffort:
    """A tracker (TensorBoard and the like) whose failure does not end the training.

    Args:
        tracker: the callback that Transformers made for it; it gets every event until one fails.
    """

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        handler = getattr(self.tracker, name)
        return functools.partial(self._hand_on, handler) if name.startswith("on_") else handler

    def _hand_on(self, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.failed:
            return None
        try:
            return handler(*args, **kwargs)
        except Exception as error:
            self.failed = True
            name = type(self.tracker).__name__.removesuffix("Callback")
            print(f"{name} failed and gets no more reports: {' '.join(str(error).split())}", flush=True)
            return None
