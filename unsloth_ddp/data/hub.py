"""Decide before the Hub's libraries are imported whether the Hub can be reached."""

from __future__ import annotations

import os
import socket

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources import is_file


def use_cache_if_hub_is_unreachable(settings: Settings) -> None:
    """Switch the Hub's libraries to their caches where it cannot be reached: they retry for minutes otherwise.

    To be called before any of them is imported. A proxy or a mirror is left to answer for itself.
    """
    sources = [str(settings.model), *settings.dataset, *settings.eval_dataset]
    decided = ("HF_HUB_OFFLINE", "HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    if all(is_file(source) for source in sources) or any(name in os.environ for name in decided):
        return
    try:
        socket.create_connection(("huggingface.co", 443), timeout=5).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
