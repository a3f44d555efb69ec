"""What a run leaves: one folder with the adapter or model, the settings, the summary, the logs."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import logging
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from unsloth_ddp.checkpoints.checkpoint import Checkpoints, named_folder, step_folders
from unsloth_ddp.config.parse import Settings
from unsloth_ddp.config.yaml_file import Unreadable, read_yaml
from unsloth_ddp.distributed.exit_codes import EXIT_FAILURE, EXIT_STOPPED, describe_exit_code
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.signals import StopRequest
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.json_file import write_json
from unsloth_ddp.utils.redaction import hide

SETTINGS_FILE, SUMMARY_FILE, LOCK_FILE = "settings.yaml", "summary.json", "run.lock"
SETTINGS_ASIDE = "settings.partial"
LOGS = "logs"
# Seconds that a job waits for the last one in its folder to end; a restart follows a kill closely.
LOCK_PATIENCE = 30.0
# Transformers' logger does not hand its messages on to the root logger; nor does the kit's, because Unsloth gives the root
# logger a handler that writes to the terminal of every rank.
LOGGERS = (None, "transformers", "unsloth_ddp")
# Settings that do not make it another run.
MAY_DIFFER = {"output_dir", "run_name", "overwrite", "resume", "resume_anyway", "max_time", "save_total_limit"}


def default_run_name(settings: Settings, environ: Mapping[str, str] = os.environ) -> str:
    """Model, method and the time of the start: the launcher's, so that its restarts go on with the same run."""
    model = str(settings.model).rstrip("/").rpartition("/")[2]
    began = psutil.Process(os.getppid()).create_time() if "TORCHELASTIC_RUN_ID" in environ else time.time()
    return f"{model}-{settings.method}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(began))}"


def choose_run_folder(settings: Settings, runtime: Runtime) -> Path:
    """The folder of this run, the same on every rank; nothing of the run is written yet.

    What open_run_folder would refuse once everything is loaded is refused here already.

    Raises:
        UserError: it holds another run, a job is writing it, or a node cannot write there.
    """
    settings.run_name = runtime.broadcast_from_main(lambda: settings.run_name or default_run_name(settings))
    folder = Path(settings.output_dir).expanduser().resolve() / settings.run_name

    def look() -> None:
        named_folder(settings.resume)
        try:
            _refuse_another_run(settings, folder)
        except OSError as error:
            raise UserError(f"output folder {folder} cannot be read: {error.strerror or error}.") from None

    runtime.on_main(look)
    runtime.on_main(lambda: _try_to_write(folder), per_node=True)
    runtime.on_main(lambda: _wait_for_another_job(folder))
    # The job that was waited for may have finished the run.
    runtime.on_main(look)
    return folder


def _try_to_write(folder: Path) -> None:
    """Refuse a folder that cannot be made, or written to; tried, because permissions do not tell (root, /proc, a full disk)."""
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        if there == folder:
            # The one file in it that is no sign of another run.
            os.close(os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644))
        else:
            tempfile.TemporaryDirectory(prefix=".unsloth_ddp-", dir=there).cleanup()
    except OSError as error:
        raise UserError(
            f"output folder {folder} cannot be written ({there}: {error.strerror or error}); give another --output_dir."
        ) from None


def _wait_for_another_job(folder: Path) -> None:
    """Refuse a folder that another job is writing, unless that job ends now."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        _wait_for_lock(descriptor, folder)
    finally:
        os.close(descriptor)


def check_upload(settings: Settings) -> None:
    """Refuse an upload that is bound to fail when the run is done; nothing is asked of the network.

    Raises:
        UserError: there is no token, or the Hub's libraries are offline.
    """
    if not settings.push_to_hub:
        return
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise UserError(
            "push_to_hub needs the Hub, which is switched off (HF_HUB_OFFLINE) or cannot be reached; unset the variable, or "
            "leave push_to_hub out and upload the run's folder later with hf upload."
        )
    if not huggingface_hub.get_token():
        raise UserError(
            "push_to_hub needs a token of the Hub, and none is found; log in once with hf auth login, set HF_TOKEN, or leave "
            "push_to_hub out."
        )


def restarted(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher or Slurm started this very job again after it had failed or was stopped."""
    counts = (environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count.isdigit() and int(count) > 0 for count in counts)


