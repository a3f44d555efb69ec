"""Start the launches of a check, each in processes of its own, and compare what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from unsloth_ddp.config.parse import Settings
from unsloth_ddp.data.revisions import dataset_revisions
from unsloth_ddp.data.sources import checked_files, read_rows
from unsloth_ddp.model.files import model_folder
from unsloth_ddp.parity.launches import Launch, command, settings_of, waves
from unsloth_ddp.parity.processes import Running
from unsloth_ddp.parity.verdicts import Outcome, Row, Tolerance, compare
from unsloth_ddp.utils.errors import UserError

# Enough to fill packs of chats; where rows are longer the last step is full as well.
ROWS_A_PACK = 8


@dataclass(frozen=True)
class Check:
    """What is to be checked: the user's settings and where and how to launch them."""

    settings: Settings
    launches: list[Launch]
    gpus: list[str]
    script: Path
    steps: int
    precision: str
    tolerance: Tolerance
    timeout: float


def run_check(check: Check, folder: Path) -> tuple[list[Row], Tolerance, list[str]]:
    """Launch everything and compare; returns the table's rows, the tolerance used and what failed launches said last.

    Where the reference fails the others are not tried. Weights are removed once they have been compared.
    """
    global_batch = check.launches[0].per_device * check.launches[0].accumulation
    # The last step is not full, as at the end of an epoch, and its rows do not divide evenly.
    wanted = (check.steps - 1) * global_batch + global_batch // 2 + 1
    unit = "packs" if check.settings.packing == "on" else "rows"
    if unit == "packs":
        wanted *= ROWS_A_PACK
    rows_file = folder / "rows.jsonl"
    found = write_rows(check.settings, wanted, rows_file)
    print(f"{found} rows, {check.steps} steps of {global_batch} {unit}; {len(check.launches)} launches.")

    running = Running()

    def run(launch: Launch, gpus: list[str]) -> Outcome:
        config = folder / f"{launch.name}.yaml"
        settings_of(launch, check.settings, check.steps, check.precision, rows_file, folder).save(config)
        return run_launch(launch, check.script, config, folder, gpus, check.timeout, running)

    rows: list[Row] = []
    errors: list[str] = []
    tolerance, reference, initial = check.tolerance, None, None
    with ThreadPoolExecutor(max_workers=max(1, len(check.gpus))) as pool, ended_with(running):
        for wave in waves(check.launches, check.gpus):
            for outcome in pool.map(run, *zip(*wave, strict=True)):
                launch = outcome.launch
                told = f"{launch.launcher}, {launch.processes} process(es), {launch.shape}"
                print(f"  {told}: {'FAILED' if outcome.error else 'done'}, {outcome.seconds:.0f} s", flush=True)
                if outcome.error:
                    errors.append(f"{told} {outcome.error}")
                if reference is None:
                    reference = outcome
                    # A Hub model is in the cache now, unless this launch failed.
                    initial = model_folder(check.settings) if check.settings.method == "full" else None
                if reference.error and outcome is not reference:
                    continue
                row, held_to = compare(reference, outcome, initial, check.tolerance)
                rows.append(row)
                tolerance = max(tolerance, held_to, key=lambda t: t.value)
                if outcome is not reference:
                    shutil.rmtree(outcome.folder, ignore_errors=True)
            if reference is not None and reference.error:
                break
    return rows, tolerance, errors


@contextlib.contextmanager
def ended_with(running: Running) -> Iterator[None]:
    """End all launches where the check is left by an exception, instead of waiting for them."""
    try:
        yield
    except BaseException:
        running.end_all()
        raise


def write_rows(settings: Settings, count: int, path: Path) -> int:
    """Copy the first `count` rows of the data; returns how many there are."""
    sources = checked_files(settings.dataset, streaming=settings.streaming)
    rows = chain.from_iterable(
        read_rows(
            source,
            settings.dataset_split,
            settings.dataset_config,
            dataset_revisions(settings).get(source),
            streaming=settings.streaming,
        )
        for source in sources
    )
    lines = [json.dumps(row.columns, default=str) for row in islice(rows, count)]
    if not lines:
        raise UserError(f"dataset {', '.join(settings.dataset)} holds no rows.")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def run_launch(
    launch: Launch, script: Path, config: Path, output: Path, gpus: list[str], timeout: float, running: Running
) -> Outcome:
    """Run one launch to its end, or end it after `timeout` seconds."""
    folder, log = output / launch.name, output / f"{launch.name}.log"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    # What a launch says that is killed would else be lost in its buffers.
    environ["PYTHONUNBUFFERED"] = "1"
    if gpus:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    began = time.perf_counter()
    code = running.run(command(launch, script, config, cpu=not gpus), environ, log, timeout)
    seconds = time.perf_counter() - began
    failure = "" if code == 0 else f"ended after {timeout:.0f} s" if code is None else f"exit code {code}"
    return outcome_of(launch, seconds, folder, failure, log.read_text(errors="replace"))


def outcome_of(launch: Launch, seconds: float, folder: Path, failure: str, log: str) -> Outcome:
    """What a launch that has ended came to; `failure` says in a few words how it failed, if it did."""
    if not failure and not (folder / "trainer_state.json").is_file():
        failure = "nothing was saved"
    if failure:
        said = last_lines(log) or "It had printed nothing."
        return Outcome(launch, seconds, folder, error=f"({failure})\n{said}")
    return Outcome(launch, seconds, folder, logged_losses(folder))


def last_lines(text: str, count: int = 20) -> str:
    """The end of a log, progress bars left out."""
    lines = [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]
    return "\n".join([line for line in lines if line][-count:])


def logged_losses(folder: Path) -> list[float]:
    """The loss of every step of a finished run."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]
