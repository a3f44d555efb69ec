"""Write one log file a rank, and keep libraries from writing over the run's own output."""

import logging
import os
import sys
from io import TextIOWrapper
from pathlib import Path

from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.run.documents.files import LOGS
from unsloth_ddp.utils.errors import os_reason
from unsloth_ddp.utils.files.safe import open_without_following_links
from unsloth_ddp.utils.redaction import hide
from unsloth_ddp.utils.streams import print_to_stderr, stream_handlers

# Transformers' logger does not hand its messages on to the root logger; nor does the kit's, because Unsloth gives the
# root logger a handler that writes to the terminal of every rank.
LOGGERS = (None, "transformers", "unsloth_ddp")


def start_logging(folder: Path, runtime: Runtime) -> None:
    """Start this rank's log file, for the kit and every library; without one the run goes on."""
    path = folder / LOGS / f"rank_{runtime.ranks.rank}.log"
    try:
        to_file = _LogFile(path, encoding="utf-8")
    except OSError as error:
        print_to_stderr(f"{path} cannot be written ({os_reason(error)}), so this rank has no log.\n")
        return
    to_file.setFormatter(_WithoutSecrets("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in LOGGERS:
        logging.getLogger(name).addHandler(to_file)
    ours = logging.getLogger("unsloth_ddp")
    ours.setLevel(logging.INFO)
    ours.propagate = False
    logging.captureWarnings(True)
    # From here on the file has what libraries say, and the terminal only their errors.
    for handler in stream_handlers():
        handler.setLevel(max(handler.level, logging.ERROR))


def stop_library_output(runtime: Runtime) -> None:
    """Keep the warnings of the main process, and no progress bars; call it after importing the backend."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # DeepSpeed's config has the accumulation that the batch plan decided; accelerate's own count is not used then.
    logging.getLogger("accelerate.accelerator").addFilter(
        lambda record: "Gradient accumulation steps mismatch" not in record.getMessage()
    )
    if not runtime.ranks.is_main:
        transformers.utils.logging.set_verbosity_error()
        for handler in logging.getLogger().handlers:
            if type(handler) is logging.StreamHandler:
                handler.setLevel(logging.CRITICAL)


class _LogFile(logging.FileHandler):
    """A log file that is given up when it cannot be written; the default prints a traceback a line.

    A link that somebody put in its place is not followed.
    """

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        descriptor = open_without_following_links(Path(self.baseFilename), flags)
        return open(descriptor, "a", encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self)
        print(f"{self.baseFilename} can no longer be written: {sys.exc_info()[1]}", flush=True)


class _WithoutSecrets(logging.Formatter):
    """Hide what looks like a secret: libraries log addresses and arguments."""

    def format(self, record: logging.LogRecord) -> str:
        return hide(super().format(record))
