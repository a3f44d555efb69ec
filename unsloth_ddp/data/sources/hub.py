"""Test whether the Hub can be reached, before its libraries are imported."""

import contextlib
import os
import ssl
import urllib.error
import urllib.request
from concurrent.futures import TimeoutError as TooLate

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.utils.threads import in_thread

SECONDS = 10


def use_cache_if_hub_is_unreachable(settings: Settings) -> None:
    """Make the Hub's libraries use their caches if the Hub cannot be reached, since they would retry for minutes.

    Call it before any of them is imported.
    """
    sources = [str(settings.model), *settings.dataset, *settings.eval_dataset]
    names = [source for source in [*sources, *filter(None, [settings.reference_model])] if not is_file(source)]
    if not names or "HF_HUB_OFFLINE" in os.environ:
        return
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        # A name server that does not answer takes longer than the timeout of a connection.
        in_thread(lambda: _ask(endpoint), "hub").result(timeout=SECONDS)
    except (OSError, TooLate) as error:
        reason = getattr(error, "reason", None) or error or f"no answer within {SECONDS} s"
        print(
            f"{endpoint} cannot be reached ({reason}), so {names[0]} has to be in this machine's cache of the Hub; "
            "HF_HUB_OFFLINE=0 tries "
            "the network all the same.",
            flush=True,
        )
        os.environ["HF_HUB_OFFLINE"] = "1"


def _ask(endpoint: str) -> None:
    """Ask for the Hub's page by the proxies of the environment; an answer of any kind shows that it is there.

    Raises:
        OSError: there is no answer.
    """
    if any(proxy.startswith("socks") for proxy in urllib.request.getproxies().values()):
        return  # for which urllib has no client
    try:
        with contextlib.suppress(urllib.error.HTTPError, ValueError):
            request = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310
            urllib.request.urlopen(request, timeout=SECONDS / 2).close()  # noqa: S310
    except urllib.error.URLError as error:
        # The Hub's libraries may know certificates that Python does not.
        if not isinstance(error.reason, ssl.SSLCertVerificationError):
            raise
