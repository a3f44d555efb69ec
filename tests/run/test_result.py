"""Find the files of a run's folder that are its result."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.checkpoints.manifest import Manifest
from unsloth_ddp.config.checks import with_full_paths
from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.files.identity import weights_identity
from unsloth_ddp.run.result import find_result
from unsloth_ddp.utils.errors import UserError

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has only begun."""
    folder = tmp_path / "run"
    folder.mkdir()
    Settings(model="m", dataset=["d"], run_name="run").save(folder / "settings.yaml")
    return folder


def add_checkpoint(run: Path, step: int, weights: str = WEIGHTS) -> Path:
    folder = run / f"checkpoint-{step}"
    folder.mkdir()
    (folder / weights).write_text(f"weights of step {step}")
    (folder / "trainer_state.json").write_text("{}")
    text = Manifest(step, {}, {}, manifest.describe_files(folder)).to_text()
    (folder / manifest.FILE_NAME).write_text(text)
    return folder


def refused(named: Path) -> str:
    with pytest.raises(UserError) as error:
        find_result(str(named))
    return str(error.value)


def test_the_result_of_a_finished_run_is_in_its_folder(run: Path) -> None:
    add_checkpoint(run, 5)
    (run / "summary.json").write_text("{}")
    (run / WEIGHTS).write_text("weights")
    found = find_result(str(run))
    assert (found.folder, found.step, found.sentence, found.is_adapter) == (run, None, "", True)
    assert found.settings.model == "m"


@pytest.mark.parametrize("used", ["transformers", "unsloth", None, "another"])
def test_the_backend_is_the_one_that_the_run_used(run: Path, used: str | None) -> None:
    """Rows with images may have decided it, which a conversation does not have."""
    (run / "summary.json").write_text(json.dumps({"backend": used}))
    (run / WEIGHTS).write_text("weights")
    assert find_result(str(run)).settings.backend == (used if used in ("transformers", "unsloth") else "auto")


def test_the_compiled_modules_of_a_run_are_neither_run_nor_removed(run: Path) -> None:
    (run / "summary.json").write_text("{}")
    (run / WEIGHTS).write_text("weights")
    Settings(model="m", compiled_cache_dir=str(run / "theirs"), clear_compiled_cache=True).save(run / "settings.new")
    (run / "settings.new").replace(run / "settings.yaml")
    found = find_result(str(run)).settings
    assert (found.compiled_cache_dir, found.clear_compiled_cache) == (None, False)


def test_an_unfinished_run_gives_its_last_whole_checkpoint_and_says_so(run: Path) -> None:
    whole, broken = add_checkpoint(run, 5), add_checkpoint(run, 10)
    (broken / WEIGHTS).write_text("weights of step 1O")
    # The weights of an earlier end, before the run was resumed.
    (run / WEIGHTS).write_text("weights")
    found = find_result(str(run))
    assert (found.folder, found.step) == (whole, 5)
    assert found.sentence == f"{run} is not finished; this is checkpoint-5, its last complete checkpoint."


def test_a_checkpoint_can_be_named(run: Path) -> None:
    add_checkpoint(run, 10)
    found = find_result(str(add_checkpoint(run, 5)))
    assert (found.run, found.step, found.sentence) == (run, 5, f"This is checkpoint-5 of {run}.")


def test_what_holds_nothing_whole_is_refused(run: Path, tmp_path: Path) -> None:
    assert "there is no such folder; give the folder of a run" in refused(tmp_path / "nowhere")
    (tmp_path / "nothing/empty").mkdir(parents=True)
    assert refused(tmp_path / "nothing/empty") == (
        f"{tmp_path}/nothing/empty is not the folder of a run (it has no settings.yaml); give the folder of a run, "
        "such as outputs/RUN."
    )
    # A folder that holds runs, or lies in one, names one.
    (run / "merged").mkdir()
    for near in (tmp_path, run / "merged"):
        assert (
            f"is not the folder of a run (it has no settings.yaml); give the folder of a run, such as {run}."
            in refused(near)
        )
    (tmp_path / "README.md").write_text("")
    assert "README.md is a file; give the folder of a run" in refused(tmp_path / "README.md")
    assert refused(run) == f"{run} is not finished and has no checkpoint yet; let it write one, or give another run."
    broken = add_checkpoint(run, 5)
    (broken / WEIGHTS).unlink()
    assert f"none of its checkpoints is whole (checkpoint-5: {WEIGHTS} is missing)" in refused(run)
    assert "is not a complete checkpoint" in refused(broken)
    (run / "summary.json").write_text("{}")
    assert f"{run} holds no {WEIGHTS}" in refused(run) and "the run has finished, so the file was moved" in refused(run)


