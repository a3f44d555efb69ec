"""The command line: what it writes, what it prints, and every input it refuses."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from making import LOAD, TRAIN, notebook, write

from unsloth_ddp.notebook.cli import main

DATA = "from datasets import load_dataset\ndataset = load_dataset('d')"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in.ipynb", LOAD, DATA, TRAIN)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one sentence with which the command refuses; nothing may be written."""
    before = {path for argument in arguments for path in Path(str(argument)).absolute().parent.glob("*")}
    assert main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    after = {path for argument in arguments for path in Path(str(argument)).absolute().parent.glob("*")}
    assert printed.out == "" and after == before
    assert printed.err.count("\n") == 1 and printed.err.startswith("notebook_to_script.py: ")
    assert "Traceback" not in printed.err
    return printed.err


def test_it_writes_a_script_and_prints_a_table(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(source), str(tmp_path / "out.py")]) == 0
    compile((tmp_path / "out.py").read_text(), "out.py", "exec")
    printed = capsys.readouterr().out
    assert "in.ipynb -> " in printed and "no warnings" in printed and "batch" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.ipynb", "out.py"]  # no temporary file left


def test_the_name_of_the_script_may_be_left_out(source: Path, tmp_path: Path) -> None:
    assert main([str(source)]) == 0 and (tmp_path / "in.py").exists()


def test_converting_twice_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    assert main([str(source), str(tmp_path / "a.py")]) == main([str(source), str(tmp_path / "b.py")]) == 0
    assert (tmp_path / "a.py").read_bytes() == (tmp_path / "b.py").read_bytes()


def test_the_report_as_json(source: Path, tmp_path: Path) -> None:
    assert main([str(source), str(tmp_path / "out.py"), "--report", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    lines = (tmp_path / "out.py").read_text().split("\n")
    assert report["notebook"] == "in.ipynb" and report["warnings"] == []
    for edit in report["edits"]:
        assert set(edit) == {"kind", "message", "cell", "line"} and edit["message"] in lines[edit["line"] - 1]


def test_what_the_notebook_installed_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    installs = "!pip install --no-deps trl==0.22.2 'accelerate>=1.0'\n!pip install trl"
    source = write(tmp_path / "in.ipynb", installs, LOAD, DATA, TRAIN)
    assert main([str(source), str(tmp_path / "out.py"), "--report", str(tmp_path / "r.json")]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "pip install" in line)
    command = line[line.index("pip install") :]
    assert shlex.split(command) == ["pip", "install", "trl==0.22.2", "accelerate>=1.0"]
    assert json.loads((tmp_path / "r.json").read_text())["requirements"] == ["trl==0.22.2", "accelerate>=1.0"]


def test_check_fails_on_a_warning_only(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(source), str(tmp_path / "a.py"), "--check"]) == 0
    warned = write(tmp_path / "w.ipynb", LOAD, "p = subprocess.Popen('x')", DATA, TRAIN)
    assert main([str(warned), str(tmp_path / "b.py"), "--check"]) == 1
    assert (tmp_path / "b.py").exists() and "cell 2, line" in capsys.readouterr().out
    assert main([str(warned), str(tmp_path / "c.py")]) == 0


def test_dry_run_writes_nothing(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(source), "--dry-run"]) == 0
    assert "nothing written" in capsys.readouterr().out and not (tmp_path / "in.py").exists()


def test_diff_against_nbconvert(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(source), "--dry-run", "--diff"]) == 0
    printed = capsys.readouterr().out
    assert "+    per_device_train_batch_size = 1,\n" in printed and "-    per_device_train_batch_size = 2,\n" in printed


