"""Errors that users meet, as the libraries word them, each with its cause; and errors that must not be explained."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO
from unsloth_ddp.utils.error_table import KNOWN_ERRORS
from unsloth_ddp.utils.known_errors import explain, find_known_error, messages

# Messages with the names of their rows in the table, and messages that no row explains.
MESSAGES = json.loads((Path(__file__).parent / "known_errors.json").read_text(encoding="utf-8"))
KNOWN, UNRELATED = MESSAGES["known"], MESSAGES["unrelated"]


@pytest.mark.parametrize(("name", "text"), KNOWN, ids=[f"{i}-{name}" for i, (name, _) in enumerate(KNOWN)])
def test_a_known_error_is_explained(name, text):
    known = find_known_error(text)
    assert known is not None and known.name == name, known


def test_every_known_error_has_a_real_message():
    assert {known.name for known in KNOWN_ERRORS} == {name for name, _ in KNOWN}
    assert len(KNOWN_ERRORS) >= 25


@pytest.mark.parametrize("text", UNRELATED)
def test_an_unrelated_error_is_not_explained(text):
    assert explain(text) == "", find_known_error(text)


def test_only_messages_of_a_traceback_are_searched():
    text = (
        "Traceback (most recent call last):\n"
        '  File "/venv/safetensors/torch.py", line 3, in load\n'
        "    raise OutOfMemoryError if NCCL else EADDRINUSE\n"
        "ValueError: no\n"
        "\nThe above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/app/x.py", line 1, in <module>\n'
        "KeyError: 'a'\n"
    )
    assert find_known_error(text) is None
    assert "ValueError: no" in messages(text) and "safetensors" not in messages(text)
    assert (
        find_known_error(text.replace("ValueError: no", "OSError: [Errno 28] No space left on device")).name
        == "disk full"
    )


def test_causes_and_fixes_are_sentences():
    for known in KNOWN_ERRORS:
        assert known.cause[0].isupper() or known.cause.startswith(("bitsandbytes", "flash-attn", "torch.compile")), (
            known
        )
        assert known.cause.endswith(".") and known.fix.endswith("."), known
        assert (known.cause + known.fix).isascii(), known
        re.compile(known.pattern)


def test_options_named_in_the_fixes_exist():
    import dataclasses

    from unsloth_ddp.config.options import Settings

    others = {
        "num_processes", "main_process_port", "master_port", "gpus", "ipc", "locked", "extra", "force", "clear",
        "torch", "with",
    }  # fmt: skip
    named = set(re.findall(r"--([a-z_]{3,})", " ".join(known.fix for known in KNOWN_ERRORS)))
    assert named - others <= {f.name for f in dataclasses.fields(Settings)} | {"shm"}


FAILING = """
import sys, train_ddp
def open_run(settings, ranks):
    raise OSError(28, "No space left on device", "/scratch/x")
train_ddp.open_run = open_run
sys.argv = ["train_ddp.py"]
train_ddp.main()
"""


def test_the_explanation_stands_under_the_original_error():
    done = subprocess.run([sys.executable, "-c", FAILING], cwd=REPO, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0].startswith("Traceback") and lines[-3].startswith("OSError: [Errno 28]")
    assert lines[-2].startswith("  cause: A disk") and lines[-1].startswith("  what helps: free space")
