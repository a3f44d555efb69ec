"""Hostile checkpoints, each given to a whole run that resumes from it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import DEMO_MODEL, demo_rows, write_jsonl
from tests.fuzz.hostile import TRAINS, Act, ended
from tests.unpickled import Touch
from unsloth_ddp.checkpoints import manifest

# Whole runs.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run with the checkpoint of step 2 alone, without its result."""
    folder = tmp_path_factory.mktemp("stopped")
    write_jsonl(folder / "rows.jsonl", demo_rows()[:4])
    shutil.copytree(DEMO_MODEL, folder / "model")
    ended(folder, "", TRAINS)
    (folder / "outputs/r/summary.json").unlink()
    return folder


def described(change: Callable[[Path], object]) -> Act:
    """Change a checkpoint's files, and describe them in a manifest that fits."""

    def act(folder: Path) -> None:
        change(folder)
        content = json.loads((folder / manifest.FILE_NAME).read_text())
        content.pop("checksum")
        found = manifest.describe_files(folder)
        content["files"] = {
            name: {"bytes": found[name][0], "xxh3_128": found[name][1]} for name in found if name != manifest.FILE_NAME
        }
        (folder / manifest.FILE_NAME).write_text(json.dumps({**content, "checksum": manifest._checksum_of(content)}))

    return act


def in_manifest(**changes: Any) -> Act:
    def act(folder: Path) -> None:
        content = json.loads((folder / manifest.FILE_NAME).read_text()) | changes
        content.pop("checksum")
        (folder / manifest.FILE_NAME).write_text(json.dumps({**content, "checksum": manifest._checksum_of(content)}))

    return act


def in_state(**changes: Any) -> Act:
    def change(folder: Path) -> None:
        path = folder / "trainer_state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return described(change)


def instead(name: str, make: Act) -> Act:
    def act(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return act


def evil(path: Path) -> None:
    torch.save({"x": Touch(Path("ran"))}, path)


SKIPPED = "checkpoint-2 is not a complete checkpoint: "
CHECKPOINTS: dict[str, tuple[Act, str]] = {
    "no manifest": (lambda at: (at / "manifest.json").unlink(), SKIPPED),
    "manifest is a pipe": (instead("manifest.json", os.mkfifo), SKIPPED),
    "manifest is a device": (instead("manifest.json", lambda path: path.symlink_to("/dev/zero")), SKIPPED),
    "manifest nested too deep": (lambda at: (at / "manifest.json").write_text("[" * 100_000), SKIPPED),
    "manifest of another step": (in_manifest(step=10**18), SKIPPED),
    "manifest that lists a file above": (in_manifest(files={"../x": {"bytes": 1, "xxh3_128": "0"}}), SKIPPED),
    "manifest of a run that is a list": (in_manifest(run=[]), SKIPPED),
    "optimizer cut off": (lambda at: os.truncate(at / "optimizer.pt", 100), SKIPPED),
    "optimizer of other bytes": (lambda at: (at / "optimizer.pt").write_bytes(
        b"\0" * (at / "optimizer.pt").stat().st_size), SKIPPED),
    "optimizer is a link": (instead("optimizer.pt", lambda path: path.symlink_to("/dev/zero")), SKIPPED),
    "optimizer is a pipe": (instead("optimizer.pt", os.mkfifo), SKIPPED),
    "state with another step": (in_state(global_step=10**18), SKIPPED),
    "state with NaN for an epoch": (in_state(epoch=float("nan")), SKIPPED),
    "state with a list for a step": (in_state(global_step=[2]), SKIPPED),
    "state with callbacks of code": (in_state(stateful_callbacks={"os.system": {"args": {}}}), SKIPPED),
    "state of a list": (described(lambda at: (at / "trainer_state.json").write_text("[]")), SKIPPED),
    "forged optimizer that is code": (described(lambda at: evil(at / "optimizer.pt")), "optimizer|checkpoint-2"),
    "forged optimizer that is no optimizer": (described(lambda at: torch.save([1], at / "optimizer.pt")),
        "optimizer|checkpoint-2"),
    "forged optimizer of other shapes": (described(lambda at: torch.save({"state": {0: {"exp_avg": torch.zeros(3)}},
        "param_groups": []}, at / "optimizer.pt")), "optimizer|checkpoint-2"),
    "forged random states that are code": (described(lambda at: evil(at / "rng_state.pth")), "rng_state|checkpoint-2"),
    "forged random states that are none": (described(lambda at: torch.save({"python": 1}, at / "rng_state.pth")),
        "rng_state|checkpoint-2"),
    "forged scheduler that is code": (described(lambda at: evil(at / "scheduler.pt")), "scheduler|checkpoint-2"),
    "forged adapter of other shapes": (described(lambda at: save_file({"a": torch.zeros(2)},
        at / "adapter_model.safetensors")), "adapter|checkpoint-2"),
    "forged adapter config": (described(lambda at: (at / "adapter_config.json").write_text("[]")),
        f"{TRAINS}|adapter|checkpoint-2"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(stopped: Path, tmp_path: Path, name: str) -> None:
    act, said = CHECKPOINTS[name]
    place = tmp_path / "job"
    shutil.copytree(stopped, place, symlinks=True)
    act(place / "outputs/r/checkpoint-2")
    ended(place, "--resume outputs/r/checkpoint-2", said)
