"""Train in a plain PyTorch loop in double precision, one row at a time, for comparison with runs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import run_ranks, train
from unsloth_ddp.data.order.packing import best_fit

# With 13 rows the second step of an epoch holds 5; with 6 packs and 4 a step it holds 2.
GLOBAL_BATCH, PACKS, STEPS, SEED, RANK = 8, 4, 3, 5, 8
TOLERANCE = 5e-6


def run_once(
    cwd: Path,
    name: str,
    processes: int,
    per_device: int,
    options: str,
    environ: dict[str, str] | None = None,
    target: Callable[..., None] = train,
    code: int = 0,
) -> Path:
    """Train the steps of a plain loop, unless a run of this name has; return the run's folder.

    Args:
        options: the model, the rows, the rate, and what differs between runs.
        target: trains with a command line in a folder.
        code: with which every rank ends.
    """
    if not (cwd / "outputs" / name / "summary.json").exists():
        argv = (
            f"--run_name {name} --optim sgd --lora_r {RANK} --lora_alpha {RANK} --lr_scheduler_type constant "
            f"--max_grad_norm 0 --max_steps {STEPS} --seed {SEED} --global_batch_size "
            f"{PACKS if '--packing on' in options else GLOBAL_BATCH} --per_device_train_batch_size {per_device} "
            "--per_device_eval_batch_size 3 --logging_steps 1 --save_strategy no --report_to none "
            f"--gradient_checkpointing none {options}"
        ).split()
        folder = cwd / f"{name}.out"
        ended = run_ranks(processes, target, argv, str(cwd), folder=folder, environ=environ, timeout=600)
        assert set(ended.codes) == {code}, f"exit codes {ended.codes}\n{ended.output}"
    return cwd / "outputs" / name


def history(folder: Path, key: str = "loss") -> list[dict[str, Any]]:
    """Return the log lines of a run that have this value."""
    return [e for e in json.loads((folder / "trainer_state.json").read_text())["log_history"] if key in e]


def units_of(lengths: Sequence[int], capacity: int | None) -> list[np.ndarray]:
    """Return the rows of each pack of up to so many tokens, or each row alone."""
    if capacity is None:
        return [np.array([row]) for row in range(len(lengths))]
    packing = best_fit(np.array(lengths), capacity)
    return [packing.members(pack) for pack in range(len(packing))]


def assert_same_end(whole: Path, resumed: Path, names: Sequence[str]) -> None:
    """Require bit-identical adapters, and the same last log line."""
    expected, found = (load_file(folder / "adapter_model.safetensors") for folder in (whole, resumed))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    end, again = (history(folder)[-1] for folder in (whole, resumed))
    assert all(end[name] == again[name] for name in names)


class PlainLoop:
    """Take the steps of a run on none of the kit's code but the arithmetic of packs; subclasses compute the loss.

    Args:
        base: the model in fp32.
        units: the rows of each unit that the seed orders and a step counts: of one row, or of a pack.
        targets: modules that get an adapter; None to train every weight.
    """

    metrics: tuple[str, ...] = ("loss",)
    # What is 0 to rounding before the first update, so that the sign of it says nothing.
    undecided: tuple[str, ...] = ()
    absolute = 3e-6
    tolerance = TOLERANCE

    def __init__(
        self, base: Any, units: list[np.ndarray], rate: float, targets: str | list[str] | None = "all-linear"
    ) -> None:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(SEED)
        config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets, task_type="CAUSAL_LM")
        # In double precision, so that all of the difference is the rounding of the run under test.
        self.model = (base if targets is None else get_peft_model(base, config)).double()
        self.rate, self.units = rate, units
        self.rows = sum(len(unit) for unit in units)
        self.initial = {n: p.detach().clone() for n, p in self.trained()}
        self.logged = [self.step(rows) for rows in self.rows_of_steps()]
        with torch.no_grad():
            self.evaluated = self.measure(range(self.rows))

    def measure(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the metrics of these rows together; `loss` has a graph."""
        raise NotImplementedError

    def trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def rows_of_steps(self) -> list[list[int]]:
        """Return a global batch a step in the order of seed and epoch; what is left makes the last step of an epoch."""
        steps: list[list[int]] = []
        size = GLOBAL_BATCH if self.rows == len(self.units) else PACKS
        for epoch in range(STEPS):
            order = np.arange(len(self.units))
            np.random.default_rng([SEED, epoch]).shuffle(order)
            for start in range(0, len(order), size):
                steps.append(np.concatenate([self.units[unit] for unit in order[start : start + size]]).tolist())
        return steps[:STEPS]

    def step(self, rows: Sequence[int]) -> dict[str, float]:
        """Take one step of plain gradient descent."""
        found = self.measure(rows)
        found["loss"].backward()
        with torch.no_grad():
            for _, parameter in self.trained():
                if parameter.grad is not None:
                    parameter -= self.rate * parameter.grad
                    parameter.grad = None
        return {name: float(torch.as_tensor(value).detach()) for name, value in found.items()}

    def weights(self, folder: Path) -> dict[str, torch.Tensor]:
        """Return what a run trained, by names without that of the adapter."""
        path = folder / "adapter_model.safetensors"
        return load_file(path if path.exists() else folder / "model.safetensors")

    def assert_equal(self, folder: Path) -> None:
        """Compare log lines, the evaluation, and the update of all weights at once."""
        near = {"rel": 1e-5, "abs": self.absolute}
        for number, (found, expected) in enumerate(zip(history(folder), self.logged, strict=True)):
            names = [name for name in self.metrics if number or name not in self.undecided]
            assert [found[n] for n in names] == pytest.approx([expected[n] for n in names], **near), number
        for found in history(folder, "eval_loss")[-1:]:
            expected = [float(self.evaluated[n]) for n in self.metrics]
            assert [found[f"eval_{n}"] for n in self.metrics] == pytest.approx(expected, **near)
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["packs"] == (None if self.rows == len(self.units) else len(self.units))
        if summary["eval_loss"] is not None:
            assert summary["eval_loss"] == pytest.approx(float(self.evaluated["loss"]), **near)
        weights, now = self.weights(folder), dict(self.trained())
        names = {n.replace(".default", ""): n for n in now}
        shared = [key for key in weights if key in names]
        changed = {key for key, name in names.items() if not torch.equal(now[name], self.initial[name])}
        assert changed <= set(shared)
        expected = torch.cat([(now[names[key]] - self.initial[names[key]]).flatten() for key in shared])
        update = torch.cat([(weights[key].double() - self.initial[names[key]]).flatten() for key in shared])
        assert ((update - expected).norm() / expected.norm()).item() < self.tolerance


