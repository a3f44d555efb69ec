"""Test calls that only Colab, Kaggle or Databricks have, logins that ask, and names that IPython provides."""

import os
import sys
from typing import Any

import pytest
from making import LOAD, TRAIN, body, convert_cells, helpers, kinds


@pytest.mark.parametrize(
    ("cell", "made"),
    [
        ("from google.colab import userdata\ntoken = userdata.get('T')", "token = secret('T')"),
        ("from google.colab import userdata as u\ntoken = u.get(key='T')", "token = secret('T')"),
        (
            "from kaggle_secrets import UserSecretsClient\nclient = UserSecretsClient()\n"
            "token = client.get_secret('T')",
            "token = secret('T')",
        ),
        ("from kaggle_secrets import UserSecretsClient\nt = UserSecretsClient().get_secret('T')", "t = secret('T')"),
        ("token = dbutils.secrets.get(scope='s', key='T')", "token = secret('T')"),
        ("token = dbutils.secrets.get('s', 'T')", "token = secret('T')"),
    ],
)
def test_secrets_come_from_the_environment(cell: str, made: str) -> None:
    done = convert_cells(LOAD, cell, TRAIN)
    assert body(done).split("# %%\n")[2].split() == made.split() and "dbutils" not in body(done)
    assert "def secret(" in done.script


@pytest.mark.parametrize("cell", ["os.environ['T'] = userdata.get('T')", "t = userdata.get('T')\nos.environ['T'] = t"])
def test_a_secret_that_is_not_set_does_not_end_the_script(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = convert_cells("import os\nfrom google.colab import userdata\n" + cell, LOAD)
    lines = [line for line in body(done).splitlines() if "'T'" in line]
    os.environ.pop("T", None)
    exec("\n".join(lines), {"os": os, "secret": helpers("secret")["secret"]})
    assert os.environ.pop("T") == "" and "T is not set: export T=" in capsys.readouterr().out


@pytest.mark.parametrize(
    "cell",
    [
        "from google.colab import data_table\ndata_table.enable_dataframe_formatter()",
        "from google.colab import output\noutput.clear()",
        "from google.colab import runtime\nruntime.unassign()",
        "from google.colab import files\nfiles.download('x.zip')",
        "import google.colab\ngoogle.colab.files.download('x')",
        "from google.colab.patches import cv2_imshow\ncv2_imshow(image)",
        "import os\nos.kill(os.getpid(), 9)",
        "import os\nos._exit(0)",
        "import IPython\nIPython.Application.instance().kernel.do_shutdown(True)",
        "get_ipython().kernel.do_shutdown(True)",
        "dbutils.library.restartPython()",
        "dbutils.widgets.text('a', 'b')",
    ],
)
def test_what_serves_only_the_host_is_left_out(cell: str) -> None:
    done = convert_cells(cell, LOAD, TRAIN)
    code = body(done).split("from unsloth")[0]
    assert not any(word in code for word in ("colab", "kill", "_exit", "do_shutdown", "dbutils", "get_ipython"))
    assert kinds(done) == []


def test_an_import_that_asks_for_the_host_stays() -> None:
    cell = "try:\n    import google.colab\n    ON_COLAB = True\nexcept ImportError:\n    ON_COLAB = False"
    assert cell in body(convert_cells(cell, LOAD, TRAIN))


def test_ipython_s_shell_is_none_in_a_script() -> None:
    cell = "colab = 'google.colab' in str(get_ipython())\nkind = get_ipython().__class__.__name__"
    text = body(convert_cells(cell, LOAD, TRAIN))
    assert "in str(None)" in text and "None.__class__" in text and "get_ipython" not in text


def test_an_upload_is_named_by_the_user(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done = convert_cells(
        LOAD, "from google.colab import files\nuploaded = files.upload()\ndataset = list(uploaded)", TRAIN
    )
    assert "uploaded = uploaded_files()" in body(done) and "host" in kinds(done)
    monkeypatch.delenv("UPLOADED_FILES", raising=False)
    with pytest.raises(SystemExit, match="export UPLOADED_FILES="):
        helpers("uploaded_files")["uploaded_files"]()
    (tmp_path / "rows.csv").write_bytes(b"1")
    monkeypatch.setenv("UPLOADED_FILES", str(tmp_path / "rows.csv"))
    assert helpers("uploaded_files")["uploaded_files"]() == {"rows.csv": b"1"}


def test_names_that_only_databricks_has_are_pointed_at() -> None:
    done = convert_cells(LOAD, "dataset = spark.read.table('x')", TRAIN)
    assert [e.message for e in done.report.warnings] == ["spark exists only on Databricks: make it, or leave this out"]


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK"])
def test_variables_of_the_launcher_are_not_overwritten(variable: str) -> None:
    cell = f"import os\nos.environ['{variable}'] = '0'\n%env {variable}=0\nos.environ['B'] = '1'"
    text = body(convert_cells(cell, LOAD, TRAIN))
    assert f"'{variable}'" not in text and "os.environ['B'] = '1'" in text


@pytest.mark.parametrize(
    ("cell", "made"),
    [
        ("from huggingface_hub import notebook_login\nnotebook_login()", "hub_login()"),
        ("from huggingface_hub import login\nlogin()", "hub_login()"),
        ("import huggingface_hub as hub\nhub.login(token=T)", "hub_login(token=T)"),
        ("import wandb\nwandb.login(key=K)", "wandb_login(key=K)"),
    ],
)
def test_logins_never_ask(cell: str, made: str) -> None:
    assert f"    {made}\n" in body(convert_cells(LOAD, "T = K = 'x'", cell, TRAIN))


def test_a_login_without_a_token_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    asked: list[Any] = []
    hub: Any = types.ModuleType("huggingface_hub")
    hub.get_token, hub.login = lambda: None, lambda *args, **options: asked.append((args, options))
    tracker: Any = types.ModuleType("wandb")
    tracker.api, tracker.login = types.SimpleNamespace(api_key=None), lambda **options: asked.append(options)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    helpers("hub_login")["hub_login"]()
    helpers("wandb_login")["wandb_login"]()
    said = capsys.readouterr().out
    assert asked == [] and "hf auth login" in said and "WANDB_API_KEY" in said
    assert os.environ.pop("WANDB_MODE") == "offline"
    helpers("hub_login")["hub_login"]("x")
    helpers("wandb_login")["wandb_login"](key="k")
    assert asked == [(("x",), {}), {"key": "k"}]


def test_a_display_that_the_notebook_imports_is_kept() -> None:
    assert "def display" not in convert_cells(LOAD, "from IPython.display import display\ndisplay(1)").script
