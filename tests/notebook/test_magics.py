"""IPython's syntax, and what each piece of it becomes."""

import ast
import builtins

import pytest
from IPython.utils.text import DollarFormatter
from making import LOAD, body, convert_cells, kinds

from unsloth_ddp.notebook.syntax.ipython import (
    as_python_string,
    is_install,
    requirement_names,
    split_commands,
    without_installs,
)


@pytest.mark.parametrize(
    "command",
    [
        "pip install x",
        "pip3 install -q x",
        "python -m pip install x",
        "{sys.executable} -m pip install x",
        "uv pip install x",
        "uv add x",
        "sudo apt-get install -y ffmpeg",
        "apt install ffmpeg",
        "conda install x",
        "curl -LsSf https://astral.sh/uv/install.sh | sh",
        "CMAKE_ARGS=-DX pip install x",
        "pip uninstall -y x",
        "(apt-get update && apt-get install -y x) > /dev/null",
    ],
)
def test_installs_are_recognised(command: str) -> None:
    assert is_install(command)


@pytest.mark.parametrize(
    "command", ["git clone x", "ls pip", "./setup.sh", "echo pip install", "wget x", "python run.py"]
)
def test_other_commands_are_not_installs(command: str) -> None:
    assert not is_install(command)


def test_a_mixed_line_loses_only_its_installs() -> None:
    kept, wanted = without_installs('pip install "trl==0.22.2" # pinned')
    assert (kept, wanted) == ("", ["trl==0.22.2"])
    assert without_installs("pip install a && wget b")[0] == "wget b"
    assert without_installs("git clone x && cd x && ls") == ("git clone x && cd x && ls", [])


def test_a_group_stays_whole() -> None:
    assert without_installs("(cd x && pip install .)")[0] == "(cd x && pip install .)"
    assert without_installs("cp a b && (apt-get update && apt-get install x)")[0] == "cp a b"


@pytest.mark.parametrize(
    "line",
    [
        "command -v x >/dev/null || (apt-get update && apt-get install x)",
        "which x || pip install x",
        "[ -d /x ] && pip install x",
        "command -v x || which y || pip install y",
    ],
)
def test_a_test_that_only_decides_an_install_goes_with_it(line: str) -> None:
    """Leave out a test whose command was dropped: it would be guarded and do nothing."""
    assert without_installs(line)[0] == ""


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("which python; pip install x", "which python"),
        ("test -d a && cp a b; pip install x", "test -d a && cp a b"),
        ("test -d a || git clone a; pip install x", "test -d a || git clone a"),
    ],
)
def test_a_test_that_decides_more_or_shows_something_stays(line: str, kept: str) -> None:
    assert without_installs(line)[0] == kept


SCRIPT = """pip install -q uv
case "$TAG" in
  a.[0-4]) T="$TAG" ;;
  *) T="b" ;;
esac
uv pip install x==1 --index-url "https://y/${T}"
"""


def test_a_script_that_only_chooses_what_to_install_goes() -> None:
    assert without_installs(SCRIPT) == ("", ["uv", "x==1"])


def test_a_scripts_compound_commands_stay_whole() -> None:
    kept, _ = without_installs(SCRIPT + "wget z\n")
    assert kept == SCRIPT.replace("pip install -q uv", ":").replace(
        'uv pip install x==1 --index-url "https://y/${T}"', ":"
    ) + ("wget z")


def test_operators_inside_quotes_do_not_split() -> None:
    assert [text for text, _ in split_commands("echo 'a && b' && ls")] == ["echo 'a && b' ", " ls"]


def test_requirements_skip_options_and_names_only_the_run_knows() -> None:
    assert requirement_names('pip install --no-deps -r req.txt trl==1 {xformers} "datasets>=3,<4" > /dev/null') == [
        "trl==1",
        "datasets>=3,<4",
    ]


SPACE = {"name": "N", "url": "U", "size": 3, "paths": {"a": "b c"}, "rows": [1, 2, 3]}


@pytest.mark.parametrize(
    "command",
    [
        "git clone {url} $url {{a}}",
        "git clone {url} {undefined}",
        "echo {url} $HOME",
        "python x.py --n {size * 2} --k {rows[1:]} {paths['a']} {paths[\"a\"]} {name!r}",
        "awk '{print $1}' {name}",
        'echo "it\'s {name}"',
        'printf "\\n" {name}',
        "a\nb {name}",
        "echo $$PATH '$name' $name",
        "echo {'-'.join(str(r) + \"x\" for r in rows)}",
        "echo {len(rows)}",
    ],
)
def test_a_command_is_what_ipython_makes_of_it(command: str) -> None:
    """IPython evaluates every expression, or leaves the command as it stands if one fails."""
    try:
        expected = DollarFormatter().vformat(command, (), {**SPACE, **vars(builtins)})
    except Exception:
        expected = command
    assert eval(as_python_string(command, set(SPACE)), dict(SPACE)) == expected