def continues(settings: Settings, folder: Path) -> bool:
    """Whether the run goes on in a folder that an unfinished run left, with or without a checkpoint in it."""
    if settings.resume not in ("auto", "no"):
        return Path(settings.resume).expanduser().resolve().parent == folder
    if settings.resume == "no" or (settings.overwrite and not restarted()):
        return False
    if not (folder / SETTINGS_FILE).is_file() or (folder / SUMMARY_FILE).exists():
        return False
    return bool(step_folders(folder)) or _changed_settings(settings, folder) == []


def _changed_settings(settings: Settings, folder: Path) -> list[str] | None:
    """The settings with which the folder's run was started otherwise; None where they are not known."""
    try:
        before = read_yaml(folder / SETTINGS_FILE)
    except (OSError, Unreadable):
        return None
    now = dataclasses.asdict(settings)
    if not isinstance(before, dict):
        return None
    return [name for name in now if name not in MAY_DIFFER and before.get(name) != now[name]]


def _refuse_another_run(settings: Settings, folder: Path) -> None:
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"{folder} is no folder, so a run cannot be written to it; give another --run_name.")
    if _holds_only_a_start(folder) or continues(settings, folder):
        return
    if not settings.overwrite:
        finished, changed = (folder / SUMMARY_FILE).exists(), _changed_settings(settings, folder)
        others = f", started with another {', '.join(changed[:3])}" if changed and not finished else ""
        held = "a finished run" if finished else f"another run{others}"
        if settings.resume == "no":
            raise UserError(
                f"{folder} holds {held}, which --resume no leaves alone; add --overwrite to replace it, or give another "
                "--run_name."
            )
        if not step_folders(folder):
            raise UserError(f"{folder} holds {held}; give another --run_name, or --overwrite to replace it.")
        raise UserError(
            f"{folder} holds {held}; give another --run_name, --overwrite to replace it, or --resume with one of its "
            "checkpoints to go on from there."
        )
    if not (folder / SETTINGS_FILE).is_file():
        raise UserError(f"{folder} was not written by this kit, so --overwrite leaves it alone; remove it.")


def _holds_only_a_start(folder: Path) -> bool:
    """Whether nothing would be lost: no folder, or the settings and logs of a run that failed before it wrote anything."""
    if not folder.exists():
        return True
    held = {path.name for path in folder.iterdir()}
    if not held - {LOCK_FILE, SETTINGS_ASIDE}:
        return True
    logs = folder / LOGS
    only_logs = not logs.exists() or all(path.is_file() and path.suffix == ".log" for path in logs.iterdir())
    return SETTINGS_FILE in held and held <= {LOCK_FILE, SETTINGS_ASIDE, SETTINGS_FILE, LOGS} and only_logs


def open_run_folder(settings: Settings, runtime: Runtime, folder: Path) -> None:
    """Make the folder of a run that is about to train, with its settings, and start its logs.

    Raises:
        UserError: it cannot be written, or another process is writing it.
    """

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder, runtime)
        # Once more: another job of the same name may have begun since the name was chosen.
        _refuse_another_run(settings, folder)
        # The logs of a failed start stay, and this run's follow them.
        if not continues(settings, folder) and not _holds_only_a_start(folder):
            _empty(folder)
        # A finished run that goes on from one of its checkpoints is unfinished again.
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
        # A start that is killed here must find its own folder again.
        settings.save(folder / SETTINGS_ASIDE)
        (folder / SETTINGS_ASIDE).replace(folder / SETTINGS_FILE)

    try:
        runtime.on_main(make)
        runtime.on_main(lambda: (folder / LOGS).mkdir(parents=True, exist_ok=True), per_node=True)
    except (OSError, RuntimeError) as error:
        raise UserError(f"output folder {folder} cannot be written: {error}.") from None
    start_logging(folder, runtime)


