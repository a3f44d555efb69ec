"""Act between steps: save totals, report progress, compare weights, stop all ranks together."""

import sys
import time
from typing import Any, Literal

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy

from unsloth_ddp.distributed.drift import DriftCheck
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.signals import StopRequest
from unsloth_ddp.distributed.watch.progress import Progress
from unsloth_ddp.training.broken_weights import own_part
from unsloth_ddp.training.shown.meter import Totals
from unsloth_ddp.utils.units import counted


class SavedTotals(TrainerCallback, ExportableState):
    """Keep the run's totals in every checkpoint, so that they continue when it is resumed.

    `pending` holds the sums of each rank since the last log line, which the totals do not include yet; `stream` holds
    the position in streamed rows (stream_order.StreamPosition).
    """

    def __init__(
        self,
        totals: dict[str, float] | None = None,
        pending: list[list[float]] | None = None,
        stream: dict[str, Any] | None = None,
    ) -> None:
        self.totals = Totals(dict(totals or {}))
        self.pending = pending
        self.stream = stream

    def state(self) -> dict[str, Any]:
        """Return the state that Transformers writes to trainer_state.json and passes to __init__ on a resume."""
        saved = {"totals": dict(self.totals.sums), "pending": self.pending, "stream": self.stream}
        return {"args": saved, "attributes": {}}


# Steps in which shapes are compiled for.
WARM_UP_STEPS = 5
# Steps between two log lines; of them the first is taken that gives a run LEAST_LINES lines.
LOG_INTERVALS, LEAST_LINES = (10, 5, 2, 1), 10


def log_interval(steps: int) -> int:
    """Return the steps between two log lines of a run of `steps` steps."""
    return next((interval for interval in LOG_INTERVALS if steps >= LEAST_LINES * interval), LOG_INTERVALS[-1])


class LogSteps(TrainerCallback):
    """Log the last step of every run, and with `logging_steps` auto a short run more often."""

    def __init__(self, logging_steps: int | Literal["auto"]) -> None:
        self.logging_steps = logging_steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the steps between two log lines."""
        if self.logging_steps == "auto":
            state.logging_steps = log_interval(state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the last step, which upstream does only if the interval divides it."""
        if args.logging_strategy == IntervalStrategy.STEPS and state.global_step >= state.max_steps:
            control.should_log = True


class ReportProgress(TrainerCallback):
    """Report this process's progress to the watchdog."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.begin_step(state.global_step + 1)

    def _move(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.advance()

    on_substep_end = on_prediction_step = _move

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.end_step()


class CountCompilations(TrainerCallback):
    """Count the functions that torch.compile compiles after the first steps, for shapes that it had not seen.

    `after_warm_up` is their number, None before the first steps are over.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.compiled_at_warm_up: int | None = None

    @property
    def after_warm_up(self) -> int | None:
        """Return the number of functions compiled since the first steps."""
        return None if self.compiled_at_warm_up is None else compiled_functions() - self.compiled_at_warm_up

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        if self.steps == WARM_UP_STEPS:
            self.compiled_at_warm_up = compiled_functions()


def compiled_functions() -> int:
    """Return how many functions torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


class CountOverflows(TrainerCallback):
    """Count the steps that the gradient scaler skips because of an fp16 overflow, and print their number at the end.

    Args:
        accelerator: the trainer's, which knows whether the last optimizer step was skipped.
        speaks: whether this process prints.
    """

    def __init__(self, accelerator: Any, *, speaks: bool) -> None:
        self.accelerator = accelerator
        self.speaks = speaks
        self.left_out = self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        self.left_out += self.accelerator.optimizer_step_was_skipped

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print the number of skipped steps, if any."""
        if self.left_out and self.speaks:
            print(
                f"The gradients of {self.left_out} of {counted(self.steps, 'step')} overflowed in fp16 and changed no "
                "weight. A few at the beginning are normal, until the loss scale is found; if there are more, lower "
                "--learning_rate, or use --precision fp32.",
                flush=True,
            )


class CompareWeights(TrainerCallback):
    """End the run if the ranks' weights have drifted apart (see drift.py)."""

    def __init__(self, drift: DriftCheck) -> None:
        self.drift = drift
        if drift.skipped and drift.runtime.ranks.is_main:
            print(
                f"drift_check_steps is ignored: with {drift.skipped} each rank holds a different part of the weights."
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare the weights after the step if a comparison is due."""
        if self.drift.due(state.global_step):
            self.drift.check(state.global_step)


class NameUntrained(TrainerCallback):
    """Print once, after the first steps, which adapters have not changed on any rank: their B is still zero.

    Args:
        model: in PEFT's wrapper or not.
    """

    # Warm-up may begin with a learning rate of 0.
    AFTER_STEPS = 5

    def __init__(self, model: Any, runtime: Runtime) -> None:
        self.model = model
        self.runtime = runtime

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at the adapters, once."""
        if state.global_step != min(self.AFTER_STEPS, state.max_steps):
            return
        second = {name: weight for name, weight in self.model.named_parameters() if ".lora_B." in name}
        mine = [own_part(weight, self.runtime.ranks.rank) for weight in second.values()]
        changed = torch.stack([part.any().to(mine[0].device) for part in mine]).tolist() if mine else []
        unchanged = [name for name, has_changed in zip(second, changed, strict=True) if not has_changed]
        zero = sorted(set.intersection(*map(set, self.runtime.gather(unchanged))))
        if zero and len(zero) < len(second) and self.runtime.ranks.is_main:
            first = zero[0].partition(".lora_B.")[0].removeprefix("base_model.model.")
            print(
                f"{counted(len(zero), 'adapter')} of {len(second)} did not change in the first "
                f"{counted(state.global_step, 'step')} (the first: {first}), because the rows do not reach the layer; "
                "name other layers in --lora_target_modules.",
                flush=True,
            )


class StopTogether(TrainerCallback):
    """End training on all ranks at the same step, with a checkpoint, when one of them received a stop request.

    With `save_seconds` it also saves one after that time, by the clock of the main process.

    It runs after Transformers' own flow control and overrides its decisions for this step. An evaluation that is due is
    skipped, and one that is running is interrupted, because a scheduler does not wait that long; the resumed run does
    it first.
    """

    def __init__(self, stop: StopRequest, save_seconds: int | None = None) -> None:
        self.stop = stop
        self.save_seconds = save_seconds
        self.saved_at = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the seconds from here."""
        self.saved_at = time.monotonic()
        if self.save_seconds is not None and state.is_world_process_zero:
            self.stop.save_is_due = self._save_is_due

    def _save_is_due(self) -> bool:
        return self.save_seconds is not None and time.monotonic() - self.saved_at >= self.save_seconds

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved_at = time.monotonic()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop.start_poll()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stop.finish_poll() and state.global_step < state.max_steps:
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False
        control.should_save = control.should_save or self.stop.save_agreed

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop.interrupt_evaluation()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop after this evaluation if a stop request arrived during its last batch."""
        if self.stop.finish_poll() and state.global_step < state.max_steps:
            control.should_training_stop = control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stop.agreed_cause and state.global_step < state.max_steps:
            control.should_evaluate = control.should_save = control.should_log = False
