"""End a process with an exit code and a sentence, and pass the code on where launchers lose it."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from unsloth_ddp.distributed.ranks import node_range
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.redaction import hide

EXIT_FAILURE, EXIT_USER_ERROR, EXIT_STOPPED = 1, UserError.exit_code, 75
END_SENTENCE = {
    EXIT_FAILURE: "The run failed; the reason is printed above the launcher's report.",
    EXIT_STOPPED: "The run was stopped on request (exit code 75); the same command continues from its last checkpoint.",
}


@contextlib.contextmanager
def quiet(active: bool = True) -> Iterator[None]:
    """Discard standard output inside this block; standard error stays."""
    if not active:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def under_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether accelerate or torchrun started this process."""
    # Not ACCELERATE_MIXED_PRECISION, which the kit sets too.
    return "TORCHELASTIC_RUN_ID" in environ or "ACCELERATE_DYNAMO_BACKEND" in environ


def describe_exit_code(code: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return the exit code in words, with the one that the shell gets if a launcher stands between."""
    return f"exit code {code}" + (", which the launcher turns into 1" if under_launcher(environ) else "")


def _code_file(environ: Mapping[str, str]) -> str | None:
    """Return the file named by UNSLOTH_DDP_EXIT_CODE_FILE, in the first process of each node."""
    return environ.get("UNSLOTH_DDP_EXIT_CODE_FILE") if environ.get("LOCAL_RANK", "0") == "0" else None


def note_exit_code(code: int, environ: Mapping[str, str] = os.environ, *, sentence: str = "") -> None:
    """Write why this process ends for the job's script and for the launcher, which turns every exit code into 1.

    The first process of each node writes the code to the file named by UNSLOTH_DDP_EXIT_CODE_FILE, and the sentence
    beside it and to the file named by TORCHELASTIC_ERROR_FILE, which torch's launcher prints at the end of its report.
    Neither is written if its variable is not set.
    """
    if not code or environ.get("LOCAL_RANK", "0") != "0":
        return
    _note("", code, environ)
    _note(".why", hide(sentence), environ)
    if path := environ.get("TORCHELASTIC_ERROR_FILE"):
        # The launcher takes the failure with the earliest time for the cause of the others.
        message = hide(sentence) or END_SENTENCE.get(code, END_SENTENCE[EXIT_FAILURE])
        report = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(report), encoding="utf-8")


def _note(suffix: str, content: object, environ: Mapping[str, str]) -> None:
    """Write a line into the file of the exit code, or into one beside it with this suffix."""
    if path := _code_file(environ):
        with contextlib.suppress(OSError):
            Path(f"{path}{suffix}").write_text(f"{content}\n", encoding="utf-8")


def forget_exit_code(environ: Mapping[str, str] = os.environ) -> None:
    """Remove the code that an earlier start of this node's ranks has noted: a launcher starts them again by itself."""
    if path := _code_file(environ):
        with contextlib.suppress(OSError):
            for name in (path, f"{path}.why"):
                Path(name).unlink(missing_ok=True)


def note_saved_step(step: int, environ: Mapping[str, str] = os.environ) -> None:
    """Write the step of a complete checkpoint for the job's script, which counts only restarts without a new one."""
    _note(".step", step, environ)


def note_finished(environ: Mapping[str, str] = os.environ) -> None:
    """Tell the job's script that the result is written: a process that dies after that is no reason to start again."""
    _note(".done", "", environ)


# Sentences that a thread of this process has printed or is about to print.
_printed: set[str] = set()


def first_to_tell(sentence: str) -> bool:
    """Return whether no thread of this process has asked for this sentence yet.

    A process with much to take down may be ended by its watchdog, which prints the error's sentence first.
    """
    first = sentence not in _printed
    _printed.add(sentence)
    return first


def joins_elastic_job(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher of this first process of a node is in an elastic job that saved no step with it."""
    path = _code_file(environ)
    return path is not None and bool(node_range(environ)) and not Path(f"{path}.step").exists()


def exit_with(error: UserError, is_main: bool) -> NoReturn:
    """End this process with the code of a UserError or RunError; the main process prints the sentence.

    Launchers end every process as soon as one has failed, so the others wait for the main process to print. A node
    that joins an elastic job asks its launcher to stop, which would otherwise end the job for all nodes.
    """
    leaves = error.exit_code == EXIT_USER_ERROR and joins_elastic_job()
    if (is_main or leaves) and first_to_tell(str(error)):
        print(f"train_ddp.py: error: {error}", file=sys.stderr, flush=True)
    elif not is_main:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Event().wait(timeout=20)
    note_exit_code(error.exit_code, sentence=f"train_ddp.py: error: {error}")
    if leaves:
        os.kill(os.getppid(), signal.SIGTERM)
    os._exit(error.exit_code)
