"""Run the launches of a parity check, each in processes of its own, and compare their results."""

import dataclasses
import json
import os
import shutil
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.images.files import ImageFiles
from unsloth_ddp.data.images.values import image_value
from unsloth_ddp.data.sources.revisions import dataset_revisions
from unsloth_ddp.data.sources.rows import checked_files, is_file, training_rows
from unsloth_ddp.model.files.find import model_folder
from unsloth_ddp.parity.comparison import LaunchComparison, LaunchOutcome, Tolerance, compare_launch
from unsloth_ddp.parity.launches import Launch, launch_command, launch_settings
from unsloth_ddp.parity.processes import run_launcher
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.units import counted

# Enough to fill packs of chats; with longer rows the last step is full as well.
ROWS_A_PACK = 8


@dataclass(frozen=True)
class ParityCheck:
    """A check to run: the user's settings, the launches, and the GPUs to launch on."""

    settings: Settings
    launches: list[Launch]
    gpus: list[str]
    script: Path
    steps: int
    precision: str
    tolerance: Tolerance
    timeout: float


def run_launches(check: ParityCheck, folder: Path) -> tuple[list[LaunchComparison], Tolerance, list[str]]:
    """Run all launches and compare each with the first.

    If the reference fails, the others are not started. Weights are removed once they have been compared.

    Returns:
        the table's lines, the tolerance used, and the last output of failed launches.
    """
    global_batch = check.launches[0].per_device * check.launches[0].accumulation
    # The last step is not full, as at the end of an epoch, and its rows do not divide evenly.
    rows_needed = (check.steps - 1) * global_batch + global_batch // 2 + 1
    unit = "pack" if check.settings.packing == "on" else "row"
    if unit == "pack":
        rows_needed *= ROWS_A_PACK
    rows_file = folder / "rows.jsonl"
    rows_written = write_rows(check.settings, rows_needed, rows_file)
    settings = with_image_folders(check.settings)
    count = len(check.launches)
    print(
        f"{counted(count, 'launch')} of {counted(check.steps, 'step')} of {counted(global_batch, unit)}, from "
        f"{counted(rows_written, 'row')}:",
        flush=True,
    )

    rows: list[LaunchComparison] = []
    errors: list[str] = []
    tolerance, reference, initial = check.tolerance, None, None
    for launch in check.launches:
        config = folder / f"{launch.name}.yaml"
        launch_settings(launch, settings, check.steps, check.precision, rows_file, folder).save(config)
        outcome = run_launch(launch, check.script, config, folder, check.gpus[: launch.processes], check.timeout)
        name = launch.name_for_people
        print(f"  {name}: {'FAILED' if outcome.error else 'done'}, {outcome.seconds:.0f} s", flush=True)
        if outcome.error:
            errors.append(f"{name} failed {outcome.error}")
        if reference is None:
            reference = outcome
            # A Hub model is in the cache now, unless this launch failed.
            initial = model_folder(check.settings) if check.settings.method == "full" else None
        row, allowed = compare_launch(reference, outcome, initial, check.tolerance)
        rows.append(row)
        tolerance = max(tolerance, allowed, key=lambda t: t.value)
        if reference.error:
            break
        if outcome is not reference:
            shutil.rmtree(outcome.folder, ignore_errors=True)
    return rows, tolerance, errors


def write_rows(settings: Settings, count: int, path: Path) -> int:
    """Copy the first `count` rows of the data to a JSONL file; return how many there are."""
    rows = training_rows(settings, dataset_revisions(settings), streaming=settings.streaming)

    def as_text(value: Any) -> str:
        return image_value(value) if isinstance(value, bytes) else str(value)

    lines = [json.dumps(row.columns, default=as_text) for row in islice(rows, count)]
    if not lines:
        raise UserError(f"dataset {', '.join(settings.dataset)} holds no rows.")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def with_image_folders(settings: Settings) -> Settings:
    """Return settings that name the folders of the rows' images, since a copy of the rows lies elsewhere."""
    checked = checked_files(settings.dataset, streaming=settings.streaming)
    folders = ImageFiles.of(settings, [file for _, files in checked for file in files if is_file(file)]).folders
    return dataclasses.replace(settings, image_folder=[str(folder.absolute()) for folder in folders])


def run_launch(
    launch: Launch, script: Path, config: Path, output: Path, gpus: list[str], timeout: float
) -> LaunchOutcome:
    """Run one launch to its end, or kill it after `timeout` seconds."""
    folder, log = output / launch.name, output / f"{launch.name}.log"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    # Without this the output of a killed launch is lost in its buffers.
    environ["PYTHONUNBUFFERED"] = "1"
    if gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    began = time.perf_counter()
    code = run_launcher(launch_command(launch, script, config, cpu=not gpus), environ, log, timeout)
    seconds = time.perf_counter() - began
    failure = "" if code == 0 else f"killed after --timeout {timeout:.0f} s" if code is None else f"exit code {code}"
    return read_outcome(launch, seconds, folder, failure, log.read_text(errors="replace"))


def read_outcome(launch: Launch, seconds: float, folder: Path, failure: str, log: str) -> LaunchOutcome:
    """Return the outcome of a launch that has ended; `failure` says in a few words how it failed, "" if it did not."""
    if not failure and not (folder / "trainer_state.json").is_file():
        failure = "nothing was saved"
    if failure:
        output = last_lines(log) or "It printed nothing."
        return LaunchOutcome(launch, seconds, folder, error=f"({failure})\n{output}")
    return LaunchOutcome(launch, seconds, folder, read_losses(folder))


def last_lines(text: str) -> str:
    """Return the last 20 lines of a log without progress bars."""
    lines = [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]
    return "\n".join([line for line in lines if line][-20:])


def read_losses(folder: Path) -> list[float]:
    """Return the loss of every step of a finished run."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]
