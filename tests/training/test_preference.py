"""Preference runs take the steps of a plain PyTorch loop, whatever the layout, the reference's route, and a kill."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid

from tests.conftest import demo_rows, save_llama, write_jsonl
from tests.plain_loop import GLOBAL_BATCH, STEPS, Answer, AnswerLoop, assert_same_end, history, run_once
from tests.ranks import run_ranks, train
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.training.tasks.reference import Precomputed

RATE, BETA, MOST = 0.5, 0.3, 64
SAVED = "--task dpo --sft_weight 0.5 --lora_dropout 0 --save_strategy steps --save_steps 1"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """Return 13 pairs of very different lengths, which fill 6 packs."""
    rows = [row["messages"] for row in demo_rows()]
    pairs_written = []
    for number, (chat, other) in enumerate(zip(rows[:13], rows[13:26], strict=True)):
        rejected = {"role": "assistant", "content": " ".join(["Oslo"] * (1 + number % 4)) + other[1]["content"]}
        pairs_written.append({"prompt": chat[:-1], "chosen": chat[-1:], "rejected": [rejected]})
    return write_jsonl(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", pairs_written)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory) -> Path:
    """Return a model of other sizes with the same tokenizer."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    return save_llama(tmp_path_factory.mktemp("models") / "other", initializer_range=0.08, **sizes)


@pytest.fixture(scope="session")
def adapter(tmp_path_factory, tiny_model) -> Path:
    """Return an adapter of the tiny model, of another form than that of the runs."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    config = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    folder = tmp_path_factory.mktemp("adapters") / "trained"
    torch.manual_seed(1)
    get_peft_model(base, config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_model, pairs):
    """Run three steps once for each layout and options; returns the run's folder."""
    cwd = tmp_path_factory.mktemp("preference")

    def run(processes: int, per_device: int, extra: str = "--task dpo", name: str = "", environ=None) -> Path:
        name = name or f"{processes}x{per_device}{extra.replace(' ', '')}".replace("/", "_")
        options = (
            f"--model {tiny_model} --dataset {pairs} --eval_dataset {pairs} --learning_rate {RATE} --max_length {MOST} "
            f"--beta {BETA} {extra}"
        )
        return run_once(cwd, name, processes, per_device, options, environ)

    return run


