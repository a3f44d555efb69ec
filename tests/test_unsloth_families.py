"""Test the kit with Unsloth's code for each family of models that Unsloth changes, on a CPU; a GPU shows the rest."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO
from tests.unsloth_on_cpu import families

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

# Families that cannot be computed here, with the end of the error: what is missing belongs to the CPU or to the tiny
# model.
NOT_HERE = {
    "deepseek_v4": "expected m1 and m2 to have the same dtype",
    "ernie4_5_vl_moe": "must match the existing size",
    "granitemoehybrid": "expected m1 and m2 to have the same dtype",
    "idefics": "Exactly 1 of pixel_values",
    "llama4": "Did you forget to add @triton.jit",
    "zamba": "The size of tensor a (7424)",
}
# Methods of torch's modules and of tensors that are called in many ways on many objects.
OF_TORCH = {"forward", "to", "zero_grad", "train", "eval"}


@pytest.fixture(scope="module")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return what tests.unsloth_on_cpu prints for a family; one process drives all that are selected."""
    folder = tmp_path_factory.mktemp("unsloth")
    here = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    selected = [item.callspec.params["family"] for item in here if hasattr(item, "callspec")]
    environ = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.unsloth_on_cpu", *(selected or families())]
    with (folder / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True, encoding="utf-8"
        )
    known: dict[str, Any] = {}

    def of(family: str) -> Any:
        assert process.stdout is not None
        while family not in known and (line := process.stdout.readline()):
            if line.startswith('{"family"'):
                content = json.loads(line)
                known[content["family"]] = content
        return known.get(family, {"error": (folder / "errors.txt").read_text()[-4000:]})

    yield of
    process.kill()
    process.wait()


@pytest.mark.parametrize("family", families())
def test_a_family_trains_with_every_kind_of_checkpointing_and_loads_again(family: str, outcome: Any) -> None:
    result = outcome(family)
    if family in NOT_HERE:
        assert NOT_HERE[family] in result.get("error", ""), "it can be computed here now: take it from NOT_HERE"
        return
    assert "error" not in result, result["error"]
    if "refused" in result:
        assert "this kit trains causal language models and image-text models" in result["refused"]
        return
    passes = [one for batches in result["passes"].values() for one in batches.values()]
    loss, gradients = passes[0]
    assert gradients > 0
    for one in passes:
        assert one == pytest.approx((loss, gradients), rel=2e-2), result["passes"]
    before, after = result["saved"]
    assert before != loss and after == pytest.approx(before, rel=1e-3)
    assert all("packed" in batches for batches in result["passes"].values()) == (result["padded"] is None)


def test_what_unsloth_wraps_is_called_by_keyword(outcome: Any) -> None:
    wrapped = {name for family in families() for name in outcome(family).get("wrapped", ())}
    assert {"gradient_checkpointing_enable", "for_training", "generate", "save_pretrained"} <= wrapped
    positional = []
    for path in [*(REPO / "unsloth_ddp").rglob("*.py"), REPO / "train_ddp.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                called = node.func.attr
                # from_pretrained of classes takes the model's name first.
                if called in wrapped - OF_TORCH - {"from_pretrained"}:
                    positional.append(f"{Path(path).relative_to(REPO)}:{node.lineno}: {ast.unparse(node)}")
    assert positional == []