# Token ids of a prompt and its answer, and the position of the answer's first token.
Answer = tuple[list[int], int]


class AnswerLoop(PlainLoop):
    """Compare answers with a reference: the untrained model, another one, or an adapter on the untrained one.

    Args:
        folder: of the model.
        rows: a file; `read` makes two answers of each row.
        full: whether every weight is trained.
        packed: whether the two answers of rows are joined to packs of up to 2 x most_tokens.
        reference: folder of another model or an adapter.
    """

    rate: float
    most_tokens: int

    def __init__(
        self, folder: Path, rows: Path, *, full: bool = False, packed: bool = False, reference: Path | None = None
    ) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.answers = self.read([json.loads(line) for line in rows.read_text().splitlines()])
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.untrained = copy.deepcopy(base).double()
        if reference and (reference / "adapter_config.json").exists():
            self.untrained = PeftModel.from_pretrained(copy.deepcopy(base), reference).double()
        elif reference:
            self.untrained = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float64)
        lengths = [sum(len(ids) for ids, _ in two) for two in self.answers]
        units = units_of(lengths, 2 * self.most_tokens if packed else None)
        super().__init__(base, units, self.rate, None if full else "all-linear")

    def read(self, rows: list[dict[str, Any]]) -> list[list[Answer]]:
        """Return the two answers of each row."""
        raise NotImplementedError

    def tokens(self, prompt: list[Any], answer: list[Any]) -> Answer:
        """Return an answer with its prompt, cut."""
        start = len(self.tokenizer.apply_chat_template(prompt, return_dict=False))
        ids = self.tokenizer.apply_chat_template(prompt + answer, return_dict=False)
        # The role's token opens the answer, and is not part of it.
        return ids[: self.most_tokens], start + 1

    def compared(self, answer: Answer) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probability of an answer, and that under the reference without a graph."""
        with torch.no_grad():
            reference = self._sum(self.untrained, answer)
        return self._sum(self.model, answer), reference

    @staticmethod
    def _sum(model: Any, answer: Answer) -> torch.Tensor:
        ids, start = torch.tensor(answer[0]), answer[1]
        scores = torch.log_softmax(model(ids[None]).logits[0, :-1], dim=-1)
        return scores[torch.arange(len(ids) - 1), ids[1:]][start - 1 :].sum()
