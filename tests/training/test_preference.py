"""Preference runs take the steps of a plain PyTorch loop, whatever the layout, the reference's route and a kill between them."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid

from tests.conftest import demo_rows, write_jsonl
from tests.ranks import run_ranks, train

GLOBAL_BATCH, STEPS, SEED, RATE, RANK, BETA = 8, 3, 5, 0.5, 8, 0.3
TOLERANCE = 5e-6
METRICS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "nll_loss")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    """13 pairs of very different lengths, so that the second step of an epoch holds 5."""
    rows = [row["messages"] for row in demo_rows()]
    found = []
    for number, (one, other) in enumerate(zip(rows[:13], rows[13:26], strict=True)):
        rejected = {"role": "assistant", "content": " ".join(["Oslo"] * (1 + number % 4)) + other[1]["content"]}
        found.append({"prompt": one[:-1], "chosen": one[-1:], "rejected": [rejected]})
    return write_jsonl(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", found)


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_model, pairs):
    """Run three steps once for each layout and options; returns the run's folder."""
    cwd = tmp_path_factory.mktemp("preference")

    def run(processes: int, per_device: int, extra: str = "--task dpo", name: str = "", environ=None) -> Path:
        name = name or f"{processes}x{per_device}{extra.replace(' ', '')}".replace("/", "_")
        if not (cwd / "outputs" / name / "summary.json").exists():
            argv = (
                f"--model {tiny_model} --dataset {pairs} --eval_dataset {pairs} --run_name {name} --optim sgd --learning_rate {RATE} "
                f"--lora_r {RANK} --lora_alpha {RANK} --lr_scheduler_type constant --max_grad_norm 0 --max_steps {STEPS} "
                f"--seed {SEED} --global_batch_size {GLOBAL_BATCH} --per_device_train_batch_size {per_device} "
                "--per_device_eval_batch_size 3 --max_length 64 --logging_steps 1 --save_strategy no --report_to none "
                f"--gradient_checkpointing none --beta {BETA} {extra}"
            ).split()
            run_ranks(
                processes, train, argv, str(cwd), folder=cwd / f"{name}.out", environ=environ, timeout=600
            ).check()
        return cwd / "outputs" / name

    return run


def history(folder: Path, key: str = "loss") -> list[dict]:
    return [e for e in json.loads((folder / "trainer_state.json").read_text())["log_history"] if key in e]


class PlainLoop:
    """An independent loop in double precision, one answer at a time, on none of the kit's code."""

    def __init__(self, folder: Path, rows: Path, task: str, sft_weight: float, full: bool = False) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.task, self.sft_weight = task, sft_weight
        self.pairs = []
        for line in rows.read_text().splitlines():
            row = json.loads(line)
            prompt = tokenizer.apply_chat_template(row["prompt"], return_dict=False)
            whole = [
                tokenizer.apply_chat_template(row["prompt"] + row[n], return_dict=False) for n in ("chosen", "rejected")
            ]
            # The role's token opens the answer, and is not part of it.
            self.pairs.append([(torch.tensor(ids[:64]), len(prompt) + 1) for ids in whole])
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.untrained = copy.deepcopy(base).double()
        torch.manual_seed(SEED)
        config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = (base if full else get_peft_model(base, config)).double()
        self.initial = {n: p.detach().clone() for n, p in self.trained()}
        self.logged = [self.step(rows) for rows in self.rows_of_steps()]
        with torch.no_grad():
            self.evaluated = self.measure(range(len(self.pairs)))

    def trained(self):
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def rows_of_steps(self) -> list[list[int]]:
        steps: list[list[int]] = []
        for epoch in range(STEPS):
            order = np.arange(len(self.pairs))
            np.random.default_rng([SEED, epoch]).shuffle(order)
            steps += [order[start : start + GLOBAL_BATCH].tolist() for start in range(0, len(order), GLOBAL_BATCH)]
        return steps[:STEPS]

    def answer(self, model, pair: int, side: int) -> tuple[torch.Tensor, int]:
        ids, start = self.pairs[pair][side]
        scores = torch.log_softmax(model(ids[None]).logits[0, :-1], dim=-1)
        return scores[torch.arange(len(ids) - 1), ids[1:]][start - 1 :].sum(), len(ids) - start

    def measure(self, rows) -> dict[str, torch.Tensor]:
        found: dict[str, list] = {name: [] for name in ("pair", "chosen", "rejected", "right", "logp", "tokens")}
        for pair in rows:
            (chosen, long), (rejected, short) = (self.answer(self.model, pair, side) for side in (0, 1))
            if self.task == "dpo":
                with torch.no_grad():
                    reference = [self.answer(self.untrained, pair, side)[0] for side in (0, 1)]
                rewards = BETA * (chosen - reference[0]), BETA * (rejected - reference[1])
                loss = -logsigmoid(rewards[0] - rewards[1])
            else:
                means = chosen / long, rejected / short
                odds = [mean.exp() / (1 - mean.exp()) for mean in means]
                loss, rewards = -BETA * logsigmoid((odds[0] / odds[1]).log()), (BETA * means[0], BETA * means[1])
            for name, value in zip(found, (loss, *rewards, rewards[0] > rewards[1], chosen, long), strict=True):
                found[name].append(value)
        count, nll = len(rows), -sum(found["logp"]) / sum(found["tokens"])
        return {
            "loss": sum(found["pair"]) / count + self.sft_weight * nll,
            "rewards/chosen": sum(found["chosen"]) / count,
            "rewards/rejected": sum(found["rejected"]) / count,
            "rewards/accuracies": sum(found["right"]) / count,
            "logps/chosen": sum(found["logp"]) / count,
            "nll_loss": nll,
        }

    def step(self, rows) -> dict[str, float]:
        found = self.measure(rows)
        found["loss"].backward()
        with torch.no_grad():
            for _, parameter in self.trained():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
                    parameter.grad = None
        return {name: float(torch.as_tensor(value).detach()) for name, value in found.items()}

    def assert_equal(self, folder: Path) -> None:
        """Compare log lines, the evaluation, and the update of all weights at once."""
        lines = history(folder)
        # Before the first update all rewards are 0 to rounding, so which of two is larger says nothing.
        lines[0]["rewards/accuracies"], self.logged[0]["rewards/accuracies"] = 0.0, 0.0
        for found, expected in zip(lines, self.logged, strict=True):
            assert [found[n] for n in METRICS] == pytest.approx([expected[n] for n in METRICS], rel=1e-5, abs=2e-6)
        evaluated = history(folder, "eval_loss")[-1] if history(folder, "eval_loss") else None
        if evaluated:
            expected = [float(self.evaluated[n]) for n in METRICS]
            assert [evaluated[f"eval_{n}"] for n in METRICS] == pytest.approx(expected, rel=1e-5, abs=2e-6)
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["eval_loss"] == pytest.approx(float(self.evaluated["loss"]), rel=1e-5)
        path = folder / "adapter_model.safetensors"
        weights = load_file(path if path.exists() else folder / "model.safetensors")
        names = {n.replace(".default", ""): n for n, _ in self.trained()}
        assert set(weights) >= names.keys()
        now = dict(self.trained())
        expected = torch.cat([(now[n] - self.initial[n]).flatten() for n in names.values()])
        update = torch.cat([(weights[key].double() - self.initial[n]).flatten() for key, n in names.items()])
        assert ((update - expected).norm() / expected.norm()).item() < TOLERANCE