def test_an_install_cell_keeps_the_python_that_is_needed() -> None:
    done = convert_cells(
        "%%capture\nimport os, re\nif 'COLAB_' not in ''.join(os.environ.keys()):\n    !pip install unsloth\n"
        "else:\n    import torch; v = re.match('x', torch.__version__)\n    xformers = 'xformers=='\n"
        "    !pip install {xformers} trl==0.22.2\n"
        "os.environ['UNSLOTH_VLLM_STANDBY'] = '1'\n!git clone https://host/repo",
        LOAD,
    )
    text = done.script
    assert "pip install" not in text and "xformers" not in text and "COLAB_" not in text
    assert "os.environ['UNSLOTH_VLLM_STANDBY'] = '1'" in text
    assert "import os, re" in text  # os is still used
    assert "#     trl==0.22.2" in text and "#     unsloth" in text
    assert (
        'if LOCAL_RANK == 0:\n    run_shell("git clone https://host/repo")\nwait_for_everyone()'
        in body_with_prologue(done)
    )


def body_with_prologue(done: object) -> str:
    """The whole script without the converter's comments."""
    lines = done.script.splitlines()  # type: ignore[attr-defined]
    return "\n".join(line for line in lines if not line.lstrip().startswith("# ddp:"))


def test_an_emptied_block_gets_pass() -> None:
    text = convert_cells(
        "import importlib\nif setup():\n    !pip install x\n    start()\nelse:\n    !pip install y", LOAD
    ).script
    assert "else:\n" in text and "pass" in text
    ast.parse(text)


def test_a_guarded_import_keeps_its_shape_without_the_install() -> None:
    text = convert_cells(
        "try:\n    import foo\nexcept ImportError:\n    !pip install foo", LOAD + "\nfoo.use(model)"
    ).script
    assert "except ImportError:\n    # ddp: install left out, see the requirements at the top\n    pass\n" in text


def test_pip_through_subprocess_is_an_install_too() -> None:
    done = convert_cells(
        "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'pip', 'install', 'x==1'])", LOAD
    )
    assert "'pip'" not in done.script and "#     x==1" in done.script


def test_env_magic_keeps_ipythons_meaning() -> None:
    done = convert_cells(LOAD, "%env UNSLOTH_RETURN_LOGITS = 1 # note\n%env A 2\n%env")
    assert 'os.environ["UNSLOTH_RETURN_LOGITS"] = "1 # note"\nos.environ["A"] = "2"\n' in body(done)
    assert any(e.kind == "environment" and "comment part of the value" in e.message for e in done.report.edits)
    assert done.script.index('os.environ["UNSLOTH_RETURN_LOGITS"]') < done.script.index("from unsloth")


def test_line_magics() -> None:
    done = convert_cells(
        LOAD + "\n%matplotlib inline\n%load_ext autoreload\nlen?\n?len\n%pip install a==1\n%conda install b\n"
        "%time y = 3\n%cd /tmp\n%timeit y\n"
    )
    text = body(done)
    assert "y = 3" in text and 'os.chdir(os.path.expanduser("/tmp"))' in text
    assert "get_ipython" not in text and "timeit" not in text
    assert "#     a==1" in done.script
    assert kinds(done) == ["no trainer"]


def test_unknown_magics_are_left_out_and_said() -> None:
    done = convert_cells(LOAD + "\n%sql select", "%%R\nx <- 1", "%run other.py")
    assert kinds(done).count("magic") == 3
    assert "# x <- 1" in done.script and "run_path" in done.script


def test_cell_magics() -> None:
    done = convert_cells(
        LOAD,
        "#@title Colab puts comments first\n%%time\nz = 1",
        "HOME, T = 1, 2\nprint(T)",
        "%%bash\necho {a,b} ${T} $HOME {T}\nls",
        "%%writefile -a out.py\nprint('''x''')\n",
        "%%html\n<b>x</b>",
    )
    text = body(done)
    assert "#@title Colab puts comments first\nz = 1" in text
    assert 'if LOCAL_RANK == 0:\n    run_shell("""echo {a,b} ${T} $HOME {T}\nls""")\nwait_for_everyone()' in text
    assert 'if IS_MAIN:\n    open("out.py", "a").write(' in text
    assert "# <b>x</b>" in text


