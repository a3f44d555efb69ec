"""Write out the commands with which a run is resumed, repeated, talked to and served."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from unsloth_ddp.config.parse import REPO
from unsloth_ddp.run.record import RunRecord


@dataclass(frozen=True)
class NextStep:
    """A command, what it is for, and what to know about it."""

    title: str
    command: str
    note: str = ""


def next_steps(run: RunRecord) -> list[NextStep]:
    """Return the commands that make sense for a run in its state, to be run in the kit's folder."""
    folder = shown_path(run.folder)
    steps = []
    if run.state != "finished":
        steps.append(_resume(run))
    if run.state == "finished":
        where = shlex.quote(folder)
        again = (
            f"--config {shlex.quote(os.path.join(folder, 'settings.yaml'))} --run_name {shlex.quote(run.name + '-2')}"
        )
        trust = " --trust_remote_code" if run.settings.get("trust_remote_code") else ""
        steps += [
            NextStep("Chat with it", f"uv run python -m unsloth_ddp.chat {where}{trust}"),
            NextStep(
                "Export it for llama.cpp",
                f"uv run python -m unsloth_ddp.export {where} --to gguf{trust}",
                "This needs a clone of llama.cpp; name its folder with --llama_cpp or in the variable LLAMA_CPP.",
            ),
            _serve(run, folder),
            NextStep("Repeat it under another name", f"{_launcher(run)} {again}", _on_every_node(run)),
        ]
    steps.append(
        NextStep(
            "Compare it with other runs",
            f"uv run python -m unsloth_ddp.runs {shlex.quote(shown_path(run.folder.resolve().parent))}",
        )
    )
    return steps


def chat_command(folder: Path, *, trust: bool) -> str:
    """Return the command that talks to a result, as it works in the working directory."""
    here = Path.cwd().resolve() == REPO
    where = "" if here else f"--directory {shlex.quote(str(REPO))} "
    path = shlex.quote(shown_path(folder) if here else str(folder.resolve()))
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
    return NextStep(
        "Resume it", f"{_launcher(run)} {shlex.join(words)}", " ".join([f"It {goes_on}.", _on_every_node(run)]).strip()
    )


def _launcher(run: RunRecord) -> str:
    processes, sharding = run.fact("world_size") or 1, run.fact("sharding")
    if processes == 1 and sharding in (None, "none"):
        return "uv run python train_ddp.py"
    on_cpu = str(run.fact("device")) == "CPU"
    name = "cpu" if on_cpu else "ddp" if sharding in (None, "none") else str(sharding)
    if (run.fact("copies") or 1) > 1:
        name += "_hybrid"
    if run.fact("offload") not in (None, "none"):
        name += "_offload"
    if (run.fact("nodes") or 1) > 1:
        name = "multi_node" if name == "ddp" else name
        return f"uv run accelerate launch --config_file accelerate_configs/{name}.yaml train_ddp.py"
    return f"uv run accelerate launch --config_file accelerate_configs/{name}.yaml --num_processes {processes} train_ddp.py"


def _on_every_node(run: RunRecord) -> str:
    if (run.fact("nodes") or 1) <= 1:
        return ""
    return "Start it on every node as before (cluster/node.sh); the command shows the options of train_ddp.py."


def _serve(run: RunRecord, folder: str) -> NextStep:
    title, install = "Serve it with vLLM", "Install vLLM in an environment of its own."
    trusted = bool(run.settings.get("trust_remote_code"))
    if run.settings.get("method") == "full" or run.settings.get("merge"):
        whole = folder if run.settings.get("method") == "full" else os.path.join(folder, "merged")
        return NextStep(title, shlex.join(["vllm", "serve", whole, *["--trust-remote-code"] * trusted]), install)
    # What the adapter needs beside its base model (template, stop tokens, rank) is read from its files by that command.
    command = f"uv run python -m unsloth_ddp.export {shlex.quote(folder)} --to vllm"
    return NextStep(
        title,
        command + " --trust_remote_code" * trusted,
        f"It prints the command that serves the adapter with the chat template and stop tokens of the run. {install}",
    )
