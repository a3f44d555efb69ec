"""End a process with the exit code and the sentence that its launcher and its user are to see."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from unsloth_ddp.utils.errors import UserError

EXIT_FAILURE, EXIT_USER_ERROR, EXIT_STOPPED = 1, UserError.exit_code, 75


@contextlib.contextmanager
def quiet(active: bool = True) -> Iterator[None]:
    """Drop what libraries print to standard output; errors still reach standard error."""
    if not active:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def note_exit_code(code: int, environ: Mapping[str, str] = os.environ) -> None:
    """Leave this process's exit code where the job's script finds it: launchers turn every code into 1.

    The first process of each node writes the file named by UNSLOTH_DDP_EXIT_CODE_FILE, if it is set.
    """
    path = environ.get("UNSLOTH_DDP_EXIT_CODE_FILE")
    if code and path and environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):
            Path(path).write_text(f"{code}\n", encoding="utf-8")


def exit_with(error: UserError, is_main: bool) -> NoReturn:
    """End this process over a user's mistake (or a RunError): the main process says the sentence, the others stay silent.

    Launchers end every process as soon as one has failed, so the others leave the main process time to speak.
    """
    if is_main:
        print(f"train_ddp.py: error: {error}", file=sys.stderr, flush=True)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Event().wait(timeout=20)
    note_exit_code(error.exit_code)
    os._exit(error.exit_code)
