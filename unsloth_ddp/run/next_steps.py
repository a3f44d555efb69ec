"""Write out the commands with which a run is resumed, repeated, talked to and served."""

import os
import shlex
from pathlib import Path
from typing import NamedTuple

from unsloth_ddp.config.parse import REPO
from unsloth_ddp.run.documents.files import SETTINGS_FILE
from unsloth_ddp.run.documents.record import RunRecord

LAUNCH = "Launch it as before: with the same configuration of accelerate, and on every node."


class NextStep(NamedTuple):
    """A command, what it is for, and what to know about it."""

    title: str
    command: str
    note: str = ""


def next_steps(run: RunRecord) -> list[NextStep]:
    """Return the commands that make sense for a run in its state, to be run in the kit's folder."""
    if run.state != "finished":
        return [_resume(run)]
    folder, quoted = shown_path(run.folder), shlex.quote(shown_path(run.folder))
    trust = " --trust_remote_code" if run.settings.get("trust_remote_code") else ""
    export = f"uv run python -m unsloth_ddp.export {quoted}{trust} --to"
    again = shlex.join(["--config", os.path.join(folder, SETTINGS_FILE), "--run_name", f"{run.name}-2"])
    return [
        NextStep("Chat with it", f"uv run python -m unsloth_ddp.chat {quoted}{trust}"),
        NextStep("Export it for llama.cpp", f"{export} gguf", "This needs a clone of llama.cpp (--llama_cpp)."),
        NextStep("Serve it with vLLM", f"{export} vllm", "It prints the command that serves the result."),
        NextStep("Repeat it under another name", f"train_ddp.py {again}", LAUNCH),
    ]


def chat_command(folder: Path, *, trust: bool) -> str:
    """Return the command that talks to a result, as it works in the working directory."""
    in_kit = Path.cwd().resolve() == REPO
    where = "" if in_kit else f"--directory {shlex.quote(str(REPO))} "
    path = shlex.quote(shown_path(folder) if in_kit else str(folder.resolve()))
    return f"uv run {where}python -m unsloth_ddp.chat {path}{' --trust_remote_code' * trust}"


def shown_path(path: Path) -> str:
    """Return a path relative to the working directory where it is below it."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _resume(run: RunRecord) -> NextStep:
    command = run.parts[-1].get("command") if run.parts else None
    if isinstance(command, list):
        words = [str(word) for word in command]
        if not any(word.replace("-", "_").startswith("__run_name") for word in words):
            words += ["--run_name", run.name]
    else:
        words = ["--config", os.path.join(shown_path(run.folder), "settings.yaml")]
    # Either would begin anew, or at another checkpoint.
    if run.settings.get("overwrite"):
        words.append("--no_overwrite")
    if run.settings.get("resume") not in (None, "auto"):
        words += ["--resume", "auto"]
    goes_on = f"goes on after step {run.step:,}" if run.checkpoint else "begins again, since no checkpoint was written"
    return NextStep("Resume it", f"train_ddp.py {shlex.join(words)}", f"It {goes_on}. {LAUNCH}")