class PairLoop(AnswerLoop):
    metrics = ("loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "nll_loss")
    undecided = ("rewards/accuracies",)
    rate, most_tokens = RATE, MOST

    def __init__(
        self, *paths: Path, task: str = "dpo", sft_weight: float = 0.5, streamed: bool = False, **options: Any
    ) -> None:
        self.task, self.sft_weight, self.streamed = task, sft_weight, streamed
        super().__init__(*paths, **options)

    def read(self, rows: list[dict[str, Any]]) -> list[list[Answer]]:
        """Return the chosen and the rejected answer of each row."""
        return [[self.tokens(row["prompt"], row[name]) for name in ("chosen", "rejected")] for row in rows]

    def rows_of_steps(self) -> list[list[int]]:
        """Return rows as the seed orders them, or a step after the other of the file, again and again."""
        if not self.streamed:
            return super().rows_of_steps()
        return (np.arange(STEPS * GLOBAL_BATCH) % self.rows).reshape(STEPS, GLOBAL_BATCH).tolist()

    def measure(self, rows) -> dict[str, torch.Tensor]:
        columns: dict[str, list] = {name: [] for name in ("pair", "chosen", "rejected", "right", "logp", "tokens")}
        for pair in (self.answers[i] for i in rows):
            (chosen, of_chosen), (rejected, of_rejected) = map(self.compared, pair)
            long, short = (len(ids) - start for ids, start in pair)
            if self.task == "dpo":
                rewards = BETA * (chosen - of_chosen), BETA * (rejected - of_rejected)
                loss = -logsigmoid(rewards[0] - rewards[1])
            else:
                means = chosen / long, rejected / short
                odds = [mean.exp() / (1 - mean.exp()) for mean in means]
                loss, rewards = -BETA * logsigmoid((odds[0] / odds[1]).log()), (BETA * means[0], BETA * means[1])
            for name, value in zip(columns, (loss, *rewards, rewards[0] > rewards[1], chosen, long), strict=True):
                columns[name].append(value)
        count, nll = len(rows), -sum(columns["logp"]) / sum(columns["tokens"])
        return {
            "loss": sum(columns["pair"]) / count + self.sft_weight * nll,
            "rewards/chosen": sum(columns["chosen"]) / count,
            "rewards/rejected": sum(columns["rejected"]) / count,
            "rewards/accuracies": sum(columns["right"]) / count,
            "logps/chosen": sum(columns["logp"]) / count,
            "nll_loss": nll,
        }


@pytest.fixture(scope="module")
def loop(tiny_model, pairs):
    """Return the loop with the given options."""
    torch.set_num_threads(1)
    return functools.cache(functools.partial(PairLoop, tiny_model, pairs))


@pytest.mark.parametrize(
    ("processes", "per_device"),
    [(2, 1), *(pytest.param(*layout, marks=pytest.mark.slow) for layout in ((1, 8), (4, 2)))],
)
def test_dpo_with_a_term_of_its_own_divisor_takes_the_step_of_a_plain_loop(processes, per_device, job, loop):
    loop().assert_equal(job(processes, per_device, "--task dpo --sft_weight 0.5"))


@pytest.mark.parametrize("layout", [(2, 2), pytest.param((4, 1), marks=pytest.mark.slow)])
def test_orpo_takes_the_step_of_a_plain_loop(layout, job, loop):
    loop(task="orpo", sft_weight=1.0).assert_equal(job(*layout, "--task orpo"))


@pytest.mark.parametrize(
    ("layout", "extra"),
    [
        ((1, 1), "--task dpo --sft_weight 0.5"),
        pytest.param((2, 2), "--task orpo --attn_implementation eager", marks=pytest.mark.slow),
        pytest.param((1, 4), "--task dpo --sft_weight 0.5 --reference precomputed", marks=pytest.mark.slow),
        pytest.param((4, 1), "--task dpo --sft_weight 0.5", marks=pytest.mark.slow),
    ],
)
def test_packed_pairs_take_the_step_of_a_plain_loop(layout, extra, job, loop):
    task, weight = ("dpo", 0.5) if "dpo" in extra else ("orpo", 1.0)
    loop(task=task, sft_weight=weight, packed=True).assert_equal(job(*layout, f"{extra} --packing on"))


def test_full_weights_with_a_precomputed_reference_take_the_step_of_a_plain_loop(job, loop):
    loop(sft_weight=0.0, full=True).assert_equal(job(2, 1, "--task dpo --method full"))


def test_a_killed_run_with_a_precomputed_reference_ends_like_a_whole_one(job, loop):
    options = f"{SAVED} --reference precomputed"
    whole = job(2, 2, options, "whole")
    # Both routes to the reference take the same steps.
    loop().assert_equal(whole)
    resumed = job(2, 2, f"{options} --resume {whole}/checkpoint-2", "resumed")
    assert_same_end(whole, resumed, PairLoop.metrics)
    (whole / "checkpoint-3" / "reference_log_probabilities.safetensors").stat()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_fsdp2_takes_the_step_of_a_plain_loop(method, job, loop):
    folder = job(2, 2, f"--task dpo --sft_weight 0.5 --method {method}", f"fsdp2-{method}", {"UNSLOTH_FSDP2": "1"})
    loop(full=method == "full").assert_equal(folder)


def printed(folder: Path) -> str:
    """Return what the first rank of a run printed, with single spaces."""
    return " ".join((folder.parent.parent / f"{folder.name}.out" / "rank_0.txt").read_text().split())


def reference_values(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoint-3" / "reference_log_probabilities.safetensors")


def test_a_reference_pass_takes_no_more_pairs_at_once_than_a_micro_batch():
    sizes = []

    class Pairs(list):
        def members(self, index: int) -> list[int]:
            return [index]

    rows = SimpleNamespace(
        counts=SimpleNamespace(rows=5),
        units=5,
        packing=None,
        added={},
        examples=Pairs(range(6)),
        lengths=lambda: np.arange(6),
    )
    data = TrainingData(rows, None, BatchPlan(2, 4, 1), None)
    reference = Precomputed(lambda *_: None, lambda of_rows, model, batch: torch.ones(len(batch), 2), data)
    runner = SimpleNamespace(
        batch_of=lambda pairs: sizes.append(len(pairs)) or pairs,
        device="cpu",
        model=torch.nn.Linear(1, 1),
        autocast=nullcontext,
    )
    reference.prepare(runner, SimpleNamespace(ranks=Ranks(0, 0, 1, 1)), data, None)
    assert sizes == [2, 2, 2] and rows.added["reference"].tolist() == [[1, 1]] * 5 + [[0, 0]]


def test_packed_pairs_with_another_reference_take_the_step_of_a_plain_loop(job, loop, other_model):
    expected = loop(packed=True, reference=other_model)
    # Rewards begin elsewhere than at 0.
    assert abs(expected.logged[0]["rewards/chosen"]) > 0.01
    folder = job(1, 1, f"--task dpo --sft_weight 0.5 --packing on --reference_model {other_model}", "packed-other")
    expected.assert_equal(folder)
    assert "computed once before step 1" in printed(folder)


@pytest.mark.slow
def test_a_killed_run_with_another_reference_ends_like_a_whole_one(job, loop, other_model, tiny_model, tmp_path):
    options = f"{SAVED} --reference_model {other_model}"
    whole = job(2, 2, options, "whole-other")
    loop(reference=other_model).assert_equal(whole)
    resumed = job(2, 2, f"{options} --resume {whole}/checkpoint-2", "resumed-other")
    assert_same_end(whole, resumed, PairLoop.metrics)
    assert "Loading reference model" in printed(whole) and "Loading reference model" not in printed(resumed)
    argv = (
        f"--config {whole}/settings.yaml --run_name another --reference_model {tiny_model} "
        f"--resume {whole}/checkpoint-2"
    )
    result = run_ranks(1, train, argv.split(), str(tmp_path), folder=tmp_path / "out")
    assert result.codes == [2] and f"reference_model {other_model} -> {tiny_model}" in result.output, result.output
    # Its values are not those that the checkpoint keeps, so they are computed anew.
    anew = job(1, 2, f"{SAVED} --reference_model {tiny_model} --resume_anyway --resume {whole}/checkpoint-2", "anew")
    expected = reference_values(job(1, 2, f"{SAVED} --reference_model {tiny_model}", "own"))
    assert all(torch.equal(values, expected[name]) for name, values in reference_values(anew).items())
    argv = (
        f"--config {whole}/settings.yaml --run_name none --resume {whole}/checkpoint-2 --resume_anyway "
        "--reference precomputed"
    )
    argv = [*argv.split(), "--reference_model", "none"]
    result = run_ranks(1, train, argv, str(tmp_path), folder=tmp_path / "out_none")
    assert result.codes == [2] and "holds the values of another reference model" in result.output, result.output


def test_the_model_as_its_own_reference_gives_the_values_of_the_other_routes(job, loop, tiny_model):
    run = job(1, 2, f"{SAVED} --reference_model {tiny_model}", "own")
    precomputed = reference_values(job(2, 2, f"{SAVED} --reference precomputed", "whole"))
    values = reference_values(run)
    assert all(torch.allclose(values[name], precomputed[name], rtol=1e-6, atol=0) for name in ("train", "eval"))
    # As a run does that turns the adapter off.
    loop().assert_equal(run)


@pytest.mark.parametrize("layout", [(1, 8), pytest.param((2, 2), marks=pytest.mark.slow)])
def test_an_adapter_as_reference_takes_the_step_of_a_plain_loop(layout, job, loop, adapter):
    expected = loop(reference=adapter)
    assert abs(expected.logged[0]["rewards/chosen"]) > 0.01
    whole = job(*layout, f"{SAVED} --reference_model {adapter}", f"adapter-{layout[0]}")
    expected.assert_equal(whole)
    if layout[0] == 2:
        resumed = job(*layout, f"{SAVED} --reference_model {adapter} --resume {whole}/checkpoint-2", "adapter-resumed")
        assert_same_end(whole, resumed, PairLoop.metrics)
        assert "Loading reference model" not in printed(resumed)


@pytest.mark.slow
def test_full_weights_with_an_adapter_as_reference_take_the_step_of_a_plain_loop(job, loop, adapter):
    loop(sft_weight=0.0, full=True, reference=adapter).assert_equal(
        job(1, 8, f"--task dpo --method full --reference_model {adapter}", "full-adapter")
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_fsdp2_with_another_reference_takes_the_step_of_a_plain_loop(kind, job, loop, other_model, adapter):
    reference = other_model if kind == "model" else adapter
    folder = job(2, 2, f"{SAVED} --reference_model {reference}", f"fsdp2-{kind}", {"UNSLOTH_FSDP2": "1"})
    loop(reference=reference).assert_equal(folder)


@pytest.mark.parametrize(
    ("layout", "method"),
    [
        ((1, 8), "lora"),
        pytest.param((1, 4), "full", marks=pytest.mark.slow),
        pytest.param((2, 2), "lora", marks=pytest.mark.slow),
    ],
)
def test_a_stream_with_another_reference_takes_the_step_of_a_plain_loop(layout, method, job, loop, other_model):
    options = f"{SAVED} --streaming --shuffle_buffer 0 --reference_model {other_model} --method {method}"
    whole = job(*layout, options, f"streamed-{method}-{layout[0]}")
    loop(full=method == "full", reference=other_model, streamed=True).assert_equal(whole)
    if layout[0] == 2:
        resumed = job(*layout, f"{options} --resume {whole}/checkpoint-2", "streamed-resumed")
        assert_same_end(whole, resumed, PairLoop.metrics)
        assert "Loading reference model" in printed(resumed) and "computed in each step" in printed(resumed)


@pytest.mark.slow
def test_packs_of_a_stream_with_the_model_as_its_own_reference_take_the_steps_of_the_model_without_its_adapter(
    job, tiny_model
):
    options = f"{SAVED} --streaming --packing on"
    off, with_reference = (
        job(1, 1, options, "packs-off"),
        job(1, 1, f"{options} --reference_model {tiny_model}", "packs-own"),
    )
    for line, other in zip(history(with_reference), history(off), strict=True):
        names = [name for name in PairLoop.metrics if name not in PairLoop.undecided]
        assert [line[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-5, abs=3e-6)
    assert history(with_reference)[-1]["rewards/chosen"] > 0.01