def _lock(folder: Path, runtime: Runtime) -> None:
    """Hold the folder for as long as this process lives, so that a second job does not go on in it meanwhile.

    A POSIX lock: it ends with the process, however that ends, is not inherited, and NFS knows it too.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    runtime.cleanup.callback(os.close, descriptor)
    if _wait_for_lock(descriptor, folder):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{socket.gethostname()}, process {os.getpid()}".encode(), 0)


def _wait_for_lock(descriptor: int, folder: Path) -> bool:
    """Take the lock as soon as nobody else holds it; False on a file system without locks.

    Raises:
        UserError: another job keeps it, for LOCK_PATIENCE.
    """
    deadline, told = time.monotonic() + LOCK_PATIENCE, False
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return False
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        written = f"{folder} is being written by another job ({holder})"
        if time.monotonic() > deadline:
            raise UserError(f"{written}; wait for its end, or give another --run_name.")
        if not told:
            print(f"{written}; waiting for its end, {LOCK_PATIENCE:.0f} s at most.", flush=True)
            told = True
        time.sleep(0.2)


def _empty(folder: Path) -> None:
    """Remove a run; cut short, it is still the run that it was, with its settings and, if it has finished, its summary."""
    for path in folder.iterdir():
        if path.name in (LOCK_FILE, SETTINGS_FILE, SUMMARY_FILE):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (folder / SUMMARY_FILE).unlink(missing_ok=True)


def start_logging(folder: Path, runtime: Runtime) -> None:
    """One log file a rank for the kit and every library; warnings reach the terminal from the main process alone."""
    to_file = _LogFile(folder / LOGS / f"rank_{runtime.ranks.rank}.log", encoding="utf-8")
    to_file.setFormatter(_WithoutSecrets("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in LOGGERS:
        logging.getLogger(name).addHandler(to_file)
    ours = logging.getLogger("unsloth_ddp")
    ours.setLevel(logging.INFO)
    ours.propagate = False
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


def stopped(checkpoints: Checkpoints, stop: StopRequest, folder: Path) -> int:
    """Say where a run that was asked to stop can go on; returns the exit code."""
    last = checkpoints.last
    if last is None:
        print(f"Stopped on {stop.agreed_cause}, without a whole checkpoint: {checkpoints.failed}.", flush=True)
        return EXIT_FAILURE
    print(
        f"Stopped on {stop.agreed_cause}; the same command goes on from {last} ({describe_exit_code(EXIT_STOPPED)}).",
        flush=True,
    )
    return EXIT_STOPPED


def not_saved(checkpoints: Checkpoints, problem: str) -> int:
    """Say that the trained model is not on the disk, and what is; returns the exit code."""
    last = f"{checkpoints.last} is the last whole checkpoint" if checkpoints.last else "there is no checkpoint"
    print(
        f"Training ended, but its result could not be written to {checkpoints.folder}: {problem}; {last}. "
        "Make room, and run the same command again: it goes on from there.",
        flush=True,
    )
    return EXIT_FAILURE


def not_finished(folder: Path, what: str, problem: str) -> int:
    """Say that the trained model is written, and what could not be written after it; returns the exit code."""
    print(
        f"The trained model is in {folder}, but {what} could not be written: {problem}. Make room, and run the same "
        "command again: it finishes the run.",
        flush=True,
    )
    return EXIT_FAILURE


def check_saves(checkpoints: Checkpoints) -> int:
    """The exit code of a run whose result is written: a failure if checkpoints were due and none could be written."""
    if checkpoints.failed is None or checkpoints.written:
        return 0
    print(f"The result is written, but no checkpoint ever was: {checkpoints.failed}.", flush=True)
    return EXIT_FAILURE


class _LogFile(logging.FileHandler):
    """A log file that gives up when it cannot be written; the default prints a traceback a line."""

    def handleError(self, record: logging.LogRecord) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self)
        print(f"{self.baseFilename} can no longer be written: {sys.exc_info()[1]}", flush=True)


class _WithoutSecrets(logging.Formatter):
    """Libraries log addresses and arguments; what looks like a secret stays out of the file."""

    def format(self, record: logging.LogRecord) -> str:
        return hide(super().format(record))


def finish(settings: Settings, folder: Path, summary: dict[str, Any]) -> None:
    """Write summary.json, upload if asked to, and say what the run came to."""
    write_json(folder / SUMMARY_FILE, summary)
    (folder / LOCK_FILE).unlink(missing_ok=True)
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
        ignored = ["checkpoint*", "logs/*", "merged/*", "*.partial", "run.lock"]
        api.upload_folder(repo_id=repo.repo_id, folder_path=folder, ignore_patterns=ignored)
        if settings.merge:
            api.upload_folder(repo_id=repo.repo_id, folder_path=folder / "merged", path_in_repo="merged")
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"The run is whole in {folder}, but was not uploaded: {reason}") from None
    return repo.url
