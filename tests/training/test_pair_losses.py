"""The losses of pairs are those of TRL's DPO on one process with equal batches, and of the formulas of the papers."""

from __future__ import annotations

import dataclasses
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from tests.conftest import demo_rows, save_llama
from tests.runtimes import cpu_runtime
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.arrow_rows import join_rows
from unsloth_ddp.data.chat.tokenize import Encoder, encode_row
from unsloth_ddp.data.order.collate import Collate, Flatten, PadRight
from unsloth_ddp.data.order.mismatched import with_mismatched
from unsloth_ddp.data.sources.preference import to_labelled, to_pair
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.training.tasks.kto import KtoTask
from unsloth_ddp.training.tasks.pair_losses import PairLoss, log1mexp
from unsloth_ddp.training.tasks.pairs import PairTask
from unsloth_ddp.training.tasks.reference import without_adapter
from unsloth_ddp.utils.errors import UserError

BETA = 0.3
ROWS = [
    {
        "prompt": messages[:1],
        "chosen": messages[1:2],
        "rejected": [{"role": "assistant", "content": "Oslo " * number + "no"}],
    }
    for number, messages in enumerate(row["messages"] for row in demo_rows()[:4])
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Any:
    return adapted(tmp_path_factory.mktemp("pairs"))


def adapted(folder: Path) -> Any:
    """A tiny model with an adapter that changes its answers, and its tokenizer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = save_llama(folder / "model", initializer_range=0.05, attention_dropout=0.5)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(
        base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.5)
    )
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def pair_examples(tokenizer: Any, rows: list[dict] = ROWS, max_length: int = 64) -> list[dict[str, np.ndarray]]:
    encoder = Encoder(tokenizer, supervise_all=False)
    encoded = [encode_row(encoder, to_pair(json.loads(json.dumps(row))), max_length) for row in rows]
    columns = [
        {"input_ids": encoding.input_ids, "labels": encoding.labels, "parts": encoding.parts} for encoding in encoded
    ]
    return [{name: np.array(values) for name, values in row.items()} for row in columns]


def batch_of(rows: list[dict], tokenizer: Any, max_length: int = 64) -> dict[str, Any]:
    collate = Collate(PadRight(tokenizer.pad_token_id), Flatten("positions"), head_chooses=True)
    return collate(pair_examples(tokenizer, rows, max_length))


def make_task(model: Any, **settings: Any) -> Any:
    data: Any = None
    chosen = Settings(**{"task": "dpo", "beta": BETA, **settings})
    return (KtoTask if chosen.task == "kto" else PairTask).of(chosen, cpu_runtime(), model, data)


@pytest.mark.parametrize(
    ("losses", "settings"),
    [
        (["sigmoid"], {}),
        (["robust"], {"label_smoothing": 0.1}),
        (["hinge"], {}),
        (["ipo"], {}),
        (["sigmoid_norm"], {}),
        (["sigmoid", "sft"], {"sft_weight": 1.0}),
    ],
)
def test_losses_and_gradients_are_those_of_trl(trl_dpo, trained, losses, settings):
    model, tokenizer = trained
    trainer, batch = trl_dpo
    trainer.loss_types, trainer.loss_weights = losses, [1.0] * len(losses)
    trainer.label_smoothing = settings.get("label_smoothing", 0.0)
    expected = trainer.compute_loss(model, batch)
    expected_gradient = gradient(model, expected)
    task = make_task(model, **settings, **({} if "sft" in losses else {"preference_loss": losses[0]}))
    batch = batch_of(ROWS, tokenizer)
    loss, sums = task.measure(model, batch, task.units(batch).float())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(gradient(model, loss), expected_gradient, rtol=1e-4, atol=1e-7)
    # Without dropout in the reference also where the policy has it.
    assert task.metrics(dict(zip(task.columns, sums.tolist(), strict=True)))["loss"] == pytest.approx(
        loss.item(), rel=1e-6
    )


LABELLED = [{"prompt": row["prompt"], "completion": row["chosen"] if good else row["rejected"], "label": good}
            for row, good in zip(ROWS, (True, False, False, True), strict=True)]  # fmt: skip


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.4, 0.3)])
def test_kto_is_that_of_trl_on_one_process_with_one_batch(tmp_path, monkeypatch_module, weights):
    from trl import KTOConfig, KTOTrainer

    # TRL's trainers leave their reference in a model, so this one gets its own.
    trained = model, tokenizer = adapted(tmp_path)
    trainer, batch = trl_trainer(
        KTOTrainer, KTOConfig, LABELLED, trained, tmp_path, monkeypatch_module,
        per_device_train_batch_size=len(LABELLED),
        desirable_weight=weights[0], undesirable_weight=weights[1],
    )  # fmt: skip
    expected = trainer.compute_loss(model, batch)
    expected_gradient = gradient(model, expected)
    shown = trainer._metrics["eval"]
    task = make_task(model, desirable_weight=weights[0], undesirable_weight=weights[1], task="kto")
    batch = labelled_batch(tokenizer)
    task, units = begun(task, model, batch)
    loss, sums = task.measure(model, batch, units.float())
    metrics = task.metrics(dict(zip(task.columns, sums.tolist(), strict=True)))
    assert shown["kl"][-1] > 0.01, "the divergence plays no part"
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5) and loss.item() == pytest.approx(metrics["loss"])
    assert torch.allclose(gradient(model, loss), expected_gradient, rtol=1e-4, atol=1e-7)
    for name in ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected"):
        assert metrics[name] == pytest.approx(shown[name][-1], rel=1e-5, abs=3e-6), name


def labelled_examples(tokenizer: Any, rows: list[dict] = LABELLED, max_length: int = 64) -> list[dict[str, np.ndarray]]:
    """The rows with TRL's mismatched ones: each takes the answer of the row before it."""
    encoder = Encoder(tokenizer, supervise_all=False)
    encoded = [encode_row(encoder, to_labelled(json.loads(json.dumps(row))), max_length) for row in rows]
    columns = [
        {name: np.array(getattr(encoding, name)) for name in ("input_ids", "labels", "desirable")}
        for encoding in encoded
    ]
    return [row | with_mismatched(row, columns[i - 1], max_length) for i, row in enumerate(columns)]


def labelled_batch(tokenizer: Any, rows: list[dict] = LABELLED) -> dict[str, Any]:
    collate = Collate(PadRight(tokenizer.pad_token_id), Flatten("positions"), head_chooses=True)
    return collate(labelled_examples(tokenizer, rows))


def runner_of(model: Any) -> MicroBatchRunner:
    nothing: Any = None
    return MicroBatchRunner(model, torch.device("cpu"), nothing, nothing, nullcontext)


def begun(task: Any, model: Any, batch: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """Return the task in a step of this batch, and its units."""
    return task.for_step(runner_of(model), lambda compute: compute(batch)), task.units(batch)


@pytest.mark.parametrize("task", ["dpo", "orpo"])
def test_a_task_without_a_divergence_sums_nothing_before_a_step(trained, task):
    def sum_over_step(compute):
        pytest.fail("an evaluation would read its rows twice")

    chosen = make_task(trained[0], task=task)
    assert chosen.for_step(runner_of(trained[0]), sum_over_step) is chosen


def test_kto_outside_of_a_step_takes_the_divergence_of_its_micro_batch(trained):
    """A trial of the memory computes what a step does: the pass before it too."""
    model, tokenizer = trained
    task, batch = make_task(model, task="kto"), labelled_batch(tokenizer)
    of_step, units = begun(task, model, batch)
    assert of_step.divergence > 0.01 and torch.equal(task.loss(model, batch, units), of_step.loss(model, batch, units))
    with pytest.raises(AssertionError, match="before its losses"):
        task.measure(model, batch, units)


def test_rows_without_an_answer_change_nothing_in_kto(trained):
    model, tokenizer = trained
    task = make_task(model, task="kto")
    alone = labelled_batch(tokenizer)
    beside = labelled_batch(
        tokenizer, [*LABELLED, {**LABELLED[0], "prompt": [{"role": "user", "content": "Who? " * 60}]}]
    )
    # The cut row gives its empty answer to the first row, which has an answer nevertheless.
    assert task.units(beside) == 4
    # It gets the mismatched answer that it has in the other batch.
    for name in ("input_ids", "labels"):
        width = alone[f"mismatched_{name}"].shape[1]
        beside[f"mismatched_{name}"][0, :width] = alone[f"mismatched_{name}"][0]
    beside["mismatched_attention_mask"][0, : alone["mismatched_attention_mask"].shape[1]] = alone[
        "mismatched_attention_mask"
    ][0]
    for name in [name for name in beside if name.endswith(("supervised_positions", "shift_labels"))]:
        del beside[name]
    results = []
    for batch in (alone, beside):
        of_step, units = begun(task, model, batch)
        loss, sums = of_step.measure(model, batch, units.float())
        results.append((units, sums, gradient(model, loss)))
    assert results[0][0] == 4
    for value, other in zip(*results, strict=True):
        assert torch.allclose(value, other, rtol=1e-4, atol=1e-6)


class PlainLogProbabilities:
    """TRL's chunked log-probabilities in plain torch."""

    @staticmethod
    def apply(hidden, weight, bias, targets, *_):
        scores = torch.log_softmax(hidden @ weight.t(), dim=-1)
        chosen_scores = scores.gather(1, targets[:, None])[:, 0]
        return chosen_scores, chosen_scores.detach(), None, chosen_scores.detach(), (scores.argmax(-1) == targets)


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def trl_dpo(trained, tmp_path_factory, monkeypatch_module) -> Any:
    """TRL's trainer on the same model, and its batch of all rows."""
    from trl import DPOConfig, DPOTrainer

    return trl_trainer(DPOTrainer, DPOConfig, ROWS, trained, tmp_path_factory.mktemp("trl"), monkeypatch_module)


def trl_trainer(
    kind: Any, config: Any, rows: list[dict], trained: Any, folder: Path, monkeypatch: Any, **options: Any
) -> Any:
    import datasets
    import trl.trainer.utils

    # TRL's kernel for log-probabilities needs a GPU.
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", PlainLogProbabilities)
    model, tokenizer = trained
    args = config(
        output_dir=str(folder), beta=BETA, report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, disable_dropout=False, max_length=64, **options,
    )  # fmt: skip
    # TRL's reference is a copy of the adapter that it is given, so it gets one that changes nothing.
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_B" in name}
    for name, parameter in model.named_parameters():
        parameter.data.mul_(name not in weights)
    trainer = kind(model, args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(weights.get(name, parameter))
    model.eval()
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(len(rows))])
    return trainer, batch


def gradient(model: Any, loss: torch.Tensor) -> torch.Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])


