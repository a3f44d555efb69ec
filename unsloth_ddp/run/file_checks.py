"""Refuse what a run's options and the files of this machine show to be wrong, without importing torch."""

import os
from pathlib import Path

from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.upstream_names import choose_trackers, installed_trackers, known_names
from unsloth_ddp.data.chat.template import check_chat_template
from unsloth_ddp.data.order.packing import BatchRequest
from unsloth_ddp.data.sources.checked_rows import FirstRows, check_column_names, check_first_rows
from unsloth_ddp.data.sources.revisions import dataset_revisions
from unsloth_ddp.data.sources.rows import checked_files
from unsloth_ddp.model.files.check import (
    ADAPTER_FILE,
    check_local_model,
    check_no_hub_kernel,
    check_reference,
    read_model_file,
)
from unsloth_ddp.model.files.find import is_folder, model_folder
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.missing import similar_path

# Rows that are checked before torch is imported, over all files; all rows are checked when they are read.
FIRST_ROWS = 1000


def check_files(settings: Settings, processes: int) -> FirstRows:
    """Refuse a run that its options, or this machine's files and packages, show to be impossible.

    Every rank calls this. Nothing slow is imported, so a mistake is reported within seconds.

    Returns what the first rows are.
    """
    if os.path.expanduser("~") == "~":
        raise UserError(
            f"HOME is not set and user id {os.getuid()} has no entry in the list of users, so the caches have no "
            "folder; set HOME to a folder that this user can write."
        )
    _check_model_name(settings)
    check_local_model(str(settings.model), safetensors_only=settings.use_safetensors)
    if is_folder(settings) and not settings.trust_remote_code:
        check_no_hub_kernel(str(settings.model), read_model_file(str(settings.model), "config.json"))
    check_reference(settings)
    if names := known_names("report_to"):
        choose_trackers(settings.report_to, names, installed_trackers())
    return check_data(settings, processes)


def check_data(settings: Settings, processes: int) -> FirstRows:
    """Refuse rows, a chat template or a batch that a run would refuse; the model's weights need not be there."""
    # Divides or not on any device: what is computed from it later only makes more micro-batches of it.
    _ = BatchRequest.of(settings, processes).plan
    check_chat_template(settings.chat_template)
    dataset_revisions(settings)
    checked = [*checked_files(settings.dataset, streaming=settings.streaming), *checked_files(settings.eval_dataset)]
    check_column_names(settings)
    return check_first_rows(settings, max(1, FIRST_ROWS // sum(len(files) for _, files in checked)))


def _check_model_name(settings: Settings) -> None:
    """Refuse a mistyped folder; what may be a Hub id is refused only if neither the Hub nor its cache has it."""
    path = Path(str(settings.model)).expanduser()
    near = None if path.exists() else similar_path(path, _holds_model)
    if near is not None and model_folder(settings) is None and not _is_on_hub(str(settings.model)):
        raise UserError(f"model {settings.model}: there is no such folder or Hub id; did you mean {near}?")


def _holds_model(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.json", ADAPTER_FILE))


def _is_on_hub(name: str) -> bool:
    from huggingface_hub import HfApi

    try:
        return HfApi().repo_exists(name)
    except Exception:  # not a valid id, no network, or an error of the HTTP client, which have no common class
        return False
