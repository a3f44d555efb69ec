"""Find what a run has written: the result of a finished run, or the last complete checkpoint of an unfinished one."""

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.checkpoints.manifest import Damaged, step_folders
from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.parse import read_config
from unsloth_ddp.distributed.runtime import Backend
from unsloth_ddp.model.files.check import ADAPTER_WEIGHTS
from unsloth_ddp.model.files.identity import weights_identity
from unsloth_ddp.run.documents.record import is_run, read_run
from unsloth_ddp.run.folder import SETTINGS_FILE, SUMMARY_FILE
from unsloth_ddp.utils.errors import UserError, os_reason
from unsloth_ddp.utils.files.missing import similar_path

WHOLE = "model.safetensors"


@dataclass(frozen=True)
class RunResult:
    """Hold what a run has trained.

    Args:
        run: the folder of the run.
        folder: holds the adapter or model: the run's folder, or a checkpoint of it.
        settings: of the run, with the backend that it used.
        step: of the checkpoint; None for the result of a finished run.
        sentence: says which checkpoint it is, and why; empty for the result of a finished run.
        plain_text: the run trained on texts, without a chat template.
        in_shards: the folder holds a whole model in the shards of a sharded run, which have to be put together first.
        other_base: the weights of the base model are not those that the adapter was trained on.
    """

    run: Path
    folder: Path
    settings: Settings
    step: int | None = None
    sentence: str = ""
    plain_text: bool = False
    in_shards: bool = False
    other_base: bool = False

    @property
    def is_adapter(self) -> bool:
        return self.settings.method != "full"

    def sentences(self, *, plain: bool) -> list[str]:
        """Return what to tell before the result is used."""
        sentences = [self.sentence] if self.sentence else []
        if self.other_base:
            sentences.append(
                f"The weights of the base model {self.settings.model} changed since {self.run} was trained on it, so "
                "answers and merged models may be wrong; put the earlier files back, or train again."
            )
        if self.plain_text and not plain:
            sentences.append(
                f"{self.run} trained on plain text, without a chat template; add --plain, which continues a text as "
                "the rows were written."
            )
        return sentences


def find_result(named: str, *, in_shards: bool = False) -> RunResult:
    """Return the result of the run in folder `named`, or of the checkpoint `named`.

    Args:
        in_shards: also return checkpoints that hold a whole model in shards.

    Raises:
        UserError: it is not a run's folder, is of another version, or holds nothing that is whole.
    """
    result = _find(named)
    if result.in_shards and not in_shards:
        raise UserError(
            f"{result.folder} holds the weights in shards, as every process of a sharded run wrote its own; make a "
            f"model of them with `python -m unsloth_ddp.export {result.folder} --to merged`, or let the run finish."
        )
    record: dict[str, Any] = {}
    # The result can be used without its record.
    with contextlib.suppress(UserError):
        run = read_run(result.run)
        record = {name: value for name, value in run.record.items() if isinstance(value, dict)}
        if (backend := run.fact("backend")) in get_args(Backend):
            result = dataclasses.replace(result, settings=dataclasses.replace(result.settings, backend=backend))
    base = record.get("model", {})
    if base.get("local") and result.is_adapter:
        _check_base_is_there(result)
        result = dataclasses.replace(result, other_base=_base_changed(result, base.get("weights")))
    return dataclasses.replace(result, plain_text=bool(record.get("data", {}).get("plain_text")))


def _check_base_is_there(result: RunResult) -> None:
    """Refuse a base model that was a folder and is none now; a relative one would be looked for on the Hub."""
    base = Path(str(result.settings.model)).expanduser()
    if base.exists():
        return
    places = [base] if base.is_absolute() else [Path.cwd() / base, result.run / base]
    raise UserError(
        f"The base model of {result.run} is not there: looked for {' and '.join(map(str, places))}. If it was moved, "
        "change model in the run's settings.yaml."
    )


def _base_changed(result: RunResult, weights: Any) -> bool:
    """Return whether the weights of a local base model are not those that the run recorded."""
    with contextlib.suppress(OSError):  # loading tells it
        now = weights_identity(Path(str(result.settings.model)).expanduser())
        return None not in (weights, now) and weights != now
    return False