def test_the_other_losses_are_the_formulas_of_their_papers():
    policy = torch.tensor([-4.0, -9.0]), torch.tensor([-6.0, -2.0])
    tokens = torch.tensor([2.0, 3.0]), torch.tensor([4.0, 1.0])
    means = [(policy[side] / tokens[side]).double() for side in (0, 1)]
    losses, rewards = PairLoss("simpo", "sigmoid", 2.0, gamma=0.7)(policy, None, tokens)
    assert torch.allclose(losses.double(), -logsigmoid(2.0 * (means[0] - means[1]) - 0.7))
    assert torch.allclose(rewards[0].double(), 2.0 * means[0])
    margin = 0.1 * (policy[0] - policy[1])
    losses, _ = PairLoss("dpo", "sigmoid", 0.1, label_smoothing=0.2)(policy, None, tokens)
    assert torch.allclose(losses, -0.8 * logsigmoid(margin) - 0.2 * logsigmoid(-margin))
    losses, _ = PairLoss("cpo", "sigmoid", 0.1)(policy, None, tokens)
    assert torch.allclose(losses, -logsigmoid(0.1 * (policy[0] - policy[1])))
    losses, _ = PairLoss("orpo", "sigmoid", 0.1)(policy, None, tokens)
    odds = [mean.exp() / (1 - mean.exp()) for mean in means]
    assert torch.allclose(losses.double(), -0.1 * logsigmoid((odds[0] / odds[1]).log()))
    # A certain answer and an impossible one have finite odds and gradients.
    value = torch.tensor([-1e-12, -1e-3, -0.6931472, -80.0], requires_grad=True)
    log1mexp(value).sum().backward()
    assert value.grad is not None and value.grad.isfinite().all()
    assert log1mexp(value)[1].item() == pytest.approx(math.log(-math.expm1(-1e-3)), rel=1e-5)