def test_force_replaces(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.py"
    target.write_text("mine")
    assert "exists already" in refused(capsys, source, target) and target.read_text() == "mine"
    assert main([str(source), str(target), "--force"]) == 0 and target.read_text() != "mine"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "not JSON"),
        ("[1, 2]", "not a notebook"),
        ("{}", "not a notebook"),
        ('{"nbformat": 4}', "no list of cells"),
        ('{"nbformat": 3, "worksheets": []}', "nbformat 3 is too old"),
        ('{"nbformat": 3, "cells": []}', "nbformat 3 is too old"),
        ('{"nbformat": 4, "cells": [1, 2]}', "cell 1 is not a cell; open"),
        ('{"nbformat": 4, "cells": [{"cell_type": "code", "source": 5}]}', "the source of cell 1 is not text; open"),
        ('{"nbformat": 4, "cells": [{"cell_type": "code", "source": ["a", 5]}]}', "the source of cell 1 is not text"),
        ('{"nbformat": 4, "cells": [{}, {"cell_type": "code", "source": null}]}', "the source of cell 2 is not text"),
        (b"\xff\xfe\x00", "not JSON ('utf-8' codec"),
        (json.dumps(notebook(LOAD, kernelspec={"name": "ir", "language": "R"})), "runs R"),
        (json.dumps(notebook(LOAD, language_info={"name": "julia"})), "runs julia"),
        (json.dumps(notebook(LOAD, kernelspec={"name": "julia-1.9"})), "runs julia"),
        (json.dumps(notebook(LOAD, "md:x", "x = (")), "cell 3 is not Python (line 1"),
        (json.dumps(notebook(LOAD, "def f(:\n  pass")), "cell 2 is not Python"),
        (json.dumps(notebook("print(1)")), "no cell trains"),
        (json.dumps(notebook()), "no cell trains"),
    ],
)
def test_bad_notebooks(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | bytes, said: str) -> None:
    path = tmp_path / "bad.ipynb"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refused(capsys, path, tmp_path / "out.py")
    assert said in message and str(path) in message


def test_bad_paths(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "(No such file or directory)" in refused(capsys, tmp_path / "missing.ipynb", tmp_path / "out.py")
    assert "missing.ipynb: cannot be read (No such" in refused(capsys, tmp_path / "none" / "missing.ipynb")
    assert "(Is a directory)" in refused(capsys, tmp_path, tmp_path / "out.py")
    assert "is a folder" in refused(capsys, source, tmp_path)
    assert "is the notebook itself" in refused(capsys, source, source, "--force")
    assert "folder does not exist" in refused(capsys, source, tmp_path / "none" / "out.py")
    report = tmp_path / "none" / "r.json"
    assert "folder does not exist" in refused(capsys, source, tmp_path / "out.py", "--report", report)


def test_an_address_is_refused_with_the_way_to_download_it(capsys: pytest.CaptureFixture[str]) -> None:
    address = "https://colab.research.google.com/github/unslothai/notebooks/blob/main/nb/Qwen3_(14B).ipynb"
    assert f"{address}: is an address; download the notebook (in Colab: File > Download; " in refused(capsys, address)


def test_a_script_is_written_whole_or_not_at_all(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert "cannot be written (No space left" in refused(capsys, source, tmp_path / "out.py")


@pytest.mark.parametrize("size", ["0", "-1", "two"])
def test_bad_batch_sizes(source: Path, capsys: pytest.CaptureFixture[str], size: str) -> None:
    with pytest.raises(SystemExit) as exited:
        main([str(source), "--per-device-batch-size", size])
    assert exited.value.code == 2 and "neither a number of rows" in capsys.readouterr().err


def test_batch_sizes(source: Path, tmp_path: Path) -> None:
    assert main([str(source), str(tmp_path / "a.py"), "--per-device-batch-size", "4"]) == 0
    assert "accumulation_steps(2 * 4, 4)" in (tmp_path / "a.py").read_text()
    assert main([str(source), str(tmp_path / "b.py"), "--per-device-batch-size", "keep"]) == 0
    assert "batch_per_process(2, 4)" in (tmp_path / "b.py").read_text()


def test_the_script_at_the_top_and_a_cheap_import(source: Path, tmp_path: Path) -> None:
    """One process: the command as users type it, which must not wait for torch."""
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['notebook_to_script.py', {str(source)!r}, {str(tmp_path / 'out.py')!r}]\n"
        "try:\n    runpy.run_path('notebook_to_script.py', run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "assert not {'torch', 'transformers', 'unsloth'} & set(sys.modules), 'heavy imports'\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "out.py").exists()


def test_jupyter_nbconvert(source: Path, tmp_path: Path) -> None:
    """The exporter gives what the command gives."""
    command = [sys.executable, "-m", "nbconvert", "--to", "unsloth-ddp", str(source)]
    command += ["--output-dir", str(tmp_path / "o")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr
    assert "in.ipynb -> a script that trains under DDP" in ran.stderr and "nothing written" not in ran.stderr
    assert main([str(source), str(tmp_path / "out.py")]) == 0
    assert (tmp_path / "o" / "in.py").read_bytes() == (tmp_path / "out.py").read_bytes()
