"""A tracker that fails."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from unsloth_ddp.training.shown.display import shown_callbacks


def test_a_tracker_that_fails_is_named_once_and_training_goes_on(capsys) -> None:
    class Broken(TrainerCallback):
        def on_log(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("no space\nleft")

    (tracker,) = shown_callbacks([Broken()], (Broken,))
    tracker.on_log(None, None, None, logs={})
    tracker.on_log(None, None, None, logs={})
    assert capsys.readouterr().out == "Broken failed, so the run stops reporting to it: no space left\n"
