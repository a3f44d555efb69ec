"""Test whether the Hub can be reached, before its libraries are imported; if not, refuse a model that is not cached."""

import os
import re
import socket
import threading

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.sources import read_source

# Seconds for a connection; a name server that does not answer may take longer.
ANSWER_TIME = 2.0
# Variables with which the Hub's libraries know by themselves how to reach it. An empty one counts as not set, as it
# does there.
DECIDED = (
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_ENDPOINT",
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
)


def use_cache_if_hub_is_unreachable(settings: Settings, *, check_model: bool = True) -> None:
    """Make the Hub's libraries use their caches if the Hub cannot be reached, since they would retry for minutes.

    Call it before any of them is imported. If a proxy or a mirror is configured, nothing is tested or changed.

    Args:
        check_model: also call check_model_in_cache.
    """
    datasets = [read_source(text).name for text in [*settings.dataset, *settings.eval_dataset]]
    sources = [str(settings.model), *datasets]
    asked = not all(is_file(source) for source in sources)
    if asked and not any(os.environ.get(name) for name in DECIDED) and not _answers():
        os.environ["HF_HUB_OFFLINE"] = "1"
    if check_model:
        check_model_in_cache(settings)


def _answers() -> bool:
    """Return whether the Hub takes a connection within ANSWER_TIME."""
    connected = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(("huggingface.co", 443), timeout=ANSWER_TIME).close()
        except OSError:
            return
        connected.set()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(ANSWER_TIME)
    return connected.is_set()


def check_model_in_cache(settings: Settings) -> None:
    """Refuse a model of the Hub of which nothing is in the cache while the Hub's libraries use the cache alone.

    Raises:
        UserError: naming the cache, and how to fill it.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    name = str(settings.model)
    switch = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    if is_file(name) or switch.upper() not in ("1", "ON", "YES", "TRUE"):
        return
    # Unsloth may load a quantized model of another repository, whose name contains that of this one.
    wanted = re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower())
    folders = os.listdir(HF_HUB_CACHE) if os.path.isdir(HF_HUB_CACHE) else []
    if any(wanted in re.sub(r"[^a-z0-9]", "", folder.lower()) for folder in folders if folder.startswith("models--")):
        return
    raise UserError(
        f"model {name} is no folder here and not in the Hub's cache ({HF_HUB_CACHE}), and the Hub cannot be reached, "
        f"or HF_HUB_OFFLINE "
        f"switches it off; download it where there is a network (uv run hf download {name}) with HF_HOME on a disk "
        f"that this machine reads too, or give a folder as --model; "
        "HF_HUB_OFFLINE=0 tries the network in any case."
    )