@pytest.fixture(scope="module")
def loops(tiny_model, pairs):
    made: dict[tuple, PlainLoop] = {}
    torch.set_num_threads(1)

    def loop(*key) -> PlainLoop:
        if key not in made:
            made[key] = PlainLoop(tiny_model, pairs, *key)
        return made[key]

    return loop


@pytest.mark.parametrize(
    ("processes", "per_device"),
    [(1, 8), (2, 1), pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)],
)
def test_dpo_with_a_term_of_its_own_divisor_takes_the_step_of_a_plain_loop(processes, per_device, job, loops):
    loops("dpo", 0.5).assert_equal(job(processes, per_device, "--task dpo --sft_weight 0.5"))


@pytest.mark.parametrize(
    "layout", [(2, 2), pytest.param((1, 8), marks=pytest.mark.slow), pytest.param((4, 1), marks=pytest.mark.slow)]
)
def test_orpo_takes_the_step_of_a_plain_loop(layout, job, loops):
    loops("orpo", 1.0).assert_equal(job(*layout, "--task orpo"))


def test_full_weights_with_a_precomputed_reference_take_the_step_of_a_plain_loop(job, loops):
    loops("dpo", 0.0, True).assert_equal(job(2, 1, "--task dpo --method full"))


def test_a_killed_run_with_a_precomputed_reference_ends_like_a_whole_one(job, loops):
    options = (
        "--task dpo --sft_weight 0.5 --reference precomputed --lora_dropout 0 --save_strategy steps --save_steps 1"
    )
    whole = job(2, 2, options, "whole")
    # Both routes to the reference take the same steps.
    loops("dpo", 0.5).assert_equal(whole)
    resumed = job(2, 2, f"{options} --resume {whole}/checkpoint-2", "resumed")
    expected, found = (load_file(folder / "adapter_model.safetensors") for folder in (whole, resumed))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    (end, again) = (history(folder)[-1] for folder in (whole, resumed))
    assert all(end[name] == again[name] for name in METRICS)
    (whole / "checkpoint-3" / "reference_log_probabilities.safetensors").stat()


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_fsdp2_takes_the_step_of_a_plain_loop(method, job, loops):
    folder = job(2, 2, f"--task dpo --sft_weight 0.5 --method {method}", f"fsdp2-{method}", {"UNSLOTH_FSDP2": "1"})
    loops("dpo", 0.5, method == "full").assert_equal(folder)
