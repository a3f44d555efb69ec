"""Fuzz names and paths that lead elsewhere, nowhere or in circles: refused before a file is read or changed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz import few, refusal, result_or_sentence
from tests.runtimes import cpu_runtime
from unsloth_ddp.checkpoints.resume_point import find_resume_point
from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.data.sources.rows import check_source
from unsloth_ddp.distributed import backend, runtime
from unsloth_ddp.model.loading.load import check_model
from unsloth_ddp.run import folder as run_folder

PATHS = ("model", "dataset", "eval_dataset", "output_dir", "resume", "chat_template", "compiled_cache_dir")
TRICKS = st.sampled_from(
    ["..", ".", "../../etc", "/", "/etc/passwd", "a/../..", "~", "~root/x", "~nobody_here/x", "$HOME/x", "x" * 300,
        "x/" * 3000, "circle",
     "./circle", "./circle/x", "file", "file/below", "dangling", "out", "a\nb", "\x1b[2J", "-rf", "con", "a\\b",
         "\ufeff", "\u202etxt",
     "\udcff", "a\0b", " ", "|ls", "`ls`", "http://x/y", "file:///etc/passwd", "checkpoint-3", "settings.yaml"]
) | st.text(max_size=20)  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to stand in, with a file, links to nowhere and to itself, and a neighbour's file beside it."""
    here = tmp_path / "a" / "here"
    (here / "out").mkdir(parents=True)
    (here / "file").write_text("x")
    (here / "circle").symlink_to("circle")
    (here / "dangling").symlink_to("nowhere")
    (tmp_path / "a" / "neighbour.txt").write_text("years of work")
    monkeypatch.chdir(here)
    monkeypatch.setattr(run_folder, "LOCK_PATIENCE", 0.0)
    # No name is asked of the Hub, whose client waits and tries again where there is no network.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    yield here
    assert (tmp_path / "a" / "neighbour.txt").read_text() == "years of work"


def everything(folder: Path) -> set[str]:
    """What lies below a folder, links not followed."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@few
@given(st.sampled_from(PATHS), TRICKS)
def test_any_path_is_looked_for_or_refused_and_nothing_is_written(place: Path, name: str, path: str) -> None:
    before = everything(place.parent)
    given = {"model": "m", "dataset": "d.jsonl", name: path}
    words = [f"--{option}={value}" for option, value in given.items()]

    def begin() -> None:
        settings = parse_settings(words)
        runtime.control_timeout(settings)
        for source in [*settings.dataset, *settings.eval_dataset]:
            result_or_sentence(lambda source=source: check_source(source))
        result_or_sentence(lambda: check_model(settings, cpu_runtime()))
        settings = dataclasses.replace(settings, run_name="mine")
        folder = run_folder.choose_run_folder(settings, cpu_runtime())
        find_resume_point(settings, cpu_runtime(), folder, run_folder.continues(settings, folder))

    result_or_sentence(begin)
    assert everything(place.parent) == before


@few
@given(st.sampled_from(["run_name", "model"]), TRICKS)
@example("run_name", "..")
@example("run_name", "../neighbour.txt")
@example("run_name", "..\\up")
@example("run_name", "\0a")
@example("model", "m/..")
@example("model", "/")
def test_a_run_that_is_named_or_called_after_its_model_is_one_folder(place: Path, option: str, name: str) -> None:
    given = {"model": "m", "dataset": "d", "output_dir": "out", option: name}
    settings = result_or_sentence(lambda: parse_settings([f"--{key}={value}" for key, value in given.items()]))
    if settings is not None:
        assert run_folder.choose_run_folder(settings, cpu_runtime()).parent == place / "out"


@pytest.mark.parametrize("there", ["file", "dangling", "circle"])
def test_a_file_or_link_in_the_place_of_the_run_folder_is_left_alone(place: Path, there: str) -> None:
    (place / there).rename(place / "out" / there)
    before = everything(place.parent)
    for overwrite in (False, True):
        settings = Settings(model="m", output_dir="out", run_name=there, overwrite=overwrite)
        assert "is not a folder" in refusal(
            lambda settings=settings: run_folder.choose_run_folder(settings, cpu_runtime())
        )
    assert everything(place.parent) == before


def test_overwriting_removes_links_and_not_what_they_lead_to(place: Path) -> None:
    run = place / "out" / "mine"
    run.mkdir()
    (run / "settings.yaml").write_text("model: x\n")
    (run / "up").symlink_to("../../..")
    (run / "text").symlink_to("../../../neighbour.txt")
    settings = Settings(model="m", dataset=["d"], output_dir="out", run_name="mine", overwrite=True)
    mine = cpu_runtime()
    folder = run_folder.choose_run_folder(settings, mine)
    with mine.cleanup:
        run_folder.open_run_folder(settings, mine, folder)
    assert {path.name for path in run.iterdir()} == {"settings.yaml", "run.lock", "logs"}


@pytest.mark.parametrize("named", [".", "..", "out", "/"])
def test_a_compiled_cache_that_holds_something_else_is_not_cleared(
    place: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    (place / "out" / "thesis.txt").write_text("years of work")
    monkeypatch.setattr(backend.shutil, "rmtree", lambda *args, **kwargs: pytest.fail(f"removed {args}"))
    settings = Settings(compiled_cache_dir=named, clear_compiled_cache=True)
    assert "is not a compiled module, so clear_compiled_cache leaves it alone" in refusal(
        lambda: backend._compiled_cache(cpu_runtime(), settings).__enter__()
    )


def test_a_folder_of_modules_is_not_cleared_under_ones_feet(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "out" / "mine.py").write_text("")
    monkeypatch.chdir(place / "out")
    settings = Settings(compiled_cache_dir=".", clear_compiled_cache=True)
    refusal(lambda: backend._compiled_cache(cpu_runtime(), settings).__enter__())
    assert os.path.exists("mine.py")
