"""KTO takes the steps of a plain PyTorch loop, whose divergence is that of the whole step, whatever the layout."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import demo_rows, save_llama, write_jsonl
from tests.plain_loop import PlainLoop, assert_same_end, history, run_once, units_of
from tests.ranks import run_ranks, train
from unsloth_ddp.distributed.signals import StopRequest
from unsloth_ddp.training.tasks.kto import KtoTask

RATE, BETA, MOST = 2.0, 0.3, 36
WEIGHTS = (1.5, 0.75)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory) -> Path:
    """Return 13 rows of very different lengths; some mismatched rows are cut."""
    rows = [row["messages"] for row in demo_rows()][:13]
    found = []
    for number, row in enumerate(rows):
        answer = {"role": "assistant", "content": " ".join(["Oslo"] * (number % 4 * 4)) + row[1]["content"]}
        asked = {"role": "user", "content": row[0]["content"] + " please" * (number % 5)}
        found.append({"prompt": [asked], "completion": [answer], "label": number % 3 != 0})
    return write_jsonl(tmp_path_factory.mktemp("labelled") / "labelled.jsonl", found)


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_model, labelled):
    """Run three steps once for each layout and options; returns the run's folder."""
    cwd = tmp_path_factory.mktemp("kto")

    def run(processes: int, per_device: int, extra: str = "", name: str = "", environ=None) -> Path:
        name = name or f"{processes}x{per_device}{extra.replace(' ', '')}"
        options = (
            f"--task kto --model {tiny_model} --dataset {labelled} --learning_rate {RATE} --max_length {MOST} --beta {BETA} "
            f"--desirable_weight {WEIGHTS[0]} --undesirable_weight {WEIGHTS[1]} "
            f"{'' if 'streaming' in extra else f'--eval_dataset {labelled}'} {extra}"
        )
        return run_once(cwd, name, processes, per_device, options, environ)

    return run


class KtoLoop(PlainLoop):
    metrics = (
        "loss", "kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected",
    )  # fmt: skip

    def __init__(
        self, folder: Path, rows: Path, full: bool = False, packed: bool = False, reference: Path | None = None
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        read = [json.loads(line) for line in rows.read_text().splitlines()]
        own = []
        for row in read:
            # The role's token opens the answer, and is not part of it.
            start = len(tokenizer.apply_chat_template(row["prompt"], return_dict=False)) + 1
            ids = tokenizer.apply_chat_template(row["prompt"] + row["completion"], return_dict=False)
            own.append((ids[:MOST], start))
        cycle = np.arange(len(own))
        np.random.default_rng(0).shuffle(cycle)
        partner = dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        mixed = [(ids[:start] + own[partner[i]][0][own[partner[i]][1] :], start) for i, (ids, start) in enumerate(own)]
        assert any(len(ids) > MOST for ids, _ in mixed), "no mismatched row is cut"
        self.answers = [(a, (b[0][:MOST], b[1]), r["label"]) for a, b, r in zip(own, mixed, read, strict=True)]
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.untrained = copy.deepcopy(base).double()
        if reference:
            self.untrained = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float64)
        # A pack holds a row and its mismatched row of any length.
        lengths = [len(one[0]) + len(other[0]) for one, other, _ in self.answers]
        units = units_of(lengths, 2 * MOST if packed else None)
        super().__init__(base, units, RATE, None if full else "all-linear")
        assert max(one["kl"] for one in self.logged) > 0.01, self.logged

    @staticmethod
    def answer(model, row: tuple[list[int], int]) -> torch.Tensor:
        ids, start = torch.tensor(row[0]), row[1]
        scores = torch.log_softmax(model(ids[None]).logits[0, :-1], dim=-1)
        return scores[torch.arange(len(ids) - 1), ids[1:]][start - 1 :].sum()

    def measure(self, rows) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            mixed = [self.answers[i][1] for i in rows]
            differences = [self.answer(self.model, row) - self.answer(self.untrained, row) for row in mixed]
            kl = (sum(differences) / len(rows)).clamp(min=0)
        losses, rewards, logps = [], {True: [], False: []}, {True: [], False: []}
        for row, _, label in (self.answers[i] for i in rows):
            policy = self.answer(self.model, row)
            with torch.no_grad():
                ratio = policy - self.answer(self.untrained, row)
            ratio = policy - (policy - ratio).detach()
            sign, weight = (1, WEIGHTS[0]) if label else (-1, WEIGHTS[1])
            losses.append(weight * (1 - torch.sigmoid(BETA * sign * (ratio - kl))))
            rewards[label].append(BETA * ratio)
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
def loops(tiny_model, labelled):
    made: dict[tuple, KtoLoop] = {}
    torch.set_num_threads(1)

    def loop(*key) -> KtoLoop:
        if key not in made:
            made[key] = KtoLoop(tiny_model, labelled, *key)
        return made[key]

    return loop


