"""Choose, lock and open the folder of a run, and refuse one that another run needs."""

import dataclasses
import errno
import fcntl
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

import psutil

from unsloth_ddp.checkpoints.manifest import step_folders
from unsloth_ddp.checkpoints.resume_point import named_folder
from unsloth_ddp.config.checks import with_full_paths
from unsloth_ddp.config.options import Settings, options_with
from unsloth_ddp.distributed.ranks import node_range
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.run.documents.files import LOCK_FILE, LOGS, RECORD_FILE, SETTINGS_FILE, SUMMARY_FILE
from unsloth_ddp.utils.errors import UserError, os_reason
from unsloth_ddp.utils.files.safe import foreign_owner, open_without_following_links
from unsloth_ddp.utils.files.yaml import read_mapping

SETTINGS_ASIDE = "settings.partial"
# Everything that a run leaves if it fails before its first step.
START_FILES = {LOCK_FILE, SETTINGS_ASIDE, SETTINGS_FILE, RECORD_FILE, LOGS}
# Seconds that a job waits for the last one in its folder to end; a restart follows a kill closely.
LOCK_PATIENCE = 30.0


def default_run_name(settings: Settings) -> str:
    """Return model, method and start time; the launcher's start, so that its restarts continue the same run."""
    model = str(settings.model).rstrip("/").rpartition("/")[2]
    began = psutil.Process(os.getppid()).create_time() if "TORCHELASTIC_RUN_ID" in os.environ else time.time()
    # The name of a model may be as long as a folder's.
    model = model.encode()[:150].decode(errors="ignore")
    return f"{model}-{settings.method}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(began))}"


def check_run_folder(settings: Settings) -> None:
    """Refuse a wrong --resume or run folder before torch is imported and Hub revisions are pinned."""
    folder = _folder_of(settings, settings.run_name or default_run_name(settings))
    named_folder(settings.resume)
    if os.path.lexists(folder / SUMMARY_FILE):
        _look(settings, folder)
    _try_to_write(folder)


def choose_run_folder(settings: Settings, runtime: Runtime) -> Path:
    """Return the folder of this run, the same on every rank; nothing is written to it yet.

    What open_run_folder refuses once everything is loaded is refused here already.

    Raises:
        UserError: it holds another run, a job is writing it, or a node cannot write there.
    """
    unnamed = settings.run_name is None
    name = runtime.broadcast_from_main(lambda: settings.run_name or default_run_name(settings))
    settings = dataclasses.replace(settings, run_name=name)
    folder = _folder_of(settings, name)
    runtime.on_main(lambda: named_folder(settings.resume))
    runtime.on_main(lambda: _look(settings, folder))
    runtime.on_main(lambda: _try_to_write(folder), per_node=True)
    runtime.on_main(lambda: _wait_for_another_job(folder))
    # The job that was waited for may have finished the run.
    runtime.on_main(lambda: _look(settings, folder))
    if unnamed and settings.resume == "auto" and runtime.ranks.is_main:
        offer_unfinished(settings, folder)
    return folder


def is_finished(settings: Settings) -> bool:
    """Return whether the folder of a named run holds the result of these settings, and no option asks for a new one."""
    if settings.run_name is None or settings.overwrite or settings.resume != "auto":
        return False
    folder = _folder_of(settings, settings.run_name)
    changed = _changed_settings(settings, folder) if (folder / SUMMARY_FILE).exists() else None
    # A run pins the revisions that its command leaves open.
    return changed is not None and all(name.endswith("_revision") and not getattr(settings, name) for name in changed)


def _folder_of(settings: Settings, name: str) -> Path:
    return Path(settings.output_dir).expanduser().resolve() / name


def _look(settings: Settings, folder: Path) -> None:
    try:
        _refuse_another_run(settings, folder)
    except OSError as error:
        raise UserError(f"output folder {folder} cannot be read: {os_reason(error)}.") from None


def offer_unfinished(settings: Settings, folder: Path) -> None:
    """Print how to resume the newest unfinished run with these settings, if there is one."""
    try:
        others = [path for path in folder.parent.iterdir() if path != folder and (path / SETTINGS_FILE).is_file()]
        unfinished = [path for path in others if step_folders(path) and continues(settings, path)]
        unfinished = [path for path in unfinished if _changed_settings(settings, path) == []]
        newest = max(unfinished, key=lambda path: (path / SETTINGS_FILE).stat().st_mtime, default=None)
    except OSError:
        return
    if newest is not None:
        print(
            f"{newest} holds an unfinished run with the same settings, at step {max(step_folders(newest)):,}; this is "
            f"a new run. Give --run_name {newest.name} to resume that one.",
            flush=True,
        )


def _try_to_write(folder: Path) -> None:
    """Refuse a folder that cannot be written; try it, since permissions do not tell (root, /proc, a full disk)."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if existing == folder and (owner := foreign_owner(folder)) is not None:
        raise UserError(
            f"{folder} belongs to another user (user id {owner}), who could replace what this run writes; give another "
            "--run_name or --output_dir, or copy the folder."
        )
    try:
        if existing == folder:
            # The one file in it that is no sign of another run.
            os.close(open_without_following_links(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT))
        elif not _made_nameless_file(existing):
            tempfile.TemporaryDirectory(prefix=".unsloth_ddp-", dir=existing).cleanup()
    except OSError as error:
        raise UserError(
            f"output folder {folder} cannot be written ({existing}: {os_reason(error)}); give another --output_dir."
        ) from None


def _made_nameless_file(folder: Path) -> bool:
    """Return whether a file without a name could be made in a folder, of which a killed rank leaves nothing."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600))
        return True
    except (OSError, AttributeError):
        # Not every file system, and only Linux, has such files.
        return False


