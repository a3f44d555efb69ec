"""The script as a whole: what survives untouched, its prologue and its end."""

import subprocess
import sys

import pytest
from making import LOAD, TRAIN, body, convert_cells, notebook

from unsloth_ddp.notebook.reader import from_node
from unsloth_ddp.notebook.types import Conversion, NotebookError

DATA = "from datasets import load_dataset\ndataset = load_dataset('d')"


def test_strings_comments_and_cells_survive() -> None:
    cell = (
        "# a comment\ntext = '''one\n  two  \n\n\tthree'''   # at the end\n"
        'if model:\n    more = """\nflush left\n"""\n'
        "x = [1,2 ,3]  # odd   spacing\n# last"
    )
    assert cell in convert_cells(LOAD, cell).script


def test_strings_are_not_indented_inside_a_guard() -> None:
    text = body(convert_cells(LOAD, 'print(model.generate("""a\n  b\nc"""))\nprint(1)'))
    assert 'if IS_MAIN:\n    print(model.generate("""a\n  b\nc"""))\n    print(1)' in text


def test_blank_lines_stay_blank_inside_a_guard() -> None:
    assert "    model.generate(1)\n\n    print(2)\n" in body(convert_cells(LOAD, "model.generate(1)\n\nprint(2)"))


def test_markdown_becomes_comments_and_cells_keep_their_marks() -> None:
    text = convert_cells("md:# Title\n\ntext", LOAD, "md:end").script
    assert "# %% [markdown]\n# # Title\n#\n# text\n" in text and text.count("# %%\n") >= 2


def test_converting_twice_gives_the_same_bytes() -> None:
    cells = (LOAD, DATA, "print(1)\nimport os\n!ls", TRAIN, "model.save_pretrained('x')")
    assert convert_cells(*cells).script == convert_cells(*cells).script


def test_the_prologue_comes_before_unsloth() -> None:
    text = convert_cells("import os\nos.environ['A'] = '1'", LOAD, DATA, TRAIN).script
    places = [
        text.index(part)
        for part in (
            'RANK = int(os.environ.get("RANK", 0))',
            'os.environ["UNSLOTH_DISABLE_TRAINER_PATCHING"] = "1"',
            'os.environ["UNSLOTH_NO_CUDA_EXTENSIONS"] = "1"',
            "os.environ['A'] = '1'",
            "torch.cuda.set_device(LOCAL_RANK)",
            "from unsloth import",
        )
    ]
    assert places == sorted(places)


def test_the_end_leaves_the_process_group_on_success_and_on_error() -> None:
    text = convert_cells(LOAD, DATA, TRAIN).script
    assert text.endswith('finish("model", "tokenizer", "trainer")\n')
    assert "@atexit.register\ndef leave_process_group" in text


def test_only_the_helpers_in_use_are_written() -> None:
    text = convert_cells(LOAD).script
    assert "def main_process_first" not in text and "def from_main" not in text and "def run_shell" not in text


def test_the_prologue_s_names_give_way() -> None:
    text = convert_cells(LOAD, "RANK = 8\nLOCAL_RANK = 3", DATA, TRAIN).script
    assert "ddp_RANK = int(" in text and '{"": ddp_LOCAL_RANK}' in text and "IS_MAIN = ddp_RANK == 0" in text


def test_the_prologue_s_modules_give_way() -> None:
    """`from datetime import datetime` would take the module's name from the helpers."""
    text = convert_cells(LOAD, "from datetime import datetime\ntorch = 1\nimport math", DATA, TRAIN).script
    assert "import torch as ddp_torch\n\nif ddp_torch.cuda" in text
    assert "import datetime as ddp_datetime\n" in text and "ddp_datetime.timedelta(" in text
    assert "import math\n" in text and "ddp_math" not in text


def test_future_imports_stay_first() -> None:
    text = convert_cells("from __future__ import annotations\nimport os", LOAD).script
    compile(text, "script", "exec")
    assert text.index("from __future__") < text.index("import atexit")


def test_the_script_imports_nothing_of_the_kit() -> None:
    assert "unsloth_ddp" not in convert_cells(LOAD, DATA, TRAIN).script


def test_helpers_run_in_one_process(tmp_path: object) -> None:
    done = convert_cells(
        "import sys, types\nsys.modules['unsloth'] = types.ModuleType('unsloth')\nimport unsloth",
        "rows = !echo a; echo b\nassert rows == ['a', 'b'], rows\n!echo from the shell\nprint('said', rows)",
    )
    ran = subprocess.run([sys.executable, "-c", done.script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "from the shell" in ran.stdout and "said ['a', 'b']" in ran.stdout


def _lines(done: Conversion) -> list[str]:
    return done.script.split("\n")


def test_every_finding_has_its_cell_and_line() -> None:
    done = convert_cells("md:intro", LOAD, DATA, "import subprocess\np = subprocess.Popen('x')", TRAIN)
    for finding in [*done.report.edits, *done.report.warnings]:
        assert finding.line is not None and finding.message in _lines(done)[finding.line - 1]
    assert [f.cell for f in done.report.edits if f.kind == "load"] == [2]
    assert [(f.kind, f.cell) for f in done.report.warnings] == [("server", 4)]


@pytest.mark.parametrize(("cell", "expected"), [("x = (", "cell 2"), ("print 'x'", "cell 2"), ("return 1", "return 1")])
def test_a_cell_that_is_not_python_is_named(cell: str, expected: str) -> None:
    with pytest.raises(NotebookError, match=expected):
        convert_cells(LOAD, cell)


def test_a_notebook_without_training_is_refused() -> None:
    with pytest.raises(NotebookError, match="no cell trains"):
        convert_cells("import pandas as pd\nprint(pd.DataFrame())")


def test_lists_of_lines_and_missing_fields_are_read() -> None:
    data = notebook(LOAD)
    data["cells"][0] = {"cell_type": "code", "source": ["import torch\n", "x = 1"]}
    data["cells"].append({"cell_type": "unknown"})
    assert from_node(data, "n").cells[0].source == "import torch\nx = 1"
