"""Folders and paths that only Colab or Kaggle has: where a notebook goes, and what it names."""

import pytest
from making import LOAD, TRAIN, body, convert_cells, kinds


@pytest.mark.parametrize(
    ("cell", "made"),
    [
        ("%cd /content", "os.chdir(START_FOLDER)"),
        ("%cd /content/", "os.chdir(START_FOLDER)"),
        ("cd /content", "os.chdir(START_FOLDER)"),
        ("text = '''\ncd /content\n'''\n%cd sub", "text = '''\ncd /content\n'''\nos.chdir("),
        ("%cd '/kaggle/working'", "os.chdir(START_FOLDER)"),
        ("%cd /content/unsloth", 'os.chdir(os.path.join(START_FOLDER, "unsloth"))'),
        ("%cd /content/{name}/data", 'os.chdir(os.path.join(START_FOLDER, f"{name}/data"))'),
        ("import os\nos.chdir('/content/a')", "os.chdir(os.path.join(START_FOLDER, 'a'))"),
        ("from os import chdir\nchdir('/content')", "chdir(START_FOLDER)"),
        ("%cd /contents", 'os.chdir(os.path.expanduser("/contents"))'),
        ("%cd unsloth", 'os.chdir(os.path.expanduser("unsloth"))'),
    ],
)
def test_the_folder_that_a_host_starts_in_is_the_one_that_the_script_starts_in(cell: str, made: str) -> None:
    done = convert_cells("name = 'x'", cell, LOAD, TRAIN)
    assert made in body(done) and kinds(done) == []
    assert ("START_FOLDER = os.getcwd()" in done.script) == ("START_FOLDER" in made)


@pytest.mark.parametrize(
    "cell", ["%cd /content/drive/MyDrive/x", "import os\nos.chdir('/content/gdrive')", "%cd /kaggle/input/rows"]
)
def test_a_folder_that_is_mounted_on_the_host_only_is_left_out(cell: str) -> None:
    done = convert_cells(cell, LOAD, TRAIN)
    assert "chdir" not in body(done).split("from unsloth")[0] and kinds(done) == ["host"]
    (warning,) = done.report.warnings
    assert "not mounted here; start the script in the folder that holds the files" in warning.message
    assert warning.message in done.script and warning.cell == 1


@pytest.mark.parametrize(
    ("cell", "paths"),
    [
        ("dataset = load('/content/rows.jsonl')", "/content/rows.jsonl"),
        ("dataset = load(f'/content/{name}.jsonl')", "/content/"),
        ("!cp /content/drive/MyDrive/a.jsonl '/content/b.jsonl'", "/content/drive/MyDrive/a.jsonl, /content/b.jsonl"),
        ("%%bash\ncd /content/x && ls", "/content/x"),
        ("dataset = load('/content/a')\nmore = load('/content/a')", "/content/a"),
        ("if big:\n    dataset = load('/content/a')", "/content/a"),
    ],
)
def test_paths_of_the_host_are_pointed_at_once(cell: str, paths: str) -> None:
    done = convert_cells(LOAD, cell, TRAIN)
    assert [entry.message for entry in done.report.warnings] == [f"only Colab has {paths}: use a path of this machine"]


@pytest.mark.parametrize(
    "cell",
    [
        "dataset = load('https://x.org/content/rows.jsonl')",
        "dataset = load('data/content/rows.jsonl')",
        "print('Your files are in /content/rows')",
        "if IN_COLAB:\n    dataset = load('/content/a')\nelse:\n    dataset = load('a')",
        "dataset = load('/content/a' if os.path.exists('/content') else 'a')",
        "!curl https://x.org/content/rows -o rows",
    ],
)
def test_paths_elsewhere_and_paths_behind_a_question_for_the_host_are_not(cell: str) -> None:
    assert kinds(convert_cells(LOAD, cell, TRAIN)) == []


def test_kaggles_paths_are_kaggles() -> None:
    done = convert_cells(LOAD, "dataset = load('/kaggle/input/a.csv')", TRAIN)
    assert [e.message for e in done.report.warnings] == [
        "only Kaggle has /kaggle/input/a.csv: use a path of this machine"
    ]


@pytest.mark.parametrize(
    ("cell", "made", "message"),
    [
        (
            "from google.colab import output\nurl = output.eval_js('x')",
            "url = None",
            "output.eval_js exists only on the host, so its value is None here",
        ),
        (
            "from google.colab import drive\nfolder = str(drive)",
            "folder = str(drive)",
            "drive of google.colab.drive exists only on the host: leave this out, or replace it",
        ),
    ],
)
def test_what_is_still_read_of_a_host_is_pointed_at(cell: str, made: str, message: str) -> None:
    done = convert_cells(cell, LOAD, TRAIN)
    assert made in body(done) and [entry.message for entry in done.report.warnings] == [message]
