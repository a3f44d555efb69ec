"""Keep record.json beside a run, and read a run back from its folder; neither needs torch.

record.json holds what the report needs and no other file has: when each part of the run began and ended and on what,
counts of the rows, and the compared answers. Losses and speeds come from trainer_state.json of
the result, or of the newest checkpoint of an unfinished run.
"""

import contextlib
import json
import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unsloth_ddp.checkpoints.manifest import is_whole, step_folders
from unsloth_ddp.run.documents.files import RECORD_FILE, SETTINGS_FILE, STATE_FILE, SUMMARY_FILE
from unsloth_ddp.utils.errors import UserError, os_reason
from unsloth_ddp.utils.files.json import write_json
from unsloth_ddp.utils.files.safe import read_regular
from unsloth_ddp.utils.files.yaml import read_mapping

FORMAT = 1
# Above any run's; a file of another kind is not read into memory.
LARGEST_BYTES = 1 << 28


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def begin_record(folder: Path, facts: dict[str, Any], part: dict[str, Any], *, continued: bool) -> None:
    """Write record.json for a run, or a part of it after a resume, that is about to train.

    Args:
        facts: what is known of model, rows and steps.
        part: how this part is run; its beginning is added.
        continued: keep the earlier parts that the folder holds.

    Raises:
        OSError: it cannot be written.
    """
    parts: list[Any] = []
    if continued:
        # One of a release without records, or damaged, begins with this part.
        with contextlib.suppress(UserError):
            parts = _list_of_dicts(_read_record(folder).get("parts"))
    write_json(folder / RECORD_FILE, {"format": FORMAT, **facts, "parts": [*parts, {"began": now(), **part}]})


def end_record(
    folder: Path, *, step: int, seconds: float, cause: str | None = None, answers: list[dict[str, Any]] | None = None
) -> None:
    """Record the end of the current part: its step, the cause if it was stopped, and the compared answers.

    Args:
        seconds: that its training took, evaluations and checkpoints included.

    Raises:
        OSError: it cannot be written.
        UserError: record.json is missing or damaged.
    """
    record = _read_record(folder)
    parts = _list_of_dicts(record.get("parts"))
    if parts:
        parts[-1] |= {"ended": now(), "seconds": round(seconds, 1), "last_step": step, "cause": cause}
    write_json(folder / RECORD_FILE, {**record, "parts": parts, "answers": answers or []})


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder describes it.

    Attributes:
        summary: of a finished run; empty for others.
        record: content of record.json; empty for a run of a release that wrote none.
        history: log entries, in the order of their steps.
        step: that the weights on disk have.
        max_steps: planned; None if that is not known.
    """

    folder: Path
    settings: dict[str, Any]
    summary: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0
    max_steps: int | None = None
    checkpoint: Path | None = None

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def parts(self) -> list[dict[str, Any]]:
        """The parts of the run, one for each start that reached the first step."""
        return _list_of_dicts(self.record.get("parts"))

    @property
    def state(self) -> str:
        """Return finished, stopped (in order, with a checkpoint) or unfinished (killed, failed, or still running)."""
        if self.summary:
            return "finished"
        return "stopped" if self.parts and self.parts[-1].get("cause") else "unfinished"

    @property
    def seconds(self) -> float | None:
        """Return the seconds that training took in all parts whose end is known; None if none is."""
        seconds = [part["seconds"] for part in self.parts if is_number(part.get("seconds"))]
        return sum(seconds) if seconds else self.summary.get("train_seconds")

    def series(self, name: str, *, gaps: bool = False) -> list[tuple[float, float]]:
        """Return step and value of every log entry that has a finite number of this name.

        Args:
            gaps: also return entries with infinity or no number (NaN), as NaN.
        """
        values = [(float(e["step"]), _value(e.get(name))) for e in self.history]
        return [(step, value) for step, value in values if value is not None and (gaps or is_number(value))]

    def last(self, name: str) -> float | None:
        """Return the last logged value of a name, which may be NaN; None if there is none."""
        points = self.series(name, gaps=True)
        return points[-1][1] if points else None

    @property
    def eval_loss(self) -> Any:
        """Return the evaluation loss of the result, or the last one logged; None if there is none."""
        loss = self.summary.get("eval_loss")
        return self.last("eval_loss") if loss is None else loss

    @property
    def tokens_per_second(self) -> Any:
        """Return the speed of the whole run, or the last one logged; None if it is not known."""
        speed = self.fact("tokens_per_second")
        return self.last("tokens_per_second") if speed is None else speed

    def fact(self, name: str) -> Any:
        """Return a value of the summary, or, of an unfinished run, of its newest part; None if it is not known."""
        if name in self.summary:
            return self.summary[name]
        return self.parts[-1].get(name) if self.parts else None


def is_number(value: Any) -> bool:
    """Return whether a value of a JSON file is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")


