"""KTO takes the steps of a plain PyTorch loop, whose divergence is that of the whole step, whatever the layout."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import demo_rows, save_llama, write_jsonl
from tests.plain_loop import Answer, AnswerLoop, assert_same_end, history, run_once
from tests.ranks import run_ranks, train
from unsloth_ddp.distributed.signals import StopRequest
from unsloth_ddp.training.tasks.kto import KtoTask

RATE, BETA, MOST = 2.0, 0.3, 36
WEIGHTS = (1.5, 0.75)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory) -> Path:
    """Return 13 rows of very different lengths; some mismatched rows are cut."""
    rows = [row["messages"] for row in demo_rows()][:13]
    labelled_rows = []
    for number, row in enumerate(rows):
        answer = {"role": "assistant", "content": " ".join(["Oslo"] * (number % 4 * 4)) + row[1]["content"]}
        question = {"role": "user", "content": row[0]["content"] + " please" * (number % 5)}
        labelled_rows.append({"prompt": [question], "completion": [answer], "label": number % 3 != 0})
    return write_jsonl(tmp_path_factory.mktemp("labelled") / "labelled.jsonl", labelled_rows)


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_model, labelled):
    """Run three steps once for each layout and options; returns the run's folder."""
    cwd = tmp_path_factory.mktemp("kto")

    def run(processes: int, per_device: int, extra: str = "", name: str = "", environ=None) -> Path:
        name = name or f"{processes}x{per_device}{extra.replace(' ', '')}"
        options = (
            f"--task kto --model {tiny_model} --dataset {labelled} --learning_rate {RATE} --max_length {MOST} --beta "
            f"{BETA} --desirable_weight {WEIGHTS[0]} --undesirable_weight {WEIGHTS[1]} "
            f"{'' if 'streaming' in extra else f'--eval_dataset {labelled}'} {extra}"
        )
        return run_once(cwd, name, processes, per_device, options, environ)

    return run


class KtoLoop(AnswerLoop):
    metrics = (
        "loss", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected",
    )  # fmt: skip
    rate, most_tokens = RATE, MOST

    def __init__(self, *paths: Path, **options: Any) -> None:
        super().__init__(*paths, **options)
        assert max(line["kl"] for line in self.logged) > 0.01, self.logged

    def read(self, rows: list[dict[str, Any]]) -> list[list[Answer]]:
        """Return the answer of each row, and that of its mismatched row."""
        self.labels = [row["label"] for row in rows]
        answers = [self.tokens(row["prompt"], row["completion"]) for row in rows]
        cycle = np.arange(len(answers))
        np.random.default_rng(0).shuffle(cycle)
        partner = dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        mixed = [
            (ids[:start] + answers[partner[i]][0][answers[partner[i]][1] :], start)
            for i, (ids, start) in enumerate(answers)
        ]
        assert any(len(ids) > MOST for ids, _ in mixed), "no mismatched row is cut"
        return [[answer, (ids[:MOST], start)] for answer, (ids, start) in zip(answers, mixed, strict=True)]

    def measure(self, rows) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            mixed = [self.compared(self.answers[i][1]) for i in rows]
            kl = (sum(policy - reference for policy, reference in mixed) / len(rows)).clamp(min=0)
        losses, rewards, logps = [], {True: [], False: []}, {True: [], False: []}
        for i in rows:
            label, (policy, reference) = self.labels[i], self.compared(self.answers[i][0])
            sign, weight = (1, WEIGHTS[0]) if label else (-1, WEIGHTS[1])
            losses.append(weight * (1 - torch.sigmoid(BETA * sign * (policy - reference - kl))))
            rewards[label].append(BETA * (policy - reference))
            logps[label].append(policy)
        good, bad = (sum(rewards[label]) / len(rewards[label]) for label in (True, False))
        return {
            "loss": sum(losses) / len(losses),
            "kl": kl,
            "rewards/chosen": good,
            "rewards/rejected": bad,
            "rewards/margins": good - bad,
            "logps/chosen": sum(logps[True]) / len(logps[True]),
            "logps/rejected": sum(logps[False]) / len(logps[False]),
        }


@pytest.fixture(scope="module")
def loop(tiny_model, labelled):
    """Return the loop with the given options."""
    torch.set_num_threads(1)
    return functools.cache(functools.partial(KtoLoop, tiny_model, labelled))


