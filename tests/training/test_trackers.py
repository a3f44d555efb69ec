"""TensorBoard's groups and table, and a tracker that fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from unsloth_ddp.config.options import OPTIONS, Settings
from unsloth_ddp.training.trackers import grouped_name, protect_trackers, settings_table


def test_names_stand_in_four_groups() -> None:
    found = {
        name: grouped_name(name)
        for name in ("loss", "epoch", "eval_loss", "tokens_per_second", "mfu", "peak_memory_bytes", "rank_step_seconds")
    }
    assert found == {
        "loss": "train/loss",
        "epoch": "train/epoch",
        "eval_loss": "eval/loss",
        "tokens_per_second": "speed/tokens_per_second",
        "mfu": "speed/mfu",
        "peak_memory_bytes": "speed/peak_memory_bytes",
        "rank_step_seconds": "ranks/step_seconds",
    }


def test_the_table_holds_every_option_and_marks_what_was_set(monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret-of-mine")
    settings = Settings(model="a|b", dataset=["one.jsonl", "a-secret-of-mine"], learning_rate=1e-3)
    rows = settings_table(settings).splitlines()
    assert len(rows) == len(OPTIONS) + 2
    assert "| Model | model | **a\\|b** |" in rows
    assert "| Data | dataset | **one.jsonl [hidden]** |" in rows
    assert "| Training | learning_rate | **0.001** |" in rows
    assert "| Training | max_grad_norm | 1.0 |" in rows


def test_events_hold_the_table_and_the_grouped_numbers(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    (tracker,) = protect_trackers([TensorBoardCallback()], (TensorBoardCallback,), Settings(model="m"))
    args: Any = SimpleNamespace(to_json_string=lambda: "{}", output_dir=str(tmp_path))
    state = SimpleNamespace(is_world_process_zero=True, is_hyper_param_search=False, global_step=0)
    tracker.on_train_begin(args, state, None)
    state.global_step = 7
    tracker.on_log(args, state, None, logs={"loss": 2.5, "rank_loss_spread": 0.5})
    tracker.on_train_end(args, state, None)
    # The last evaluation comes after the end of training where the best model is loaded.
    tracker.on_log(args, state, None, logs={"eval_loss": 1.5})
    events = EventAccumulator(str(tmp_path)).Reload()
    numbers = {tag: (e.step, e.value) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}
    assert numbers == {"train/loss": (7, 2.5), "ranks/loss_spread": (7, 0.5), "eval/loss": (7, 1.5)}
    table = events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| Model | model | **m** |" in table


def test_a_tracker_that_fails_is_named_once_and_training_goes_on(capsys) -> None:
    class Broken(TrainerCallback):
        def on_log(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("no space\nleft")

    (tracker,) = protect_trackers([Broken()], (Broken,), Settings())
    tracker.on_log(None, None, None, logs={})
    tracker.on_log(None, None, None, logs={})
    assert capsys.readouterr().out == "Broken failed, so the run stops reporting to it: no space left\n"