def is_run(folder: Path) -> bool:
    return (folder / SETTINGS_FILE).is_file()


def read_run(folder: Path) -> RunRecord:
    """Read a run from its folder.

    Raises:
        UserError: it is not a run's folder, or a file in it is unreadable or of another version of the kit.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name the folder of a run, such as outputs/RUN.")
    if not is_run(folder):
        raise UserError(
            f"{folder} is not a run of this kit: it holds no {SETTINGS_FILE}; name a folder such as outputs/RUN."
        )
    settings = read_mapping(folder / SETTINGS_FILE, str(folder / SETTINGS_FILE))
    if not isinstance(settings.get("model"), str):
        raise UserError(f"{folder / SETTINGS_FILE} holds no settings of a run; the file is damaged or of another tool.")
    summary = _read_json(folder / SUMMARY_FILE) if (folder / SUMMARY_FILE).is_file() else {}
    record = _read_record(folder) if (folder / RECORD_FILE).is_file() else {}
    # The result's state is the newest one; a run that was resumed after it finished has newer checkpoints.
    folders = step_folders(folder)
    checkpoint = next((folders[step] for step in sorted(folders, reverse=True) if is_whole(folders[step])), None)
    source = folder if summary else checkpoint
    state = _read_json(source / STATE_FILE) if source and (source / STATE_FILE).is_file() else {}
    history = [entry for entry in _list_of_dicts(state.get("log_history")) if is_number(entry.get("step"))]
    step, max_steps = (state.get(name) for name in ("global_step", "max_steps"))
    planned = record.get("steps") if max_steps is None else max_steps
    return RunRecord(
        folder,
        settings,
        summary,
        record,
        history,
        int(step or 0) if is_number(step) else 0,
        int(planned or 0) if is_number(planned) else None,
        checkpoint,
    )


def find_runs(outputs: Path) -> tuple[list[RunRecord], list[str]]:
    """Return the runs in a folder, the newest last, and a sentence for each that cannot be read.

    A folder that is itself a run is the only one.

    Raises:
        UserError: there is no such folder, or it holds no run.
    """
    if is_run(outputs):
        return [read_run(outputs)], []
    if not outputs.is_dir():
        raise UserError(f"{outputs} is not a folder; name the folder that holds the runs (--output_dir), or one run.")
    try:
        folders = [path for path in outputs.iterdir() if is_run(path)]
        folders.sort(key=lambda path: ((path / SETTINGS_FILE).stat().st_mtime, path.name))
    except OSError as error:
        raise UserError(f"{outputs} cannot be listed: {os_reason(error)}.") from None
    if not folders:
        raise UserError(f"{outputs} holds no run; name the folder that holds the runs (--output_dir), or one run.")
    runs, problems = [], []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except UserError as error:
            problems.append(str(error))
    return runs, problems


def _read_record(folder: Path) -> dict[str, Any]:
    record = _read_json(folder / RECORD_FILE)
    if record.get("format") != FORMAT:
        raise UserError(
            f"{folder / RECORD_FILE} is of format {str(record.get('format'))[:20]}, and this release of the kit reads "
            f"{FORMAT}; use the release that wrote the run."
        )
    return record


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path, LARGEST_BYTES))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {os_reason(error)}.") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path} is damaged: it is not JSON.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it holds no mapping.")
    return content


def _value(value: Any) -> float | None:
    """Return a logged number, NaN for one that is not finite, and None for what is not a number."""
    if is_number(value):
        return float(value)
    return math.nan if isinstance(value, float) else None


def _list_of_dicts(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
