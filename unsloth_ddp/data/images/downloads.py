"""Download the images of rows that are addresses, once for all runs of a node."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
import time
from pathlib import Path

from unsloth_ddp.data.images.values import without_query
from unsloth_ddp.utils.errors import UserError, one_line, os_reason

# For one image: seconds in all, seconds without an answer, and attempts after the first.
SECONDS, SILENT_SECONDS, RETRIES = 60.0, 15.0, 2


def folder() -> Path:
    """Return where downloaded images are kept."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "unsloth_ddp" / "images"


def downloaded(address: str, most_bytes: int) -> Path:
    """Return the file with the image of an address, in a folder beside the Hub's cache.

    Later runs read the same file, also if the image at the address has changed since.

    Raises:
        UserError: it cannot be downloaded or written, or has more bytes.
    """
    path = folder() / hashlib.sha256(address.encode()).hexdigest()
    if path.exists():
        return path
    content = _content(address, most_bytes)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Several processes may read the same row of a stream.
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError as error:
        raise UserError(
            f"{path.parent} cannot keep a downloaded image: {os_reason(error)}; free it or set HF_HOME."
        ) from None
    return path


def _content(address: str, most_bytes: int) -> bytes:
    from huggingface_hub.utils import http_stream_backoff

    logging.getLogger(http_stream_backoff.__module__).addFilter(_without_queries)
    name, content, end = without_query(address), bytearray(), time.monotonic() + SECONDS
    try:
        with http_stream_backoff(
            "GET", address, max_retries=RETRIES, follow_redirects=True, timeout=SILENT_SECONDS
        ) as answer:
            if not answer.is_success:
                raise UserError(_refused(name, f"the server answers {answer.status_code} {answer.reason_phrase}"))
            for part in answer.iter_bytes():
                content += part
                if len(content) > most_bytes:
                    raise UserError(f"image {name} has over {most_bytes:,} bytes, the limit; write it smaller.")
                if time.monotonic() > end:
                    raise UserError(
                        f"image {name} takes more than {SECONDS:.0f} seconds to download; download it first."
                    )
    except UserError:
        raise
    except Exception as error:  # those of the HTTP client and of the Hub's offline mode have no common class
        cause = one_line(str(error) or type(error).__name__, 150).rstrip(".").replace(address, name)
        raise UserError(_refused(name, cause)) from None
    return bytes(content)


def _without_queries(record: logging.LogRecord) -> bool:
    """Take what may hold a signature out of a message about another attempt."""
    record.msg, record.args = re.sub(r"(https?://[^\s?]+)\?\S*", r"\1", record.getMessage()), ()
    return True


def _refused(name: str, cause: str) -> str:
    return f"image {name} cannot be downloaded: {cause}; check it, or give the path of a file."