def _wait_for_another_job(folder: Path) -> None:
    """Refuse a folder that another job is writing, unless that job ends within LOCK_PATIENCE."""
    try:
        descriptor = open_without_following_links(folder / LOCK_FILE, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        _wait_for_lock(descriptor, folder)
    finally:
        os.close(descriptor)


def restarted() -> bool:
    """Return whether a launcher or Slurm restarted this job after a failure or a stop, or may have."""
    if node_range():
        # torchrun counts no restart for a node that comes back.
        return True
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return any(count.isdigit() and int(count) > 0 for count in counts)


def continues(settings: Settings, folder: Path) -> bool:
    """Return whether the run continues in a folder that an unfinished run left, with or without a checkpoint."""
    if settings.resume not in ("auto", "no"):
        return Path(settings.resume).expanduser().resolve().parent == folder
    if settings.resume == "no" or (settings.overwrite and not restarted()):
        return False
    if not (folder / SETTINGS_FILE).is_file() or (folder / SUMMARY_FILE).exists():
        return False
    return bool(step_folders(folder)) or _changed_settings(settings, folder) == []


def _changed_settings(settings: Settings, folder: Path) -> list[str] | None:
    """Return the settings that differ from those of the folder's run; None if those are not known."""
    # A pipe would be waited for.
    if not (folder / SETTINGS_FILE).is_file():
        return None
    try:
        earlier = with_full_paths(read_mapping(folder / SETTINGS_FILE, SETTINGS_FILE))
    except UserError:
        return None
    now = with_full_paths(dataclasses.asdict(settings))
    return [name for name in options_with(new_run=True) if earlier.get(name) != now[name]]


def _refuse_another_run(settings: Settings, folder: Path) -> None:
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"{folder} is not a folder, so a run cannot be written to it; give another --run_name.")
    if _holds_only_a_start(folder) or continues(settings, folder):
        return
    if not settings.overwrite:
        finished, changed = (folder / SUMMARY_FILE).exists(), _changed_settings(settings, folder)
        others = f", started with another {', '.join(changed[:3])}" if changed and not finished else ""
        content = "a finished run" if finished else f"another run{others}"
        if settings.resume == "no":
            raise UserError(
                f"{folder} holds {content}, which --resume no leaves alone; add --overwrite to replace it, or give "
                "another --run_name."
            )
        if not step_folders(folder):
            raise UserError(f"{folder} holds {content}; give another --run_name, or --overwrite to replace it.")
        raise UserError(
            f"{folder} holds {content}; give another --run_name, --overwrite to replace it, or --resume with one of "
            "its checkpoints to go on from there."
        )
    if not (folder / SETTINGS_FILE).is_file():
        raise UserError(f"{folder} was not written by this kit, so --overwrite leaves it alone; remove it.")


def _holds_only_a_start(folder: Path) -> bool:
    """Return whether the folder is missing, or holds only settings and logs of a run that failed before step 1."""
    if not folder.exists():
        return True
    names = {path.name for path in folder.iterdir()}
    if not names - {LOCK_FILE, SETTINGS_ASIDE}:
        return True
    logs = folder / LOGS
    only_logs = not logs.exists() or all(path.is_file() and path.suffix == ".log" for path in logs.iterdir())
    return SETTINGS_FILE in names and names <= START_FILES and only_logs


def open_run_folder(settings: Settings, runtime: Runtime, folder: Path) -> None:
    """Make the folder of a run that is about to train, and write its settings.

    Raises:
        UserError: the folder cannot be written, or another process is writing it.
    """

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder, runtime)
        # Once more: another job of the same name may have begun since the name was chosen.
        _refuse_another_run(settings, folder)
        # The logs of a failed start stay, and this run's follow them.
        if not continues(settings, folder) and not _holds_only_a_start(folder):
            _empty(folder)
        # A finished run that is replaced, or resumes from one of its checkpoints, is unfinished again.
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
        write_settings(settings, folder)

    try:
        runtime.on_main(make)
        runtime.on_main(lambda: (folder / LOGS).mkdir(parents=True, exist_ok=True), per_node=True)
    except (OSError, RuntimeError) as error:
        why = os_reason(error) if isinstance(error, OSError) else str(error)
        raise UserError(f"output folder {folder} cannot be written: {why}; give another --output_dir.") from None


def write_settings(settings: Settings, folder: Path) -> None:
    """Write the file by which a start that is killed finds its own folder again."""
    Settings(**with_full_paths(dataclasses.asdict(settings))).save(folder / SETTINGS_ASIDE)
    (folder / SETTINGS_ASIDE).replace(folder / SETTINGS_FILE)


def _lock(folder: Path, runtime: Runtime) -> None:
    """Lock the folder for as long as this process lives, so that no second job continues the run in it.

    A POSIX lock: it ends with the process, however that ends, is not inherited, and NFS knows it too.
    """
    descriptor = open_without_following_links(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    runtime.cleanup.callback(os.close, descriptor)
    if _wait_for_lock(descriptor, folder):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{socket.gethostname()}, process {os.getpid()}".encode(), 0)


def _wait_for_lock(descriptor: int, folder: Path) -> bool:
    """Wait for the lock and take it; return False on a file system without locks.

    Raises:
        UserError: another job keeps it, for LOCK_PATIENCE.
    """
    deadline, is_announced = time.monotonic() + LOCK_PATIENCE, False
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
        if not is_announced:
            print(f"{written}; waiting for its end, {LOCK_PATIENCE:.0f} s at most.", flush=True)
            is_announced = True
        time.sleep(0.2)


def _empty(folder: Path) -> None:
    """Remove a run's files but for settings and summary: if this is cut short, the folder still tells what it was."""
    for path in folder.iterdir():
        if path.name in (LOCK_FILE, SETTINGS_FILE, SUMMARY_FILE):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
