"""The step does not depend on how a global batch is laid out, and is the one a plain PyTorch loop takes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import run_ranks, train
from unsloth_ddp.data.order.packing import best_fit

GLOBAL_BATCH, STEPS, SEED, RATE, RANK, MAX_LENGTH = 8, 3, 5, 1.0, 8, 64
TOLERANCE = 1e-6
# (processes, rows a device): all rows at once, and the same global batch over 2 processes, accumulating, and 4.
LAYOUTS = [(1, 8), (2, 1), (4, 2), pytest.param(2, 2, marks=pytest.mark.slow)]
# (processes, packs a device, attention) for a global batch of 4 of 6 packs: the second step of an epoch holds 2.
PACKS = 4
PACKED = [
    pytest.param(1, 4, "sdpa", marks=pytest.mark.slow),
    (1, 1, "eager"),
    pytest.param(2, 2, "eager", marks=pytest.mark.slow),
    (2, 1, "sdpa"),
    pytest.param(4, 1, "sdpa", marks=pytest.mark.slow),
]


def options(model: Path, rows: Path, per_device: int, name: str) -> list[str]:
    """Three steps over 13 rows: the second is the last, incomplete one of the epoch."""
    return (
        f"--model {model} --dataset {rows} --eval_dataset {rows} --run_name {name} --method lora --optim sgd "
        f"--learning_rate {RATE} --lora_r {RANK} --lora_alpha {RANK} --lr_scheduler_type constant --max_grad_norm 0 "
        f"--max_steps {STEPS} --seed {SEED} --global_batch_size {GLOBAL_BATCH} --per_device_train_batch_size "
        f"{per_device} --per_device_eval_batch_size 3 --max_length {MAX_LENGTH} --logging_steps 1 --save_strategy no "
        "--report_to none --gradient_checkpointing none"
    ).split()


def train_without_averaging(argv: list[str], cwd: str) -> None:
    """The same run with each rank dividing by its own tokens, as if nothing were averaged over ranks."""
    from unsloth_ddp.training.step import optimizer_step

    def own_count(units, world_size, sum_over_ranks):
        return torch.stack(units).sum().clamp(min=1).float()

    optimizer_step.step_divisor = own_count
    train(argv, cwd)


class Outcome:
    """What a run left: its adapter and its logged losses."""

    def __init__(self, folder: Path) -> None:
        self.weights = load_file(folder / "adapter_model.safetensors")
        self.summary = json.loads((folder / "summary.json").read_text())
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        self.losses = [entry["loss"] for entry in history if "loss" in entry]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, tiny_model, uneven_rows):
    """Run a layout once; returns its Outcome."""
    cwd = tmp_path_factory.mktemp("parity")
    outcomes: dict[str, Outcome] = {}

    def run(processes: int, per_device: int, target=train, extra: str = "") -> Outcome:
        name = f"{target.__name__}_{processes}x{per_device}{extra.replace(' ', '')}"
        if name not in outcomes:
            argv = [*options(tiny_model, uneven_rows, per_device, name), *extra.split()]
            run_ranks(processes, target, argv, str(cwd), folder=cwd / f"{name}.out").check()
            outcomes[name] = Outcome(cwd / "outputs" / name)
        return outcomes[name]

    return run


class Reference:
    """An independent loop: plain PyTorch and PEFT, one row at a time, no Trainer or collator, no code of the kit."""

    def __init__(self, folder: Path, rows: Path, packed: bool) -> None:
        from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.rows = []
        for line in rows.read_text().splitlines():
            encoded = tokenizer.apply_chat_template(
                json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
            )
            ids = torch.tensor(encoded["input_ids"][:MAX_LENGTH])
            self.rows.append((ids, torch.tensor(encoded["assistant_masks"][:MAX_LENGTH]).bool()))
        packing = best_fit(np.array([len(ids) for ids, _ in self.rows]), MAX_LENGTH)
        # What the seed orders and a step counts: rows, or packs.
        self.units = [
            packing.members(i) if packed else np.array([i]) for i in range(len(packing if packed else self.rows))
        ]
        self.global_batch = PACKS if packed else GLOBAL_BATCH
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.manual_seed(SEED)
        config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        # In double precision, so that all of the difference is the rounding of the run under test.
        self.model = get_peft_model(base, config).double()
        self.initial = {k: v.clone() for k, v in get_peft_model_state_dict(self.model).items()}
        self.losses = [self.step(rows) for rows in self.rows_of_steps()]
        self.final = get_peft_model_state_dict(self.model)
        with torch.no_grad():
            self.eval_loss = self.loss(range(len(self.rows))).item()

    def rows_of_steps(self) -> list[np.ndarray]:
        """A global batch a step in the order of seed and epoch; what is left makes the last step of an epoch."""
        steps: list[np.ndarray] = []
        epoch = 0
        while len(steps) < STEPS:
            order = np.arange(len(self.units))
            np.random.default_rng([SEED, epoch]).shuffle(order)
            for start in range(0, len(order), self.global_batch):
                steps.append(np.concatenate([self.units[i] for i in order[start : start + self.global_batch]]))
            epoch += 1
        return steps[:STEPS]

    def loss(self, rows) -> torch.Tensor:
        """Sum of the token losses of these rows / number of those tokens."""
        total, count = torch.zeros((), dtype=torch.float64), 0
        for index in rows:
            ids, mask = self.rows[index]
            logits = self.model(ids[None]).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
            total, count = total + losses[mask[1:]].sum(), count + int(mask[1:].sum())
        return total / count

    def step(self, rows) -> float:
        """One step of plain gradient descent."""
        loss = self.loss(rows)
        loss.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
                    parameter.grad = None
        return loss.item()


@pytest.fixture(scope="module")
def reference(tiny_model, uneven_rows) -> Reference:
    torch.set_num_threads(1)
    return Reference(tiny_model, uneven_rows, packed=False)


@pytest.fixture(scope="module")
def packed_reference(tiny_model, uneven_rows) -> Reference:
    torch.set_num_threads(1)
    return Reference(tiny_model, uneven_rows, packed=True)


def update_difference(reference: Reference, weights: dict[str, torch.Tensor]) -> float:
    """|update - reference update| / |reference update|, over all adapter weights at once."""
    assert weights.keys() == reference.final.keys()
    expected = torch.cat([(reference.final[k] - reference.initial[k]).flatten() for k in sorted(weights)])
    moved = torch.cat([(weights[k] - reference.initial[k]).flatten() for k in sorted(weights)])
    return ((moved - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("processes", "per_device"), LAYOUTS)
def test_layout_takes_the_step_of_a_plain_loop(processes, per_device, outcome, reference):
    result = outcome(processes, per_device)
    assert update_difference(reference, result.weights) < TOLERANCE
    assert result.losses == pytest.approx(reference.losses, rel=TOLERANCE)


@pytest.mark.parametrize(("processes", "per_device", "attention"), PACKED)
def test_packed_rows_take_the_step_of_a_plain_loop_over_single_rows(
    processes, per_device, attention, outcome, packed_reference
):
    extra = f"--packing on --global_batch_size {PACKS} --attn_implementation {attention}"
    result = outcome(processes, per_device, extra=extra)
    assert update_difference(packed_reference, result.weights) < TOLERANCE
    assert result.losses == pytest.approx(packed_reference.losses, rel=TOLERANCE)
    assert result.summary["eval_loss"] == pytest.approx(packed_reference.eval_loss, rel=TOLERANCE)
    rows = packed_reference.rows_of_steps()
    assert result.summary["tokens"] == sum(len(packed_reference.rows[i][0]) for step in rows for i in step)
    assert result.summary["supervised_tokens"] == sum(
        int(packed_reference.rows[i][1][1:].sum()) for step in rows for i in step
    )
    assert (result.summary["packing"], result.summary["packs"]) == (True, len(packed_reference.units))


def test_eval_loss_and_train_loss_are_token_means(outcome, reference):
    counts = [sum(int(reference.rows[i][1][1:].sum()) for i in rows) for rows in reference.rows_of_steps()]
    train_loss = math.fsum(loss * n for loss, n in zip(reference.losses, counts, strict=True)) / sum(counts)
    for layout in [(1, 8), (2, 1), (4, 2)]:
        summary = outcome(*layout).summary
        assert summary["eval_loss"] == pytest.approx(reference.eval_loss, rel=TOLERANCE)
        assert summary["train_loss"] == pytest.approx(train_loss, rel=TOLERANCE)
        assert summary["supervised_tokens"] == sum(counts)


def test_a_line_of_several_steps_logs_their_token_mean(tmp_path, tiny_model, uneven_rows, reference):
    argv = [*options(tiny_model, uneven_rows, 2, "lines"), "--logging_steps", str(STEPS)]
    run_ranks(2, train, argv, str(tmp_path), folder=tmp_path / "out").check()
    counts = [sum(int(reference.rows[i][1][1:].sum()) for i in rows) for rows in reference.rows_of_steps()]
    # The first step has a line of its own; the next line is of the two steps after it.
    later = sum(loss * n for loss, n in zip(reference.losses[1:], counts[1:], strict=True)) / sum(counts[1:])
    losses = Outcome(tmp_path / "outputs" / "lines").losses
    assert losses == pytest.approx([reference.losses[0], later], rel=TOLERANCE)


def test_the_check_fails_without_averaging(outcome, reference):
    result = outcome(2, 1, target=train_without_averaging)
    assert update_difference(reference, result.weights) > 1e-3
