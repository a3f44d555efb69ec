"""Test that a step is repeated with less memory where memory runs out."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import run_ranks, train
from unsloth_ddp.sizing.micro_batch import MicroBatchDecision
from unsloth_ddp.training.step.optimizer_step import OptimizerStep
from unsloth_ddp.utils.known_errors import is_out_of_memory


def short_of_memory(argv: list[str], folder: str, rank: int, step: int, where: str, after: int = 1) -> None:
    """train_ddp.py, whose given rank has too little memory for this step unless activations are recomputed."""
    from unsloth_ddp.training import trainer
    from unsloth_ddp.training.step import gradient_exchange as exchange

    handle: list[Any] = []
    compute_loss = trainer.DDPTrainer.compute_loss
    fails = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    def break_off(*_):
        raise fails

    # The buckets of the layers behind the middle one have been sent when its gradient comes.
    exchange.BUCKET_BYTES = 1024

    def short_compute_loss(self, model, inputs, *args, **kwargs):
        here = torch.is_grad_enabled() and self.runtime.ranks.rank == rank and self.state.global_step + 1 == step
        # Not the first micro-batch, so that gradients of others are there.
        short = here and self.step.checkpointing.kind == "none" and self.step._start.done == after
        if short and where == "forward":
            raise fails
        trained = [p for p in self.model.parameters() if p.requires_grad]
        handle.pop().remove() if handle else None
        if short and where == "model":
            handle.append(self.model.get_input_embeddings().register_forward_hook(break_off))
        elif short:
            handle.append(trained[len(trained) // 2].register_hook(break_off))
        return compute_loss(self, model, inputs, *args, **kwargs)

    trainer.DDPTrainer.compute_loss = short_compute_loss
    train(argv, folder)


OPTIONS = "--gradient_checkpointing auto --lora_dropout 0.1 --max_steps 4 --logging_steps 1 --save_strategy no"


@pytest.mark.parametrize(
    ("ranks", "where", "after", "method"),
    # The last of four micro-batches is the one whose backward pass exchanges gradients.
    [
        (1, "backward", 3, "lora"),
        pytest.param(2, "forward", 3, "lora", marks=pytest.mark.slow),
        pytest.param(2, "backward", 3, "lora", marks=pytest.mark.slow),
        pytest.param(2, "backward", 3, "full", marks=pytest.mark.slow),
    ],
)
def test_a_step_that_does_not_fit_is_repeated_with_recomputing(job, place, ranks, where, after, method):
    options = f"{OPTIONS} --global_batch_size {4 * ranks}"
    if method == "full":
        options += " --method full --lora_dropout 0"
    name, kept = f"fit-{ranks}-{where}-{method}", {"lora": "adapter_model", "full": "model"}[method]
    job(options, f"{name}-whole", ranks)
    result = job(options, name, ranks, target=short_of_memory, args=(ranks - 1, 1, where, after))
    said = [line for line in result.output.splitlines() if line.startswith("Out of memory")]
    assert len(said) == 1, result.output
    assert "by step 1; the step was repeated with gradient checkpointing torch" in said[0]
    whole, short = (load_file(place / "outputs" / n / f"{kept}.safetensors") for n in (f"{name}-whole", name))
    assert all(torch.equal(whole[key], short[key]) for key in whole)
    summaries = [json.loads((place / "outputs" / n / "summary.json").read_text()) for n in (f"{name}-whole", name)]
    for key in ("train_loss", "tokens", "supervised_tokens"):
        assert summaries[0][key] == summaries[1][key], key
    assert [s["gradient_checkpointing"] for s in summaries] == ["none", "torch"]


@pytest.mark.slow
def test_a_rank_that_repeats_its_first_forward_pass_sends_no_buffers_again(job, place):
    options = f'{OPTIONS} --global_batch_size 8 --trainer_args {{"ddp_broadcast_buffers":true}}'
    job(options, "buffers-whole", 2)
    result = job(options, "buffers", 2, target=short_of_memory, args=(1, 1, "model", 0))
    assert "by step 1; the step was repeated with gradient checkpointing torch" in result.output
    whole, short = (
        load_file(place / "outputs" / n / "adapter_model.safetensors") for n in ("buffers-whole", "buffers")
    )
    assert all(torch.equal(whole[key], short[key]) for key in whole)


def step_of(checkpointing, exchange=None, used=None):
    """The steps of one of two ranks, which replays nothing."""
    graphs = SimpleNamespace(run=lambda batch, divisor: None, use=(used if used is not None else []).append)
    own_work = SimpleNamespace(start=lambda *_: None)
    meter = SimpleNamespace(snapshot=lambda: None, restore=lambda *_: None, own_work=own_work)
    task = SimpleNamespace(units=lambda batch, runner: torch.ones(()))
    return OptimizerStep(task, checkpointing, graphs, exchange, meter, torch.device("cpu"), 2)


def repeat_under_torch_compile(folder: str) -> None:
    """Repeat a step of two micro-batches, whose last one runs out of memory; note which passes average gradients."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    averaged, passes = [], []

    @contextlib.contextmanager
    def last_pass(model):
        averaged.append(len(passes))
        yield

    def compute(model, batch, divisor):
        passes.append(batch["name"])
        if len(passes) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return divisor

    checkpointing = SimpleNamespace(next="torch", level=0, kinds=("none", "torch"), use=lambda kind: None)
    exchange = SimpleNamespace(begin_pass=lambda: None, last_pass=last_pass)
    # As one of two ranks.
    step = step_of(checkpointing, exchange)
    model = torch.compile(DistributedDataParallel(torch.nn.Linear(1, 1)), backend="eager")
    batches, one = [{"name": "first"}, {"name": "last"}], torch.ones(())
    step.begin(batches, 0.0, None, lambda units: units)
    step.micro_batch(compute, model, batches[0], one, last=False)
    step.micro_batch(compute, model, batches[1], one, last=True)
    assert passes == ["first", "last", "first", "last"]
    # Before the pass that ran out of memory, and before the last one.
    assert averaged == [1, 3]
    dist.destroy_process_group()


