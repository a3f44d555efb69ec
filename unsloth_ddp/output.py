"""What a run leaves: one folder with the adapter or model, the settings, the summary, the logs."""

from __future__ import annotations

import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

from unsloth_ddp.errors import UserError
from unsloth_ddp.runtime import Runtime
from unsloth_ddp.settings import Settings

SETTINGS_FILE = "settings.yaml"


def default_run_name(settings: Settings) -> str:
    """Model, method and the time of the start."""
    model = str(settings.model).rstrip("/").rpartition("/")[2]
    return f"{model}-{settings.method}-{time.strftime('%Y%m%d-%H%M%S')}"


def choose_run_folder(settings: Settings, runtime: Runtime) -> Path:
    """The folder of this run, the same on every rank; nothing is written yet.

    Raises:
        UserError: it holds another run.
    """
    settings.run_name = runtime.from_main(lambda: settings.run_name or default_run_name(settings))
    folder = Path(settings.output_dir).expanduser().resolve() / settings.run_name

    runtime.alone(lambda: _refuse_another_run(settings, folder))
    return folder


def _refuse_another_run(settings: Settings, folder: Path) -> None:
    if not folder.exists() or not any(folder.iterdir()) or _goes_on_in(settings, folder):
        return
    if not settings.overwrite:
        raise UserError(
            f"{folder} holds another run; give another --run_name, --overwrite to replace it, or "
            "--resume_from_checkpoint true to go on with it."
        )
    if not (folder / SETTINGS_FILE).is_file():
        raise UserError(f"{folder} was not written by this kit, so --overwrite leaves it alone; remove it.")


def _goes_on_in(settings: Settings, folder: Path) -> bool:
    """Whether the run resumes from a checkpoint of this very folder."""
    wanted = settings.resume_from_checkpoint or "false"
    return wanted.lower() == "true" or Path(wanted).expanduser().resolve().parent == folder


def open_run_folder(settings: Settings, runtime: Runtime, folder: Path) -> None:
    """Make the folder of a run that is about to train, with its settings, and start its logs.

    Raises:
        UserError: it cannot be written.
    """

    def make() -> None:
        # Once more: another job of the same name may have begun since the name was chosen.
        _refuse_another_run(settings, folder)
        if settings.overwrite and folder.exists() and not _goes_on_in(settings, folder):
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        settings.save(folder / SETTINGS_FILE)

    try:
        runtime.alone(make)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        raise UserError(f"output folder {folder} cannot be written: {error}.") from None
    start_logging(folder, runtime)


def start_logging(folder: Path, runtime: Runtime) -> None:
    """One log file a rank for the kit and every library; warnings reach the terminal from the main process alone."""
    to_file = logging.FileHandler(folder / "logs" / f"rank_{runtime.ranks.rank}.log", encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(to_file)
    # Transformers' logger does not hand its messages on to the root logger.
    logging.getLogger("transformers").addHandler(to_file)
    # Nor does the kit's: Unsloth gives the root logger a handler that writes to the terminal of every rank.
    ours = logging.getLogger("unsloth_ddp")
    ours.setLevel(logging.INFO)
    ours.propagate = False
    ours.addHandler(to_file)
    if runtime.ranks.is_main:
        to_terminal = logging.StreamHandler()
        to_terminal.setLevel(logging.WARNING)
        ours.addHandler(to_terminal)
    logging.captureWarnings(True)


def stop_library_output(runtime: Runtime) -> None:
    """Leave one progress bar, the trainer's, and the warnings of the main process; to be called once the backend is in."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # DeepSpeed's config has the accumulation that the batch plan decided; accelerate's own count is not used then.
    logging.getLogger("accelerate.accelerator").addFilter(
        lambda record: "Gradient accumulation steps mismatch" not in record.getMessage()
    )
    if not runtime.ranks.is_main:
        transformers.utils.logging.set_verbosity_error()
        for handler in logging.getLogger().handlers:
            if type(handler) is logging.StreamHandler:
                handler.setLevel(logging.CRITICAL)


def finish(settings: Settings, folder: Path, summary: dict[str, Any]) -> None:
    """Write summary.json, upload if asked to, and say what the run came to."""
    path = folder / "summary.json"
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    aside.replace(path)
    losses = [f"{name} {summary[name]:.4f}" for name in ("train_loss", "eval_loss") if summary[name] is not None]
    print(
        f"Done: {summary['steps']} steps in {summary['train_seconds']:.0f} s, {', '.join(losses)}, "
        f"{summary['tokens_per_second']:,.0f} tokens/s. Everything is in {folder}",
        flush=True,
    )
    if settings.push_to_hub:
        print(f"Uploaded to {upload(settings, folder)}", flush=True)


def upload(settings: Settings, folder: Path) -> str:
    """Upload the finished run, without checkpoints and logs; returns its address on the Hub.

    Raises:
        UserError: the Hub refuses, or cannot be reached; the run on disk is whole all the same.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = HfApi()
    try:
        repo_id = settings.hub_model_id or f"{api.whoami()['name']}/{settings.run_name}"
        repo = api.create_repo(repo_id, private=settings.hub_private_repo, exist_ok=True)
        ignored = ["checkpoint-*", "logs/*", "merged/*", "*.partial"]
        api.upload_folder(repo_id=repo.repo_id, folder_path=folder, ignore_patterns=ignored)
        if settings.merge:
            api.upload_folder(repo_id=repo.repo_id, folder_path=folder / "merged", path_in_repo="merged")
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"The run is whole in {folder}, but was not uploaded: {reason}") from None
    return repo.url
