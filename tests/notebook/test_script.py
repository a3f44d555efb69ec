"""The script as a whole: what survives untouched, its prologue and its end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from making import LOAD, TRAIN, body, convert_cells, notebook

from unsloth_ddp.notebook.convert import convert_notebook
from unsloth_ddp.notebook.read.reader import from_node
from unsloth_ddp.notebook.types import Conversion, ConversionOptions, NotebookError

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


def test_a_script_runs_in_one_process(tmp_path: Path) -> None:
    """Nothing heavy is imported before the notebook does it, and helpers act as IPython does."""
    done = convert_cells(
        "import os, sys, types\nassert 'torch' not in sys.modules\nprint('as in the notebook')",
        "rows = !echo a; echo b\nassert rows == ['a', 'b'], rows\n!echo from the shell\nprint('said', rows)",
        "%cd /content/drive/MyDrive\nprint(os.getcwd())",
        "%cd sub\nprint(os.getcwd())\n%cd /content\nprint(os.getcwd())\n%cd /content/sub\nprint(os.getcwd())",
        "def show(x):\n    display(x)\nshow('inside')\ndisplay('outside')",
        "sys.modules['unsloth'] = types.ModuleType('unsloth')\nimport unsloth",
    )
    (tmp_path / "sub").mkdir()
    ran = subprocess.run([sys.executable, "-c", done.script], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr[-2000:]
    start, sub = os.path.realpath(tmp_path), os.path.realpath(tmp_path / "sub")
    assert ran.stdout.splitlines() == [
        "as in the notebook", "from the shell", "said ['a', 'b']", start, sub, start, sub, "inside", "outside",
    ]  # fmt: skip


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


def test_lists_of_lines_and_missing_fields_are_read() -> None:
    data = notebook(LOAD)
    data["cells"][0] = {"cell_type": "code", "source": ["import torch\n", "x = 1"]}
    data["cells"].append({"cell_type": "unknown"})
    assert from_node(data, "n").cells[0].source == "import torch\nx = 1"


@pytest.mark.parametrize("name", ["a\nraise SystemExit(7)\n.ipynb", "a\rraise SystemExit(7)\r.ipynb"])
def test_a_notebook_s_name_stays_a_comment(name: str) -> None:
    script = convert_notebook(from_node(notebook(LOAD), name), ConversionOptions()).script
    assert not any(line.startswith("raise") for line in script.replace("\r", "\n").split("\n"))


@pytest.mark.parametrize(
    "cell",
    [
        '%%bash\npip install "x\nraise SystemExit(7)\n"',
        "t = SFTTrainer(model, args=SFTConfig(ddp_find_unused_parameters=(\nTrue\n)))\nt.train()",
    ],
)
def test_what_a_comment_quotes_stays_on_its_line(cell: str) -> None:
    script = convert_cells(LOAD, cell).script
    compile(script, "script", "exec")
    assert not any(line.startswith(("raise", "True")) for line in script.splitlines())


def test_what_the_converter_adds_stands_in_one_region_at_the_top() -> None:
    text = convert_cells("print('first')", LOAD, DATA, TRAIN, "print('last')").script
    assert text.count("# region") == text.count("# endregion") == 1
    assert text.index("# endregion") < text.index("print('first')") < text.index("set_device")
    between = text[text.index("# endregion") : text.index("finish(")]
    assert "\ndef " not in between and "if IS_MAIN:\n    print" not in text


@pytest.mark.parametrize(
    ("first", "inside"),
    [
        ("md:# Title", True),
        ("import os, re", True),
        ("!pip install x", True),
        ("import os\nos.environ['A'] = '1'", False),
    ],
)
def test_the_device_is_chosen_in_the_region_unless_code_comes_before(first: str, inside: bool) -> None:
    text = convert_cells(first, LOAD, DATA, TRAIN).script
    assert text.count("torch.cuda.set_device(LOCAL_RANK)") == 1
    assert (text.index("set_device") < text.index("# endregion")) is inside
    assert text.index("set_device") < text.index("from unsloth import")


def test_the_group_serves_processors_and_gpus() -> None:
    text = convert_cells(LOAD, DATA, TRAIN).script
    assert '"cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"' in text


def test_the_hash_seed_is_set_only_where_order_depends_on_it() -> None:
    assert "PYTHONHASHSEED" in convert_cells(LOAD, "labels = list(set(rows))").script
    assert "PYTHONHASHSEED" in convert_cells(LOAD, "labels = [x for x in {y for y in rows}]").script
    assert "PYTHONHASHSEED" not in convert_cells(LOAD, "labels = sorted(rows)").script


def test_expressions_that_do_nothing_and_plain_prints_get_no_guard() -> None:
    text = body(convert_cells(LOAD, DATA, "dataset[0]\nx = 1", "print(len(dataset))", TRAIN))
    assert "\ndataset[0]\n" in text and "\nprint(len(dataset))\n" in text and "if IS_MAIN" not in text


def test_a_written_file_s_text_can_be_read() -> None:
    text = body(convert_cells(LOAD, "%%writefile x.py\nimport re\nprint(re.sub('\\d', '\\n', '1'))\n", TRAIN))
    assert ".write(r\"\"\"import re\nprint(re.sub('\\d', '\\n', '1'))\n\"\"\")" in text


def test_the_command_can_be_started_by_its_name() -> None:
    import os
    from pathlib import Path

    command = Path(__file__).resolve().parents[2] / "notebook_to_script.py"
    assert os.access(command, os.X_OK) and command.read_text().startswith("#!/usr/bin/env python3\n")
