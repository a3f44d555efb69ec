"""Upload a finished run to the Hub."""

from __future__ import annotations

from pathlib import Path

from unsloth_ddp.config.options import Settings
from unsloth_ddp.run.files import RECORD_FILE, REPORT_FILE
from unsloth_ddp.utils.errors import UserError, one_line


def check_upload(settings: Settings) -> None:
    """Refuse an upload that would fail when the run is done; the network is not asked.

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


def upload(settings: Settings, folder: Path) -> str:
    """Upload the finished run without checkpoints and logs, and return its address on the Hub.

    Raises:
        UserError: the Hub refuses or cannot be reached; the run on disk is whole.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = HfApi()
    try:
        repo_id = settings.hub_model_id or f"{api.whoami()['name']}/{settings.run_name}"
        repo = api.create_repo(repo_id, private=settings.hub_private_repo, exist_ok=True)
        # The report and its record hold rows of the evaluation set and commands with local paths.
        ignored = ["checkpoint*", "logs/*", "merged/*", "*.partial", "run.lock", RECORD_FILE, REPORT_FILE]
        api.upload_folder(repo_id=repo.repo_id, folder_path=folder, ignore_patterns=ignored)
        if settings.merge:
            api.upload_folder(repo_id=repo.repo_id, folder_path=folder / "merged", path_in_repo="merged")
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        raise UserError(f"The run is whole in {folder}, but was not uploaded: {one_line(error)}") from None
    return repo.url
