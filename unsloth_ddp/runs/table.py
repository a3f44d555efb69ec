"""Describe runs in one line each."""

import fcntl
import os
from pathlib import Path
from typing import Any

from unsloth_ddp.run.documents.files import LOCK_FILE
from unsloth_ddp.run.documents.record import RunRecord, is_number
from unsloth_ddp.utils.redaction import hide, printable
from unsloth_ddp.utils.tables import Column, render_table
from unsloth_ddp.utils.units import shown_seconds

STYLES = {"finished": "green", "running": "cyan", "stopped": "yellow", "unfinished": "red"}


def describe_run(run: RunRecord) -> dict[str, Any]:
    """Return a run in plain values; what is not known is None.

    Loss and evaluation are the last ones logged ("nan" if not finite), seconds those of all parts of the run.
    """
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": "running" if not run.summary and is_locked(run.folder) else run.state,
        "step": run.step,
        "max_steps": run.max_steps,
        "loss": _loss(run.last("loss")),
        "eval_loss": _loss(run.eval_loss),
        "tokens_per_second": run.tokens_per_second,
        "processes": run.fact("world_size"),
        "device": run.fact("device"),
        "seconds": run.seconds,
        "model": run.settings.get("model"),
        "method": run.settings.get("method"),
    }


def render_runs(described: list[dict[str, Any]]) -> str:
    columns: list[Column | str] = [
        "run", Column("state", styles=STYLES), Column("steps", "right"), Column("loss", "right"),
        Column("eval", "right"), Column("tokens/s", "right", optional=True), Column("on", optional=True),
        Column("time", "right"),
    ]  # fmt: skip
    devices = [printable(str(run["device"])).removeprefix("NVIDIA ").removeprefix("GeForce ") for run in described]
    rows = [
        [
            hide(printable(run["name"])),
            run["state"],
            f"{run['step']:,}" + (f"/{run['max_steps']:,}" if run["max_steps"] else ""),
            _number(run["loss"], ".4f"),
            _number(run["eval_loss"], ".4f"),
            _number(run["tokens_per_second"], ",.0f"),
            f"{run['processes']} x {device}" if run["processes"] else "",
            shown_seconds(run["seconds"]) if is_number(run["seconds"]) else "",
        ]
        for run, device in zip(described, devices, strict=True)
    ]
    return render_table(columns, rows)


def is_locked(folder: Path) -> bool:
    """Return whether a process of this machine, or of one that shares its locks, writes the run now."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # A shared lock, which only the writer's exclusive one refuses; closing the file gives it up.
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _loss(value: Any) -> Any:
    """Return a loss as JSON can hold it, which knows no NaN."""
    return "nan" if isinstance(value, float) and not is_number(value) else value


def _number(value: Any, form: str) -> str:
    return format(value, form) if is_number(value) else "nan" if value == "nan" else ""
