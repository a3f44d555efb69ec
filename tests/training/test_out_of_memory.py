"""Memory runs out at random passes: the run ends with the weights of one on the lower rung from that step on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import demo_rows, write_jsonl
from tests.ranks import run_ranks, train
from tests.training.memory_limits import run_cases

TASKS = ("sft", "dpo", "kto")
STEPS = 3


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, Path]:
    """Rows of each task."""
    folder = tmp_path_factory.mktemp("rows")
    chats = [row["messages"] for row in demo_rows() if len(row["messages"]) == 2][:48]
    pairs = [
        {"prompt": chat[:1], "chosen": chat[1:], "rejected": [{"role": "assistant", "content": other[1]["content"]}]}
        for chat, other in zip(chats, [*chats[1:], chats[0]], strict=True)
    ]
    labelled = [
        {"prompt": chat[:1], "completion": chat[1:], "label": number % 3 != 0} for number, chat in enumerate(chats)
    ]
    by_task = {"sft": [{"messages": chat} for chat in chats], "dpo": pairs, "kto": labelled}
    return {task: write_jsonl(folder / f"{task}.jsonl", of_task) for task, of_task in by_task.items()}


@pytest.mark.parametrize(
    ("task", "ranks", "cases"),
    [
        ("sft", 1, 4),
        *[pytest.param(task, ranks, 34, marks=pytest.mark.slow) for task in TASKS for ranks in (1, 2)],
    ],
)
def test_a_step_that_runs_out_of_memory_takes_that_of_the_lower_rung(task, ranks, cases, rows, tiny_model, tmp_path):
    argv = (
        f"--task {task} --model {tiny_model} --dataset {rows[task]} --eval_dataset {rows[task]} --global_batch_size "
        f"{8 * ranks} --per_device_train_batch_size 4 --gradient_checkpointing auto --lora_dropout 0.1 "
        f"--lr_scheduler_type constant --max_length 64 --report_to none --save_strategy no --max_steps {STEPS} "
        "--run_name memory"
    ).split()
    seeds = [100 * TASKS.index(task) + 1000 * ranks + number for number in range(cases)]
    result = run_ranks(ranks, run_cases, argv, str(tmp_path), seeds, STEPS, folder=tmp_path / "ranks", timeout=900)
    result.check()
    assert f"{cases} cases" in result.outputs[0], result.output
    # Each way to go down was taken.
    assert "passes" in result.outputs[0] or cases < 20


def out_of_memory_from(argv: list[str], folder: str, step: int) -> None:
    """train_ddp.py on a GPU whose memory holds no pass any more from a step on."""
    from unsloth_ddp.training import trainer

    compute_loss = trainer.DDPTrainer.compute_loss

    def short(self, *args, **kwargs):
        if torch.is_grad_enabled() and self.state.global_step + 1 >= step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return compute_loss(self, *args, **kwargs)

    trainer.DDPTrainer.compute_loss = short
    train(argv, folder)


def test_the_last_rung_ends_the_run_in_one_sentence_with_a_checkpoint(job, place):
    options = "--gradient_checkpointing auto --max_steps 4 --save_strategy no --logging_steps 1 --global_batch_size 8"
    result = job(options, "ends", code=1, target=out_of_memory_from, args=(3,))
    assert "Traceback" not in result.output
    [message] = [line for line in result.output.splitlines() if line.startswith("Memory ran out in step 3")]
    assert "each micro-batch in" in message and "checkpoint-2 is the newest checkpoint" in message
    # With memory enough the same command goes on from there, with the weights of a run that had enough.
    whole = job(options, "ends-whole")
    resumed = job(options, "ends")
    assert "checkpoint-2, step 2" in resumed.output and "Done: 4 steps" in whole.output
    losses = [
        [
            e["loss"]
            for e in json.loads((place / "outputs" / name / "trainer_state.json").read_text())["log_history"]
            if "loss" in e
        ]
        for name in ("ends", "ends-whole")
    ]
    # The resumed run keeps its many passes, whose sums are rounded otherwise.
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.slow
def test_memory_that_runs_out_while_ddp_exchanges_gradients_restarts_one_rung_lower(job, place):
    # One micro-batch a step, whose gradients DistributedDataParallel averages.
    options = (
        "--gradient_checkpointing auto --max_steps 4 --save_steps 1 --logging_steps 1 --global_batch_size 8 "
        "--per_device_train_batch_size 4 --ddp_find_unused_parameters"
    )
    result = job(options, "restarts", 2, code=1, target=out_of_memory_from, args=(3,))
    assert "run the same command again: it resumes from" in result.output and "Traceback" not in result.output
    assert json.loads((place / "outputs" / "restarts" / "out_of_memory.json").read_text())["kind"] == "none"
    again = job(options, "restarts", 2)
    assert "memory ran out with gradient checkpointing none" in again.output
    summary = json.loads((place / "outputs" / "restarts" / "summary.json").read_text())
    assert summary["gradient_checkpointing"] == "torch" and summary["steps"] == 4


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("CUDA out of memory. Tried to allocate 20 MiB.", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA driver error: out of memory", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_memory_that_runs_out_is_known_whoever_says_so(kind: Any, text: str, short: bool):
    from unsloth_ddp.utils.known_errors import is_out_of_memory

    assert is_out_of_memory(kind(text)) is (short or kind is torch.OutOfMemoryError)


def test_answers_halve_their_batch(monkeypatch):
    from unsloth_ddp.run import answers

    questions = [answers.Question([{"role": "user", "content": str(n)}], "x") for n in range(5)]
    sizes: list[int] = []

    def generate(model, tokenizer, batch, length, processing):
        sizes.append(len(batch))
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return [question.turns[0]["content"] for question in batch]

    monkeypatch.setattr(answers, "_generate", generate)
    assert answers._generate_in_halves(None, None, questions, 8) == ["0", "1", "2", "3", "4"]
    assert sizes == [5, 2, 3, 1, 2]