def _find(named: str) -> RunResult:
    folder = Path(named).expanduser()
    try:
        folder = folder.resolve()
        if not folder.is_dir():
            problem = " is a file" if folder.exists() else ": there is no such folder"
            example = similar_path(folder, is_run) or _run_near(folder.parent) or "outputs/RUN"
            raise UserError(f"{named}{problem}; give the folder of a run, such as {example}.")
        if (folder / manifest.FILE_NAME).is_file() and (folder.parent / SETTINGS_FILE).is_file():
            return _named_checkpoint(folder)
        if not (folder / SETTINGS_FILE).is_file():
            raise UserError(
                f"{named} is not the folder of a run (it has no {SETTINGS_FILE}); give the folder of a run, such as "
                f"{_run_near(folder) or 'outputs/RUN'}."
            )
        if (folder / SUMMARY_FILE).is_file():
            return _with_weights(RunResult(folder, folder, read_settings(folder)))
        return _last_checkpoint(folder)
    except OSError as error:
        raise UserError(f"{named} cannot be read: {os_reason(error)}.") from None


def _run_near(folder: Path) -> Path | None:
    """Return the run that a folder lies in, or the newest one in it; None if there is none."""
    if (folder.parent / SETTINGS_FILE).is_file():
        return folder.parent
    return max(
        (path.parent for path in folder.glob(f"*/{SETTINGS_FILE}")), key=lambda run: run.stat().st_mtime, default=None
    )


def read_settings(run: Path) -> Settings:
    """Return the settings of a run, to load its result with: the folder of compiled modules is a new one.

    Raises:
        UserError: they cannot be read, or hold what this release does not know.
    """
    try:
        settings = Settings(**read_config(run / SETTINGS_FILE))
    except UserError as error:
        raise UserError(f"{run} was written by another version of the kit, or was edited: {error}") from None
    # Unsloth runs the modules in that folder, which whoever wrote the run's folder has named, and another job may use
    # it.
    return dataclasses.replace(settings, compiled_cache_dir=None, clear_compiled_cache=False)


def _named_checkpoint(folder: Path) -> RunResult:
    run = folder.parent
    settings = read_settings(run)
    try:
        step = manifest.verify(folder).step
    except Damaged as error:
        raise UserError(f"{folder} is not a complete checkpoint: {error}; give another.") from None
    return _with_weights(RunResult(run, folder, settings, step, f"This is {folder.name} of {run}."))


def _last_checkpoint(run: Path) -> RunResult:
    settings = read_settings(run)
    newest, skipped = manifest.newest(step_folders(run), manifest.verify)
    if newest is not None:
        folder, described = newest
        sentence = f"{run} is not finished; this is {folder.name}, its last complete checkpoint."
        return _with_weights(RunResult(run, folder, settings, described.step, sentence))
    if skipped:
        raise UserError(
            f"{run} is not finished, and none of its checkpoints is whole ({skipped[0][0].name}: {skipped[0][1]}); "
            "start it again with the same --run_name."
        )
    raise UserError(f"{run} is not finished and has no checkpoint yet; let it write one, or give another run.")


def _with_weights(result: RunResult) -> RunResult:
    """Return a result with how its weights lie, or refuse a folder without weights."""
    folder, full = result.folder, not result.is_adapter
    weight_files = [WHOLE, f"{WHOLE}.index.json"] if full else [ADAPTER_WEIGHTS]
    if any((folder / name).is_file() for name in weight_files):
        return result
    if full and manifest.holds_shards(path.relative_to(folder).as_posix() for path in manifest.list_files(folder)):
        return dataclasses.replace(result, in_shards=True)
    why = (
        "the run has finished, so the file was moved or removed; copy it back, or give a checkpoint of the run."
        if (folder / SETTINGS_FILE).is_file()
        else "checkpoints of ZeRO runs hold DeepSpeed's shards only, which become a model when the run finishes."
    )
    raise UserError(f"{folder} holds no {weight_files[0]}, so there is nothing to load; {why}")
