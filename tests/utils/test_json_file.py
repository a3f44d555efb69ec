"""JSON files are whole or as they were before."""

from __future__ import annotations

import json
import os
import threading

import pytest

from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.json import write_as_asked, write_json


def test_folders_are_made_and_an_older_file_is_replaced(tmp_path):
    path = tmp_path / "new" / "result.json"
    write_json(path, {"a": 1})
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert list(path.parent.iterdir()) == [path]


def test_what_cannot_be_written_leaves_the_older_file(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    (tmp_path / "result.json.partial").mkdir()
    with pytest.raises(UserError, match=r"--json .*result.json cannot be written: Is a directory; name another file"):
        write_as_asked("--json", path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}


def test_a_pipe_is_written_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_json(pipe, {"a": 1})
    reader.join(10)
    assert json.loads(read[0]) == {"a": 1} and pipe.is_fifo()