@pytest.mark.parametrize("task", ["dpo", "orpo", "simpo", "cpo"])
def test_pairs_without_answers_and_padding_change_nothing(trained, task):
    model, tokenizer = trained
    cut = {
        "prompt": [{"role": "user", "content": "Who are you? " * 30}],
        "chosen": ROWS[0]["chosen"],
        "rejected": ROWS[0]["rejected"],
    }
    chosen = make_task(model, task=task)
    results = {}
    for name, rows in {"alone": ROWS[:2], "beside": [ROWS[0], cut, ROWS[1]]}.items():
        batch = batch_of(rows, tokenizer)
        units = chosen.units(batch)
        loss, sums = chosen.measure(model, batch, units.float())
        results[name] = units.tolist(), loss.item(), sums, gradient(model, loss)
    assert results["alone"][0][0] == 2 and results["alone"][0] == results["beside"][0]
    assert results["alone"][1] == pytest.approx(results["beside"][1], rel=1e-5)
    assert torch.allclose(results["alone"][2], results["beside"][2], rtol=1e-5, atol=1e-6)
    assert torch.allclose(results["alone"][3], results["beside"][3], rtol=1e-4, atol=1e-6)


def test_logits_of_all_tokens_give_the_same_as_those_of_the_supervised_ones(trained):
    model, tokenizer = trained
    task, batch = make_task(model), batch_of(ROWS * 12, tokenizer)
    whole = {name: value for name, value in batch.items() if name not in ("supervised_positions", "shift_labels")}
    assert len(whole) < len(batch)
    expected, log_probabilities = (task.log_probabilities(model, rows) for rows in (whole, batch))
    assert torch.allclose(log_probabilities, expected, rtol=1e-6)