@pytest.mark.parametrize(
    ("processes", "per_device"),
    [(1, 8), (2, 1), pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_kto_takes_the_step_of_a_plain_loop(processes, per_device, job, loops):
    loops().assert_equal(job(processes, per_device))


@pytest.mark.parametrize(
    ("layout", "reference"),
    [
        ((1, 1), "adapter_off"),
        ((2, 2), "precomputed"),
        pytest.param((4, 1), "adapter_off", marks=pytest.mark.slow),
        pytest.param((1, 4), "precomputed", marks=pytest.mark.slow),
    ],
)
def test_packed_answers_take_the_step_of_a_plain_loop(layout, reference, job, loops):
    loops(False, True).assert_equal(job(*layout, f"--packing on --reference {reference}"))


def test_another_reference_takes_the_step_of_a_plain_loop(job, tiny_model, labelled, tmp_path_factory):
    # So close that its KL is not far from that of the model itself, at which the losses are not flat.
    other = save_llama(tmp_path_factory.mktemp("models") / "other", initializer_range=0.05, num_hidden_layers=3)
    KtoLoop(tiny_model, labelled, False, False, other).assert_equal(job(2, 2, f"--reference_model {other}", "other"))


def test_full_weights_with_a_precomputed_reference_take_the_step_of_a_plain_loop(job, loops):
    loops(True).assert_equal(job(2, 1, "--method full", "full"))


@pytest.mark.parametrize("reference", ["precomputed", pytest.param("adapter_off", marks=pytest.mark.slow)])
def test_a_killed_run_ends_like_a_whole_one(reference, job, loops):
    options = f"--reference {reference} --lora_dropout 0 --save_strategy steps --save_steps 1"
    whole = job(2, 2, options, f"whole-{reference}")
    # Both routes to the reference take the same steps.
    loops().assert_equal(whole)
    resumed = job(2, 2, f"{options} --resume {whole}/checkpoint-2", f"resumed-{reference}")
    assert_same_end(whole, resumed, KtoLoop.metrics)


@pytest.mark.parametrize("packing", ["off", "on"])
def test_a_streamed_run_does_not_depend_on_the_layout_and_ends_like_a_whole_one(packing, job):
    options = (
        f"--streaming --shuffle_buffer 5 --packing {packing} --lora_dropout 0 --save_strategy steps --save_steps 1"
    )
    whole, other = job(2, 2, options, f"streamed-{packing}"), job(1, 4, options, f"streamed-one-{packing}")
    resumed = job(2, 2, f"{options} --resume {whole}/checkpoint-2", f"streamed-resumed-{packing}")
    assert_same_end(whole, resumed, KtoLoop.metrics)
    expected, found = (load_file(folder / "adapter_model.safetensors") for folder in (whole, other))
    assert all(torch.allclose(expected[name], found[name], rtol=1e-4, atol=1e-6) for name in expected)
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
        f"--task kto --model {tiny_model} --dataset {labelled} --eval_dataset {labelled} --run_name stopped --max_steps 2 "
        "--eval_steps 1 --per_device_eval_batch_size 3 --report_to none --gradient_checkpointing none"
    ).split()
    stop = train_and_stop_before_an_evaluation_measures
    result = run_ranks(1, stop, argv, str(tmp_path), folder=tmp_path / "out", timeout=600)
    assert result.codes == [75] and "Stopped on SIGTERM" in result.output, result.output


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_fsdp2_takes_the_step_of_a_plain_loop(method, job, loops):
    folder = job(2, 2, f"--method {method}", f"fsdp2-{method}", {"UNSLOTH_FSDP2": "1"})
    loops(method == "full").assert_equal(folder)
