"""Upload a finished run to the Hub."""

import json
import shlex
from pathlib import Path

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.model.files.check import ADAPTER_FILE
from unsloth_ddp.run.documents.files import RECORD_FILE, REPORT_FILE, SETTINGS_FILE, STATE_FILE, SUMMARY_FILE
from unsloth_ddp.utils.errors import UserError, one_line

# The report and its record hold rows of the evaluation set; all of these hold local paths, and so names of users, or
# the name of the host, which is part of the names of TensorBoard's files.
PRIVATE = [
    "checkpoint*", "logs/*", "*.partial", "run.lock", "tensorboard/*", "training_args.bin",
    # What was exported from the run.
    "merged*/*", "gguf*/*", "ollama*/*", "vllm*/*",
    RECORD_FILE, REPORT_FILE, SETTINGS_FILE, STATE_FILE, SUMMARY_FILE,
]  # fmt: skip


def check_upload(settings: Settings, asked_by: str = "push_to_hub") -> None:
    """Refuse an upload that would fail when the run is done; the network is not asked.

    Args:
        asked_by: the option that asks for the upload.
    """
    if not settings.push_to_hub:
        return
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    later = (
        ", or leave push_to_hub out and upload the finished run later: uv run python -m unsloth_ddp.export RUN --to hub"
    )
    later = later if asked_by == "push_to_hub" else ""
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"{asked_by} needs the Hub, which is switched off (HF_HUB_OFFLINE) or cannot be reached; unset the "
            f"variable where there is a network{later}."
        )
    if not huggingface_hub.get_token():
        raise UserError(
            f"{asked_by} needs a token of the Hub, and none is found; log in once with uv run hf auth login, or set "
            f"HF_TOKEN{later}."
        )
    try:
        # The account is not known yet; its name counts too, so a run's name may be refused at the end for its length.
        validate_repo_id(settings.hub_model_id or f"account/{settings.run_name}")
    except HFValidationError:
        name = f"hub_model_id {settings.hub_model_id}" if settings.hub_model_id else f"run_name {settings.run_name}"
        raise UserError(
            f"{name} cannot name a repository on the Hub, which takes account/name of letters, digits, '-', '_' and "
            "'.', 96 characters at most; give --hub_model_id."
        ) from None


def shared_adapter_config(folder: Path) -> bytes | None:
    """Return the adapter's config with a local base model named without its folders; None if there is no adapter."""
    try:
        config = json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    base = config.get("base_model_name_or_path")
    if isinstance(base, str) and is_file(base):
        config["base_model_name_or_path"] = Path(base).expanduser().name
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def upload(settings: Settings, folder: Path) -> str:
    """Upload the result of the finished run and its card, and return its address on the Hub.

    Raises:
        UserError: the Hub refuses or cannot be reached; the run on disk is whole.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        repo_id = settings.hub_model_id or f"{api.whoami()['name']}/{settings.run_name}"
        repo = api.create_repo(repo_id, private=settings.hub_private_repo, exist_ok=True)
        api.upload_folder(repo_id=repo.repo_id, folder_path=folder, ignore_patterns=[*PRIVATE, ADAPTER_FILE])
        if (adapter := shared_adapter_config(folder)) is not None:
            api.upload_file(repo_id=repo.repo_id, path_or_fileobj=adapter, path_in_repo=ADAPTER_FILE)
        if settings.merge:
            api.upload_folder(repo_id=repo.repo_id, folder_path=folder / "merged", path_in_repo="merged")
    except Exception as error:
        # The errors of the Hub's libraries (its own, httpx's, hf_xet's) have no class in common.
        problem = one_line(error) or type(error).__name__
        raise UserError(
            f"The run is complete in {folder}, but was not uploaded: {problem.rstrip('.')}; try again with uv run "
            f"python -m unsloth_ddp.export {shlex.quote(str(folder))} --to hub."
        ) from None
    return repo.url
