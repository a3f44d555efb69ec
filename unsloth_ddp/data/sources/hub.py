"""Test whether the Hub can be reached, before its libraries are imported."""

import os
import socket

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.utils.files.sources import read_source


def use_cache_if_hub_is_unreachable(settings: Settings) -> None:
    """Make the Hub's libraries use their caches if the Hub cannot be reached, since they would retry for minutes.

    Call it before any of them is imported. If a proxy or a mirror is configured, nothing is tested or changed.
    """
    datasets = [read_source(text).name for text in [*settings.dataset, *settings.eval_dataset]]
    sources = [str(settings.model), *datasets]
    decided = ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    if all(is_file(source) for source in sources) or any(name in os.environ for name in decided):
        return
    try:
        socket.create_connection(("huggingface.co", 443), timeout=5).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
