"""End a process with an exit code and a sentence, and pass the code on where launchers lose it."""

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
    """Discard standard output inside this block; standard error stays."""
    if not active:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def note_exit_code(code: int, environ: Mapping[str, str] = os.environ) -> None:
    """Write this process's exit code for the job's script, because launchers turn every code into 1.

    The first process of each node writes the file named by UNSLOTH_DDP_EXIT_CODE_FILE, if it is set.
    """
    path = environ.get("UNSLOTH_DDP_EXIT_CODE_FILE")
    if code and path and environ.get("LOCAL_RANK", "0") == "0":
        with contextlib.suppress(OSError):
            Path(path).write_text(f"{code}\n", encoding="utf-8")


def exit_with(error: UserError, is_main: bool) -> NoReturn:
    """End this process with the code of a UserError or RunError; the main process prints the sentence.

    Launchers end every process as soon as one has failed, so the others wait for the main process to print.
    """
    if is_main:
        print(f"train_ddp.py: error: {error}", file=sys.stderr, flush=True)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Event().wait(timeout=20)
    note_exit_code(error.exit_code)
    os._exit(error.exit_code)