@pytest.mark.parametrize(
    ("processes", "per_device"),
    [(2, 1), *(pytest.param(*layout, marks=pytest.mark.slow) for layout in ((1, 8), (4, 2)))],
)
def test_kto_takes_the_step_of_a_plain_loop(processes, per_device, job, loop):
    loop().assert_equal(job(processes, per_device))


@pytest.mark.parametrize(
    ("layout", "reference"),
    [
        ((2, 2), "precomputed"),
        pytest.param((4, 1), "adapter_off", marks=pytest.mark.slow),
        pytest.param((1, 4), "precomputed", marks=pytest.mark.slow),
    ],
)
def test_packed_answers_take_the_step_of_a_plain_loop(layout, reference, job, loop):
    loop(packed=True).assert_equal(job(*layout, f"--packing on --reference {reference}"))


def test_another_reference_takes_the_step_of_a_plain_loop(job, loop, tmp_path_factory):
    # So close that its KL is not far from that of the model itself, at which the losses are not flat.
    other = save_llama(tmp_path_factory.mktemp("models") / "other", initializer_range=0.05, num_hidden_layers=3)
    loop(reference=other).assert_equal(job(1, 8, f"--reference_model {other}", "other"))


@pytest.mark.slow
def test_full_weights_with_a_precomputed_reference_take_the_step_of_a_plain_loop(job, loop):
    loop(full=True).assert_equal(job(2, 1, "--method full", "full"))


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["precomputed", "adapter_off"])
def test_a_killed_run_ends_like_a_whole_one(reference, job, loop):
    options = f"--reference {reference} --lora_dropout 0 --save_strategy steps --save_steps 1"
    whole = job(2, 2, options, f"whole-{reference}")
    # Both routes to the reference take the same steps.
    loop().assert_equal(whole)
    resumed = job(2, 2, f"{options} --resume {whole}/checkpoint-2", f"resumed-{reference}")
    assert_same_end(whole, resumed, KtoLoop.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["off", "on"])
def test_a_streamed_run_does_not_depend_on_the_layout_and_ends_like_a_whole_one(packing, job):
    options = (
        f"--streaming --shuffle_buffer 5 --packing {packing} --lora_dropout 0 --save_strategy steps --save_steps 1"
    )
    whole, other = job(2, 2, options, f"streamed-{packing}"), job(1, 4, options, f"streamed-one-{packing}")
    resumed = job(2, 2, f"{options} --resume {whole}/checkpoint-2", f"streamed-resumed-{packing}")
    assert_same_end(whole, resumed, KtoLoop.metrics)
    expected, streamed = (load_file(folder / "adapter_model.safetensors") for folder in (whole, other))
    assert all(torch.allclose(expected[name], streamed[name], rtol=1e-4, atol=1e-6) for name in expected)
    kls = [entry["kl"] for entry in history(whole)]
    assert kls == pytest.approx([entry["kl"] for entry in history(other)], rel=1e-4, abs=1e-6) and max(kls) > 0.01


def train_and_stop_before_an_evaluation_measures(argv: list[str], cwd: str) -> None:
    """train_ddp.py that is asked to stop at the first batch of an evaluation, and measures none."""
    interrupt, measure = StopRequest.interrupt_evaluation, KtoTask.measure

    def request(self: StopRequest) -> None:
        self.request_stop("SIGTERM")
        interrupt(self)

    def measure_in_training(self: KtoTask, model, batch, divisor):
        assert model.training, "the pass that computes the KL was not interrupted"
        return measure(self, model, batch, divisor)

    StopRequest.interrupt_evaluation = request  # type: ignore[method-assign]
    KtoTask.measure = measure_in_training  # type: ignore[method-assign]
    train(argv, cwd)


def test_a_stop_interrupts_the_pass_that_computes_the_kl_of_an_evaluation(tiny_model, labelled, tmp_path):
    argv = (
        f"--task kto --model {tiny_model} --dataset {labelled} --eval_dataset {labelled} --run_name stopped "
        "--max_steps 2 --eval_steps 1 --per_device_eval_batch_size 3 --report_to none --gradient_checkpointing none"
    ).split()
    stop = train_and_stop_before_an_evaluation_measures
    result = run_ranks(1, stop, argv, str(tmp_path), folder=tmp_path / "out", timeout=600)
    assert result.codes == [75] and "Stopped on SIGTERM" in result.output, result.output


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_fsdp2_takes_the_step_of_a_plain_loop(method, job, loop):
    folder = job(2, 2, f"--method {method}", f"fsdp2-{method}", {"UNSLOTH_FSDP2": "1"})
    loop(full=method == "full").assert_equal(folder)