def test_a_repeated_step_of_a_compiled_model_averages_gradients_once(tmp_path):
    run_ranks(1, repeat_under_torch_compile, str(tmp_path), folder=tmp_path / "ranks").check()


@pytest.mark.slow
def test_memory_that_runs_out_while_ddp_exchanges_gradients_ends_every_rank(job):
    options = f"{OPTIONS} --ddp_find_unused_parameters --global_batch_size 8"
    result = job(options, "exchange", 2, code=1, target=short_of_memory, args=(1, 1, "backward", 3))
    assert "CUDA out of memory. Tried" in result.output and "the step was repeated" not in result.output


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
def test_memory_that_runs_out_is_known_whoever_says_so(kind, text, short):
    assert is_out_of_memory(kind(text)) is (short or kind is torch.OutOfMemoryError)


def test_other_errors_of_a_sharded_step_stay_what_they_are():
    # A sharded model has no word for whether it exchanges gradients.
    checkpointing = SimpleNamespace(next=None, level=0, kinds=("torch",))
    step = step_of(checkpointing)
    step.begin([{}], 0.0, None, lambda units: units)

    def fails(model, batch, divisor):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        step.micro_batch(fails, torch.nn.Linear(1, 1), {}, torch.ones(()), last=True)


def test_ranks_follow_the_one_that_switched_furthest_and_say_so_once():
    checkpointing = SimpleNamespace(kinds=("none", "torch", "unsloth"), level=0, next="torch")

    def use(kind):
        checkpointing.level = checkpointing.kinds.index(kind)

    checkpointing.use, used = use, []
    step = step_of(checkpointing, used=used)
    step.graphs.prepare = lambda *_: None
    step.prepare(MicroBatchDecision("torch", 1, ""), None, None)
    assert step.follow([1, 1]) == [] and used == []
    assert step.follow([1, 2]) == [1] and used == ["unsloth"]
    assert step.follow([2, 2]) == []
