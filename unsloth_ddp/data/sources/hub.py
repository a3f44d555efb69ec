"""Test whether the Hub can be reached, before its libraries are imported; if not, refuse a model that is not cached."""

import contextlib
import os
import re
import ssl
import urllib.error
import urllib.request
from concurrent.futures import TimeoutError as TooLate
from pathlib import Path

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.missing import similar_path
from unsloth_ddp.utils.files.sources import read_source
from unsloth_ddp.utils.threads import in_thread

# Seconds for an answer of the Hub, and of a mirror or through a proxy, which may be slow.
ANSWER_TIME, ANSWER_TIME_OF_OTHERS = 2.5, 10.0
# With one of these that is not empty, the Hub's libraries use their caches or the network without being asked.
DECIDED = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def use_cache_if_hub_is_unreachable(settings: Settings, *, check_model: bool = True) -> None:
    """Make the Hub's libraries use their caches if the Hub cannot be reached, since they would retry for minutes.

    Call it before any of them is imported.

    Args:
        check_model: also call check_model_in_cache.
    """
    datasets = [read_source(text).name for text in [*settings.dataset, *settings.eval_dataset]]
    sources = [str(settings.model), *datasets, *filter(None, [settings.reference_model])]
    names = [source for source in sources if not is_file(source)]
    if names and not any(os.environ.get(name) for name in DECIDED):
        endpoint = os.environ.get("HF_ENDPOINT")
        others = endpoint or urllib.request.getproxies()
        seconds = ANSWER_TIME_OF_OTHERS if others else ANSWER_TIME
        _use_cache_without_answer(endpoint or "https://huggingface.co", names[0], seconds)
    if check_model:
        check_model_in_cache(settings)


def _use_cache_without_answer(endpoint: str, name: str, seconds: float) -> None:
    try:
        # A name server that does not answer takes longer than the timeout of a connection.
        in_thread(lambda: _ask(endpoint, seconds), "hub").result(timeout=seconds)
    except (OSError, TooLate) as error:
        cause = getattr(error, "reason", None) or error or f"no answer within {seconds:g} s"
        print(
            f"{endpoint} cannot be reached ({cause}), so {name} has to be in this machine's cache of the Hub; "
            "HF_HUB_OFFLINE=0 tries the network all the same.",
            flush=True,
        )
        os.environ["HF_HUB_OFFLINE"] = "1"


def _ask(endpoint: str, seconds: float) -> None:
    """Ask for the Hub's page by the proxies of the environment; an answer of any kind shows that it is there.

    Raises:
        OSError: there is no answer.
    """
    if any(proxy.startswith("socks") for proxy in urllib.request.getproxies().values()):
        return  # for which urllib has no client
    try:
        with contextlib.suppress(urllib.error.HTTPError, ValueError):
            request = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310
            urllib.request.urlopen(request, timeout=seconds).close()  # noqa: S310
    except urllib.error.URLError as error:
        # The Hub's libraries may know certificates that Python does not.
        if not isinstance(error.reason, ssl.SSLCertVerificationError):
            raise


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
    letters = re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower())
    folders = os.listdir(HF_HUB_CACHE) if os.path.isdir(HF_HUB_CACHE) else []
    if any(letters in re.sub(r"[^a-z0-9]", "", folder.lower()) for folder in folders if folder.startswith("models--")):
        return
    if near := similar_path(Path(name), lambda path: (path / "config.json").is_file()):
        raise UserError(f"model {name}: there is no such folder, and the Hub cannot be reached; did you mean {near}?")
    raise UserError(
        f"model {name} is no folder here and not in the Hub's cache ({HF_HUB_CACHE}), and the Hub cannot be reached, "
        f"or HF_HUB_OFFLINE switches it off; download it where there is a network (uv run hf download {name}) with "
        "HF_HOME on a disk that this machine reads too, or give a folder as --model; HF_HUB_OFFLINE=0 tries the "
        "network in any case."
    )