def test_the_reference_has_no_adapter_and_no_dropout_and_leaves_the_model_as_it_was(trained):
    model, tokenizer = trained
    task, batch = make_task(model), batch_of(ROWS, tokenizer)
    base = model.get_base_model()
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    policy = task.log_probabilities(model, batch)
    model.train()
    try:
        reference = task.reference.of(model, batch)
        assert model.training and torch.equal(reference, task.reference.of(model, batch))
    finally:
        model.eval()
    with model.disable_adapter():
        assert torch.equal(reference, task.log_probabilities(model, batch))
    assert (policy - reference).abs().min() > 1e-3
    assert trainable == {name: p.requires_grad for name, p in model.named_parameters()}
    with pytest.raises(AssertionError, match="no adapter"), without_adapter(torch.nn.Linear(1, 1)):
        pass
    assert base is model.get_base_model()


def test_a_model_that_differs_from_its_reference_before_step_1_is_refused(trained, runtime):
    from types import SimpleNamespace

    model, tokenizer = trained
    task = make_task(model)
    runner = MicroBatchRunner(model, torch.device("cpu"), task.loss, lambda _: batch_of(ROWS, tokenizer), nullcontext)
    data: Any = SimpleNamespace(train=SimpleNamespace(examples=[0, 1], units=2))
    with pytest.raises(UserError, match="the model differs from its reference before step 1, by"):
        task.begin(runner, runtime, data, None)
    with without_adapter(model):
        base = task.log_probabilities(model, batch_of(ROWS, tokenizer))
    same = dataclasses.replace(task, log_probabilities=lambda *_: base)
    same.begin(runner, runtime, data, None)


@pytest.mark.parametrize("times", [1, 12])
@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_packs_have_the_sums_and_gradients_of_padded_rows(trained, kind, times):
    model, tokenizer = trained
    task = make_task(model, task=kind)
    examples_of, rows = (pair_examples, ROWS) if kind == "dpo" else (labelled_examples, LABELLED)
    chosen = examples_of(tokenizer, rows * times)
    for row in chosen:
        # The first token of a row is never predicted, whatever its label.
        for start in (0, row["parts"][0]):
            row["labels"][start] = row["input_ids"][start]
    collate = Collate(PadRight(tokenizer.pad_token_id), Flatten("positions"), head_chooses=True, by_row=True)
    results = []
    for examples in (chosen, [join_rows(chosen[:3]), join_rows(chosen[3:])]):
        batch = collate(examples)
        of_step, units = begun(task, model, batch)
        loss, sums = of_step.measure(model, batch, units.float())
        results.append((units, sums, gradient(model, loss)))
    assert batch["position_ids"].shape == batch["input_ids"].shape
    # Logits of all tokens of few rows, and of the supervised ones of many.
    assert ("supervised_positions" in batch) == (times > 1)
    for padded, packed in zip(*results, strict=True):
        assert torch.allclose(packed, padded, rtol=1e-4, atol=1e-5)