def test_a_cells_output_as_lines_reaches_every_process_where_training_needs_it() -> None:
    done = convert_cells(
        LOAD,
        "rows = !cat rows.txt\nshown = !ls\nprint(shown)",
        "trainer = SFTTrainer(model, args=SFTConfig(), train_dataset=rows)\ntrainer.train()",
    )
    text = body(done)
    assert 'rows = from_main(lambda: shell_output("cat rows.txt"))' in text
    assert 'if LOCAL_RANK == 0:\n    shown = shell_output("ls")' in text


def test_a_command_in_a_block_that_changes_directory_stays_on_one_process() -> None:
    text = body(convert_cells(LOAD, "if True:\n    !git clone x\n    %cd x"))
    assert '        if LOCAL_RANK == 0:\n            run_shell("git clone x")\n        os.chdir' in text


def test_await_at_the_top_level_runs_on_one_loop() -> None:
    done = convert_cells(
        LOAD, "import asyncio\nvalue = await fetch()\nasync def inner():\n    await fetch()\nuse(value)"
    )
    assert "value = run_async(fetch())" in done.script
    assert "    await fetch()" in done.script


@pytest.mark.parametrize("line", ["cd ..", "cd ../data", "cd ."])
def test_a_change_of_folder_without_its_sign_is_one(line: str) -> None:
    assert f'os.chdir(os.path.expanduser("{line[3:]}"))' in body(convert_cells(line, LOAD))


def test_an_indent_that_only_the_first_lines_have_is_taken_off() -> None:
    """Colab's IPython runs such a cell."""
    assert "\na = 1\n\nb = a\nc = 2\n" in body(convert_cells(LOAD, "  a = 1\n\n  b = a\nc = 2"))


def test_installs_whose_text_the_notebook_computes_are_left_out() -> None:
    cell = (
        "import subprocess\nname = 'x'\nget_ipython().system(f'pip install {name}')\n"
        "get_ipython().system('pip install ' + name)\nget_ipython().run_line_magic('pip', f'install {name}')\n"
        "found = 1\nsubprocess.run(f'pip install {name}', shell=True)"
    )
    done = convert_cells(cell, LOAD)
    assert "install " not in body(done) and "get_ipython" not in body(done) and kinds(done) == ["no trainer"]


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("get_ipython().system(f'ls {name}')", "run_shell(f'ls {name}')"),
        ("get_ipython().system(name)", "run_shell(name)"),
        ("files = get_ipython().getoutput('ls ' + name)", "files = shell_output('ls ' + name)"),
        ("get_ipython().run_line_magic('conda', f'list {name}')", "run_shell(\"conda \" + (f'list {name}'))"),
        ("get_ipython().run_line_magic('sx', name)", "run_shell(name)"),
        ("get_ipython().run_cell_magic('bash', '', name)", "run_shell(name)"),
        ("def run(command):\n    get_ipython().system(command)\nrun('ls')", "    run_shell(command)"),
    ],
)
def test_a_computed_command_runs_as_the_notebook_computes_it(line: str, made: str) -> None:
    done = convert_cells(f"name = 'x'\n{line}", LOAD)
    assert f"{made}\n" in body(done) and "get_ipython" not in body(done) and kinds(done) == ["no trainer"]


@pytest.mark.parametrize("magic", ["'env', f'HF_HOME={name}'", "'cd', name", "name, 'A=1'"])
def test_computed_magics_are_left_out_and_said(magic: str) -> None:
    done = convert_cells(
        f"name = 'x'\nget_ipython().run_line_magic({magic})\nget_ipython().run_line_magic('gui', name)", LOAD
    )
    assert "magic(" not in body(done) and "os." not in body(done) and kinds(done) == ["no trainer", "magic"]


def test_a_computed_command_that_also_installs_is_said() -> None:
    done = convert_cells("name = 'x'\nget_ipython().system(f'apt-get install git && ls {name}')", LOAD)
    assert "run_shell(f'apt-get install git && ls {name}')" in body(done) and "install" in kinds(done)


def test_the_older_form_of_a_magic_is_the_same_magic() -> None:
    done = convert_cells("get_ipython().magic('%pip install einops')", LOAD)
    assert "einops" in done.script.split("import")[0] and "None(" not in body(done)
    done = convert_cells("get_ipython().magic('env A=1')\nget_ipython().magic(f'cd {a}')", LOAD)
    assert "os.environ['A'] = '1'" in body(done).replace('"', "'") and kinds(done) == ["no trainer", "magic"]
