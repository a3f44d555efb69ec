"""The saves of converted notebooks are counted in every case that the GPU run has, and judged."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.correctness.converted_notebooks import CHANGES, COUNT_SAVES, changed, judge, own_notebook
from benchmarks.correctness.notebook_cells import NOTEBOOKS
from unsloth_ddp.notebook.convert import convert


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_saves_are_counted_from_before_the_adapters_are_made(name: str, tmp_path: Path) -> None:
    """Unsloth keeps the model's save_pretrained when it adds the adapters: a later count would miss every save."""
    notebook = changed(json.loads(own_notebook(name, tmp_path).read_text()), CHANGES[name])
    sources = ["".join(cell["source"]) for cell in notebook["cells"]]
    adapters = next(i for i, source in enumerate(sources) if "get_peft_model" in source)
    load = next(i for i, source in enumerate(sources) if "from_pretrained" in source)
    assert load < sources.index(COUNT_SAVES) < adapters and sources.count(COUNT_SAVES) == 1
    path = tmp_path / "counted.ipynb"
    path.write_text(json.dumps(notebook))
    script = convert(path).script
    assert script.index("peft.PeftModel.save_pretrained = _counted") < script.index("FastLanguageModel.get_peft_model(")
    assert "\npeft.PeftModel.save_pretrained = _counted" in script  # on every process, or rank 1 would not be counted


def test_a_save_is_written_down_with_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PeftModel:
        def save_pretrained(self, folder: str) -> str:
            return f"saved {folder}"

    module = ModuleType("peft")
    module.PeftModel = PeftModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peft", module)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.chdir(tmp_path)
    exec(COUNT_SAVES, {})
    assert PeftModel().save_pretrained("lora_model") == "saved lora_model"
    assert Path("saves.log").read_text() == "1 lora_model\n"


@pytest.mark.parametrize(
    ("saves", "once"),
    [
        ("0 outputs/checkpoint-12\n0 lora_model\n", True),
        ("0 lora_model\n1 lora_model\n", False),
        ("0 lora_model\n0 lora_model\n", False),
        ("1 lora_model\n", False),
        (None, False),
    ],
)
def test_one_save_by_the_main_process_passes(saves: str | None, once: bool, tmp_path: Path) -> None:
    if saves is not None:
        (tmp_path / "saves.log").write_text(saves)
    log = "".join(f"{{'loss': {loss}}}\n" for loss in (3.0, 2.0, 1.0))
    found: dict[str, Any] = judge(tmp_path, log, 0, "dpo")
    assert found["one_save"] is once and found["passes"] is once