def test_a_checkpoint_of_shards_is_refused(run: Path) -> None:
    folder = add_checkpoint(run, 5, weights="shard_0.distcp")
    assert f"{folder} holds no {WEIGHTS}" in refused(run) and "shards only" in refused(run)


def test_a_run_of_another_version_is_refused(run: Path) -> None:
    add_checkpoint(run, 5)
    settings = (run / "settings.yaml").read_text()
    (run / "settings.yaml").write_text(settings + "number_of_moons: 2\n")
    assert f"{run} was written by another version of the kit, or was edited" in refused(run)
    assert "number_of_moons" in refused(run)
    (run / "settings.yaml").write_text(settings)
    path = run / "checkpoint-5" / manifest.FILE_NAME
    path.write_text(path.read_text().replace('"format": 1', '"format": 9'))
    assert "is of format 9, which this release does not read" in refused(run)


def test_a_base_model_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    given = Settings(model="demo/model", dataset=["owner/rows"], chat_template="chatml", output_dir="outputs")
    saved = with_full_paths(dataclasses.asdict(given))
    assert saved["model"] == str(tmp_path / "demo" / "model")
    # A name of the Hub, a word and the folder of the results stay as they were given.
    assert (saved["dataset"], saved["chat_template"], saved["output_dir"]) == (["owner/rows"], "chatml", "outputs")


def test_a_base_model_that_is_gone_is_said_with_where_it_was_looked_for(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_checkpoint(run, 5)
    (run / "record.json").write_text(json.dumps({"format": 1, "model": {"local": True}, "data": {}}))
    monkeypatch.chdir(tmp_path)
    Settings(model="demo/model", dataset=["d"], run_name="run").save(run / "settings.yaml")
    said = refused(run)
    assert f"looked for {tmp_path}/demo/model and {run}/demo/model" in said
    assert "If it was moved, change model in the run's settings.yaml." in said
    Settings(model=f"{tmp_path}/gone", dataset=["d"], run_name="run").save(run / "settings.yaml")
    assert f"looked for {tmp_path}/gone. " in refused(run)
    (tmp_path / "demo" / "model").mkdir(parents=True)
    Settings(model="demo/model", dataset=["d"], run_name="run").save(run / "settings.yaml")
    assert find_result(str(run)).step == 5


def test_a_base_model_whose_weights_changed_is_told(run: Path, tmp_path: Path) -> None:
    add_checkpoint(run, 5)
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_text("as trained on")
    known = {"local": True, "weights": weights_identity(base)}
    (run / "record.json").write_text(json.dumps({"format": 1, "model": known, "data": {}}))
    Settings(model=str(base), dataset=["d"], run_name="run").save(run / "settings.yaml")
    found = find_result(str(run))
    assert found.sentences(plain=False) == [found.sentence]
    (base / "model.safetensors").write_text("trained since")
    told = find_result(str(run)).sentences(plain=False)
    assert told[0] == found.sentence and f"The weights of the base model {base} changed since" in told[1]
    # Earlier releases did not record them.
    (run / "record.json").write_text(json.dumps({"format": 1, "model": {"local": True}, "data": {}}))
    assert find_result(str(run)).sentences(plain=False) == [found.sentence]


def test_a_run_on_plain_text_says_how_to_ask_it(run: Path) -> None:
    add_checkpoint(run, 5)
    (run / "record.json").write_text(json.dumps({"format": 1, "data": {"plain_text": True}}))
    found = find_result(str(run))
    assert "trained on plain text, without a chat template; add --plain" in found.sentences(plain=False)[-1]
    assert found.sentences(plain=True) == [found.sentence]
    (run / "record.json").write_text("damaged")
    assert find_result(str(run)).sentences(plain=False) == [found.sentence]
