"""Loading what a run has trained, and the tokens at which it stops."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.conftest import DEMO_MODEL
from tests.runtimes import cpu_runtime
from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.loading.trained import load_trained, stop_tokens
from unsloth_ddp.run.result import read_settings
from unsloth_ddp.utils.errors import UserError

CPU = cpu_runtime()
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def run(whole_run, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(whole_run(1), folder, ignore=shutil.ignore_patterns("checkpoint-*", "logs"))
    return folder


def test_the_adapter_of_the_run_is_in_the_model(run: Path) -> None:
    # A kernel for GPUs, and a template that is gone, do not matter here.
    settings = dataclasses.replace(
        read_settings(run), attn_implementation="flash_attention_2", chat_template="/gone.jinja", fp8=True
    )
    model = load_trained(settings, run, CPU)
    held = {name.replace(".default.", "."): weight for name, weight in model.named_parameters()}
    saved = load_file(run / WEIGHTS)
    assert saved and all(torch.equal(held[name], weight) for name, weight in saved.items())
    assert not model.training and model.config.use_cache
    assert not any(weight.dtype == torch.float8_e4m3fn for weight in model.parameters())


def test_an_adapter_that_does_not_fit_its_base_model_is_refused(run: Path) -> None:
    settings, saved = read_settings(run), load_file(run / WEIGHTS)
    name = next(iter(saved))
    save_file({**saved, name.replace("layers.0", "layers.7"): saved[name].clone()}, run / WEIGHTS)
    with pytest.raises(UserError, match=r"holds .*layers\.7.*, which its base model .* does not have"):
        load_trained(settings, run, CPU)
    save_file({**saved, name: torch.zeros(3, 3)}, run / WEIGHTS)
    with pytest.raises(UserError, match=r"The adapter in .* cannot be loaded: .*size mismatch"):
        load_trained(settings, run, CPU)
    save_file({other: weight for other, weight in saved.items() if other != name}, run / WEIGHTS)
    with pytest.raises(UserError, match=r"The adapter in .* lacks 1 of its \d+ weights"):
        load_trained(settings, run, CPU)
    (run / WEIGHTS).write_bytes(b"half")
    with pytest.raises(UserError, match=r"The adapter in .* is damaged: adapter_model.safetensors cannot be read"):
        load_trained(settings, run, CPU)


def test_qlora_needs_a_gpu(run: Path) -> None:
    settings = dataclasses.replace(read_settings(run), method="qlora")
    with pytest.raises(UserError, match=r"needs a GPU for its 4-bit kernels, and none is used here; .*--to merged"):
        load_trained(settings, run, CPU)


def test_stop_tokens_are_those_that_end_an_answer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    settings = Settings(model="m", dataset=["d"])
    assert stop_tokens(settings, tokenizer) == [3]
    assert stop_tokens(dataclasses.replace(settings, loss_on="all"), tokenizer) == [3]
    # The end of a turn in plain text, which EOS follows.
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    assert stop_tokens(settings, tokenizer) == [tokenizer.eos_token_id]
    tokenizer.chat_template = None
    assert stop_tokens(settings, tokenizer) == [tokenizer.eos_token_id]
