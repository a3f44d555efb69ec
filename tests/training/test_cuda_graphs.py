from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_models import model_of_layers
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.fixed_shape import FixedShape
from unsloth_ddp.model.forward.fp8 import FrozenFP8Linear
from unsloth_ddp.model.modules import size_of_layers
from unsloth_ddp.sizing import graphs
from unsloth_ddp.sizing.graphs import (
    COMPILE_SECONDS,
    LAUNCH_SECONDS,
    Launching,
    StepChoice,
    busy_without,
    dealt,
    launching,
    obstacle_on_gpus,
    reason_after,
    reason_before,
    saved_tokens,
    shape_for,
    shape_of_run,
    speed_of_gpu,
    too_short_to_compile,
)
from unsloth_ddp.sizing.micro_batch import ENOUGH_TOKENS, MicroBatchDecision
from unsloth_ddp.training.shown.meter import Meter, OwnWorkTimer, Totals, peak_memory_bytes
from unsloth_ddp.training.step import cuda_graphs
from unsloth_ddp.training.tasks.text import TextTask
from unsloth_ddp.training.trainer import DDPTrainer


class Evaluation:
    """Evaluate batches with a memory that holds `graphs` of a step, or the batch."""

    def __init__(self, graphs: int) -> None:
        self.graphs = graphs
        self.step = SimpleNamespace(
            graphs=SimpleNamespace(release=self.release), task=SimpleNamespace(measure=self.measure)
        )
        self.compute_loss_context_manager = nullcontext

    def release(self) -> bool:
        had, self.graphs = self.graphs, 0
        return had > 0

    def measure(self, model: Any, inputs: Any, divisor: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if self.graphs or inputs["size"] > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return torch.tensor(1.0), torch.tensor(3.0)

    _evaluate_batch = DDPTrainer._evaluate_batch


def test_an_evaluation_without_memory_takes_that_of_the_graphs() -> None:
    evaluation = Evaluation(graphs=2)
    assert evaluation._evaluate_batch(None, {"size": 1}, torch.ones(())).item() == 3.0
    assert evaluation.graphs == 0


def test_an_evaluation_that_does_not_fit_without_graphs_fails() -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError):
        Evaluation(graphs=1)._evaluate_batch(None, {"size": 2}, torch.ones(()))


def test_the_peak_is_that_of_a_replay_where_it_is_higher() -> None:
    device = torch.device("cpu")
    meter = Meter(
        lambda own: own[None], 1, device, OwnWorkTimer(device), Totals(), TextTask(None, divides=True, fused_head=False)
    )
    assert meter.peak_bytes() == peak_memory_bytes("cpu")
    meter.replayed_bytes = 10 * peak_memory_bytes("cpu")
    assert meter.collect(level=0)["peak_memory_bytes"] == meter.replayed_bytes


@pytest.mark.parametrize("rejected", [True, False])
def test_memory_is_tried_again_where_its_passes_are_not_captured(
    rejected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    resumed: list[Any] = []
    graphs = SimpleNamespace(rejected=rejected, choice=StepChoice(not rejected, ""), resume=resumed.append)

    class Trainer:
        runtime = SimpleNamespace(device_type="cpu")
        plan = BatchPlan(1, 1, 1)
        step: Any = SimpleNamespace(graphs=graphs, identity={}, task="of all tokens")
        checkpoints: Any = SimpleNamespace(identity={})

        def _try_micro_batches(self, resume: Any) -> int:
            done.append(self.step.task)
            self.step.task = "of supervised tokens"
            return len(done)

        def _use_task(self, task: Any) -> None:
            self.step.task = task

    monkeypatch.setattr(torch.compiler, "reset", lambda: done.append("reset"))
    trainer: Any = Trainer()
    resume: Any = SimpleNamespace(manifest=SimpleNamespace(run={"cuda_graphs": "on"}))
    assert DDPTrainer.choose_micro_batch(trainer, resume) == 1 + rejected
    assert resumed == [{"cuda_graphs": "on"}]
    assert done == (["of all tokens", "of all tokens", "reset"] if rejected else ["of all tokens"])
    assert trainer.checkpoints.identity["cuda_graphs"] == ("off" if rejected else "on")


def packs_of(tokens: list[int], rows_a_pack: int = 1) -> Any:
    """Return packs of so many tokens, and the filler."""
    packing = SimpleNamespace(starts=np.arange(len(tokens) + 1) * rows_a_pack, longest=max(tokens))
    return SimpleNamespace(streamed=False, packing=packing, units=len(tokens), lengths=lambda: np.array([*tokens, 1]))


def busy(settings: Settings, train: Any, plan: BatchPlan, shape: Any, launched: Launching | None = None) -> str | None:
    saved = saved_tokens(settings, train, plan, shape, launched or Launching())
    return busy_without(settings, train, plan, shape, saved)


@pytest.mark.parametrize(
    ("method", "tokens", "rows_a_pack", "size", "reason"),
    [
        ("lora", [2048] * 10, 1, 4, None), ("lora", [2048] * 10, 7, 4, None),
        ("full", [2048] * 10, 1, 4, "micro-batches of 8,192 tokens keep the GPU busy without CUDA graphs"),
        ("full", [2048] * 10, 7, 4, "micro-batches of 8,192 tokens keep the GPU busy without CUDA graphs"),
        ("full", [2048] * 10, 7, 2, None),
        # Mostly fill, but the backend's would wait for the host as long.
        ("lora", [300, 2048] * 5, 1, 4, None),
        ("lora", [1000, 2048] * 8, 1, 8, "micro-batches of 12,192 tokens on average would be padded to 16,384"),
        ("lora", [1000, 2048] * 8, 3, 8, "micro-batches of 12,192 tokens on average would be padded to 16,384"),
        ("lora", [1900, 2048] * 8, 1, 8, None),
    ],
)  # fmt: skip
def test_micro_batches_are_captured_only_where_it_brings_something(
    method: str, tokens: list[int], rows_a_pack: int, size: int, reason: str | None
) -> None:
    settings = Settings(model="m", dataset=["d"], method=method, max_length=2048)
    train, plan = packs_of(tokens, rows_a_pack), BatchPlan(size, 1, 1)
    assert busy(settings, train, plan, shape_for(train, size, 2048)) == reason


@pytest.mark.parametrize(
    ("sharding", "reason"),
    [
        ("none", None),
        ("zero2", "sharding zero2 reduces gradients during the backward pass"),
        ("fsdp2", "sharding fsdp2 gathers weights in every layer"),
    ],
)
def test_sharded_steps_are_not_captured_and_the_reason_is_that_of_the_sharding(
    sharding: str, reason: str | None
) -> None:
    assert obstacle_on_gpus(Settings(), packed=True, precision="bf16", sharding=sharding, processes=2) == reason


def test_packs_with_images_are_not_captured() -> None:
    given = {"packed": True, "precision": "bf16", "sharding": "none", "processes": 1}
    assert "images differ" in str(obstacle_on_gpus(Settings(), **given, images=True))
    assert obstacle_on_gpus(Settings(), **given) is None


def test_padding_to_several_sizes_counts() -> None:
    settings = Settings(model="m", dataset=["d"], max_length=2048)
    train, plan = packs_of([1000] * 60 + [2048] * 4), BatchPlan(16, 1, 1)
    shape = shape_of_run(settings, train, plan)
    assert shape.smaller == ()
    reason = busy(settings, train, plan, shape)
    assert reason is not None and "padded to" in reason
    long = Settings(model="m", dataset=["d"], max_length=2048, num_train_epochs=1000)
    shape = shape_of_run(long, train, plan)
    assert shape.smaller
    assert busy(long, train, plan, shape) is None


def test_chats_of_a_small_global_batch_are_not_padded_to_the_longest_packs() -> None:
    rng = np.random.default_rng(0)
    packs = [*rng.integers(400, 700, 950).tolist(), *rng.integers(1000, 2049, 50).tolist()]
    train = packs_of(packs, 2)
    plan = BatchPlan(4, 2, 1)
    settings = Settings(model="m", dataset=["d"], max_length=2048, num_train_epochs=10)
    shape = shape_of_run(settings, train, plan)
    micro_batches = dealt(train, plan)
    assert micro_batches.shape == (250, 4) and micro_batches.sum() == sum(packs)
    assert shape.tokens > 8000 and len(shape.smaller) == 2
    assert shape.padded(micro_batches).mean() < 1.3 * micro_batches.sum(axis=1).mean()


def test_a_sample_stands_for_many_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "SAMPLED_PACKS", 64)
    micro_batches = dealt(packs_of([100] * 1000), BatchPlan(4, 2, 2))
    assert micro_batches.shape == (16, 4) and (micro_batches == 100).all()


def test_full_fine_tuning_is_judged_once_the_micro_batch_is_chosen() -> None:
    settings = Settings(model="m", dataset=["d"], method="full", max_length=2048, num_train_epochs=100)
    train = packs_of([2048] * 80, 2)

    def after(per_device: int) -> str | None:
        plan = BatchPlan(per_device, 8 // per_device, 1)
        return reason_after(settings, train, plan, shape_of_run(settings, train, plan), "none", Launching())

    # Eight packs keep the GPU busy, but two may be all that fits.
    assert reason_before(settings, None, train, BatchPlan(1, 8, 1), Launching()) is None
    assert after(2) is None
    assert after(8) == "micro-batches of 16,384 tokens keep the GPU busy without CUDA graphs"


def test_the_sample_has_packs_of_all_lengths_and_the_filler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "SAMPLED_PACKS", 6)
    packs = packs_of([*[2000] * 500, *[100] * 500])
    micro_batches = dealt(packs, BatchPlan(4, 1, 1))
    assert micro_batches.shape == (2, 4) and sorted(micro_batches.ravel())[:2] == [1, 1]
    assert set(micro_batches.ravel()) == {1, 100, 2000}


def chats(options: dict[str, Any], tokens: int = 2000) -> tuple[Settings, Any, BatchPlan]:
    """Return a run of 400 packs, four of which are a micro-batch and eight a step."""
    return (
        Settings(model="m", dataset=["d"], max_length=2048, **options),
        packs_of([tokens] * 400, 7),
        BatchPlan(4, 2, 1),
    )


@pytest.mark.parametrize(
    ("options", "launched", "seconds"),
    [
        # A micro-batch of 8,000 tokens takes 0.16 s, and replaying it saves 0.014 s: it is padded to 8,192 tokens.
        ({"max_steps": 100}, Launching(), 3),
        ({"num_train_epochs": 4}, Launching(), 6),
        # Layers of a larger model, and more of them, take longer.
        ({"max_steps": 75}, Launching(2048, 0.2), 12),
        ({"max_steps": 70}, Launching(2048, 0.4), 20),
        ({"num_train_epochs": 40}, Launching(), 58),
        # The host launches kernels for 32,768 tokens.
        ({"max_steps": 100}, Launching(32768), 9),
        ({"max_steps": 180}, Launching(32768), 16),
    ],
)
def test_a_run_compiles_if_replaying_saves_more_time(
    options: dict[str, Any], launched: Launching, seconds: int
) -> None:
    settings, train, plan = chats(options)
    reason = reason_before(settings, None, train, plan, launched)
    if seconds >= COMPILE_SECONDS:
        assert reason is None
    else:
        assert reason == f"replaying would save about {seconds} s of this run, and compiling takes about 15 s"
    on = dataclasses.replace(settings, cuda_graphs="on")
    assert reason_before(on, None, train, plan, launched) is None


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "speed"),
    # H100, A100, RTX 4090, and one that is not known. Clock rates are left out.
    [((9, 0), 132, 1), ((8, 0), 108, 0.41), ((8, 9), 128, 0.12), ((13, 0), 200, 1)],
)
def test_a_slower_gpu_computes_fewer_tokens_meanwhile(
    capability: tuple[int, int], multiprocessors: int, speed: float
) -> None:
    assert speed_of_gpu(capability, multiprocessors) == pytest.approx(speed, rel=0.02)
    launched = launching(50_331_648, 28, speed)
    assert (launched.tokens, launched.seconds) == (pytest.approx(speed * ENOUGH_TOKENS), pytest.approx(0.16))
    settings, train, plan = chats({"max_steps": 215})
    assert (reason_before(settings, None, train, plan, launched) is None) == (speed < 1)


def test_ranks_choose_by_the_speed_of_the_main_processs_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(major=8, minor=9, multi_processor_count=66)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    runtime: Any = SimpleNamespace(broadcast_from_main=lambda work: (work(), 0.5)[1])
    assert cuda_graphs.speed_on(torch.device("cuda"), runtime) == 0.5
    runtime.broadcast_from_main = lambda work: work()
    assert cuda_graphs.speed_on(torch.device("cuda"), runtime) == 1 / 16
    assert cuda_graphs.speed_on(torch.device("cpu"), runtime) == 1


def test_a_run_that_would_recompute_layers_compiles_earlier() -> None:
    settings, train, plan = chats({"max_steps": 150})
    assert reason_before(settings, None, train, plan, Launching()) is not None
    assert reason_before(settings, None, train, plan, Launching(), recomputes=True) is None
    short = dataclasses.replace(settings, max_steps=10)
    assert reason_before(short, None, train, plan, Launching(), recomputes=True) is not None


def test_fp8_pays_for_compiling_after_fewer_steps() -> None:
    settings, train, plan = chats({"max_steps": 45})
    assert reason_before(settings, None, train, plan, Launching()) is not None
    fp8 = dataclasses.replace(settings, fp8=True)
    assert reason_before(fp8, None, train, plan, Launching()) is None
    fewer = dataclasses.replace(fp8, max_steps=30)
    assert reason_before(fewer, None, train, plan, Launching()) is not None


def test_what_was_compiled_for_the_trial_is_not_judged_again() -> None:
    settings, train, plan = chats({"max_steps": 10})
    shape = shape_of_run(settings, train, plan)
    assert reason_after(settings, train, plan, shape, "none", Launching()) is None
    # Nor is padding, where micro-batches did not fit otherwise.
    mixed = packs_of([*[500] * 1900, *[2048] * 100], 2)
    shape = shape_of_run(settings, mixed, plan)
    assert "padded to" in str(reason_after(settings, mixed, plan, shape, "none", Launching(2048)))
    assert reason_after(settings, mixed, plan, shape, "none", Launching(2048), after_all=True) is None
    full, few = dataclasses.replace(settings, method="full"), BatchPlan(1, 8, 1)
    reason = reason_after(full, train, few, shape_of_run(full, train, few), "none", Launching())
    assert reason is not None and "compiling takes about" in reason


@pytest.mark.parametrize(("steps", "short"), [(49, True), (50, False), (-1, True)])
def test_layers_of_the_backend_are_compiled_for_100_micro_batches(steps: int, short: bool) -> None:
    settings, train, plan = chats({"max_steps": steps, "num_train_epochs": 0.5})
    assert too_short_to_compile(settings, train, plan) is short
    train.streamed = True
    assert too_short_to_compile(settings, train, plan) is (short and steps > 0)


def test_a_stream_that_its_rows_end_is_not_too_short() -> None:
    settings, streamed, plan = chats({})
    streamed.streamed = True
    assert reason_before(settings, None, streamed, plan, Launching()) is None
    few = dataclasses.replace(settings, max_steps=5)
    assert "compiling takes about" in str(reason_before(few, None, streamed, plan, Launching()))


def test_a_shape_has_room_for_the_packs_with_most_and_with_the_longest_rows() -> None:
    packing = SimpleNamespace(starts=np.array([0, 5, 6, 8]), longest=300)
    train: Any = SimpleNamespace(streamed=False, packing=packing, lengths=lambda: np.array([300, 200, 100, 1]))
    # 500 tokens in 7 rows; the rest of 512 is filled with one more.
    assert shape_for(train, 2, 512) == FixedShape(512, 8, 512)
    assert shape_for(train, 2, 256) == FixedShape(512, 9, 300)


def test_the_shape_of_streamed_rows_has_room_for_short_rows() -> None:
    train: Any = SimpleNamespace(streamed=True, packing=SimpleNamespace(starts=np.array([0, 1])))
    # A row has 16 tokens or more on average, and two more rows fill what is left.
    assert shape_for(train, 2, 512) == FixedShape(1024, 1024 // 16 + 2, 512)


def test_single_rows_are_no_sequences_where_one_is_far_longer_than_all() -> None:
    # 8 times the longest would be 16,384 tokens, where the memory search tried 4,148.
    shape = shape_for(packs_of([2048, *[300] * 50]), 8, 2048)
    assert (shape.sequences, shape.tokens, shape.longest) == (0, 4224, 2048)
    shape = shape_for(packs_of([2048, *[1900] * 50]), 8, 2048)
    assert (shape.sequences, shape.tokens, shape.longest) == (8, 16384, 2048)


@pytest.mark.parametrize(("starts", "sequences"), [([0, 1, 2, 3], 2), ([0, 1, 3, 4], 0)])
def test_packs_of_one_row_each_are_sequences(starts: list[int], sequences: int) -> None:
    packing: Any = SimpleNamespace(starts=np.array(starts), longest=250)
    train: Any = SimpleNamespace(streamed=False, packing=packing, lengths=lambda: np.array([250, 240, 130, 1]))
    shape = shape_for(train, 2, 512)
    assert shape.sequences == sequences
    # Two rows of up to 256 tokens; or packs of 490 tokens, as one sequence.
    assert (shape.tokens, shape.longest) == (512, 256 if sequences else 512)


@pytest.mark.parametrize(
    ("while_launching", "size", "captured"),
    [
        (8192, "auto", True), (8192, 4, True), (2200, "auto", False), (2200, 4, False),
        # The host launches kernels once for all packs of a step, or once for each micro-batch of the given size.
        (3000, "auto", False), (3000, 4, True),
    ],
)  # fmt: skip
def test_a_large_model_keeps_the_gpu_busy_with_fewer_tokens(while_launching: float, size: Any, captured: bool) -> None:
    # A step of 8 packs has 4,800 tokens, which two micro-batches pad to 6,144.
    train, plan = packs_of([600] * 2000, 2), BatchPlan(4, 2, 1)
    shape = dataclasses.replace(shape_for(train, 4, 2048), tokens=3072)
    options = {} if size == "auto" else {"per_device_train_batch_size": size}
    settings = Settings(model="m", dataset=["d"], max_length=2048, **options)
    reason = busy(settings, train, plan, shape, Launching(while_launching))
    assert (reason is None) is captured
    assert captured or reason == "micro-batches of 2,400 tokens on average would be padded to 3,072"


def test_layers_of_different_sizes_are_counted_on_average() -> None:
    layers = [torch.nn.ModuleList([torch.nn.Linear(width, width, device="meta")]) for width in (2, 4, 6, 8)]
    assert size_of_layers(model_of_layers(layers)) == ((4 + 16 + 36 + 64) // 4, 4)


def test_launching_follows_the_size_of_a_layer_and_their_number() -> None:
    def model(width: int) -> Any:
        layer = torch.nn.ModuleList([torch.nn.Linear(width, width, device="meta") for _ in range(3)])
        return model_of_layers([layer] * 2)

    def tokens(model: Any) -> float:
        launched = launching(*size_of_layers(model))
        assert launched.seconds == pytest.approx(LAUNCH_SECONDS * (size_of_layers(model)[1] or 28))
        return launched.tokens

    assert tokens(model(4096)) == pytest.approx(ENOUGH_TOKENS)
    # Four times the weights take 2.6 times as long, and twice what is computed beside the products.
    assert tokens(model(8192)) == pytest.approx(ENOUGH_TOKENS / 4**0.7)
    assert launching(4 * 50_331_648, 28).saved == pytest.approx(launching(50_331_648, 28).saved / 2)
    assert launching(50_331_648 // 100, 28).saved == 0.3
    assert tokens(model_of_layers([])) == ENOUGH_TOKENS
    frozen = FrozenFP8Linear(torch.nn.Linear(4096, 4096, device="meta").requires_grad_(False))
    quantized = model_of_layers([torch.nn.ModuleList([frozen] * 3)])
    assert tokens(quantized) == pytest.approx(ENOUGH_TOKENS * 3**0.7)


def test_padding_is_judged_before_the_micro_batch_is_chosen() -> None:
    settings = Settings(model="m", dataset=["d"], max_length=2048)
    mixed = packs_of([*[500] * 1900, *[2048] * 100], 2)
    large, small = launching(2**28, 28), launching(2**12, 28)
    plan = BatchPlan(1, 8, 1)
    assert reason_before(settings, None, mixed, plan, small) is None
    reason = reason_before(settings, None, mixed, plan, large)
    # Four packs are the smallest micro-batch of 8,192 tokens.
    assert reason is not None and reason.startswith("micro-batches of 2,310 tokens on average would be padded to")
    mixed.streamed = True
    assert reason_before(settings, None, mixed, plan, large) is None


class Captured:
    """A captured step that notes what is done with it."""

    def __init__(self, model: Any, forward: Any, *_: Any) -> None:
        self.forward = forward
        self.in_trial = True
        self.forgotten = 0
        self.shape = "shape"

    def forget(self) -> None:
        self.forgotten += 1


@pytest.mark.parametrize(
    ("options", "other_rank", "reason", "tried"),
    [
        ({}, None, "a trial gave the same loss and gradients", [False]),
        ({"fp8": True, "lora_dropout": 0.1}, None, "a trial gave the same loss and gradients", [False]),
        ({}, "its loss would differ by 1.0e-01", "its loss would differ by 1.0e-01", [False]),
        # With FlashAttention 4, whose trial succeeds or does not.
        ({}, None, "a trial gave the same loss and gradients, with FlashAttention 4", [True]),
        ({}, None, "a trial gave the same loss and gradients", [True, False]),
    ],
)
def test_a_trial_decides_for_every_rank_and_captures_all_sizes(
    options: dict[str, Any], other_rank: str | None, reason: str, tried: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: dict[str, Any] = {}
    forwards: list[Any] = []

    def make_forward(*_: Any, flash_attention_4: bool, **__: Any) -> Any:
        forwards.append(SimpleNamespace(flash_attention_4=flash_attention_4))
        return forwards[-1]

    @contextmanager
    def without_dropout(model: Any) -> Iterator[bool]:
        yield bool(options)

    def check(captured: Any, batch: Any, ordinary: Any, allowed: tuple[float, float]) -> str | None:
        noted["allowed"] = allowed
        return "its loss would differ by 2.0e-01" if captured.forward.flash_attention_4 and not tried[-1] else None

    def capture(captured: Any, example: Any) -> None:
        noted["captured"] = example

    replaced = {
        "obstacle": lambda *_: None, "use_capture_stream": lambda *_: None, "PackedForward": make_forward,
        "CapturedStep": Captured, "training_mode": nullcontext, "without_dropout": without_dropout,
        "draws_random_numbers": lambda *_: (bool(options), None), "check_capture": check, "capture_sizes": capture,
    }  # fmt: skip
    replaced |= {
        "speed_on": lambda *_: 1,
        "has_flash_attention_4": lambda capability: tried[0] and capability == 9,
        "release": lambda: None,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(cuda_graphs, name, value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    train = packs_of([300, 100, 200] * 200, 2)
    train.examples = [f"pack {index}" for index in range(600)]
    padded_batch: list[Any] = []
    collate: Any = SimpleNamespace(pad_to_shape=padded_batch.append)
    runtime: Any = SimpleNamespace(gather=lambda one: [one, other_rank])
    settings = Settings(model="m", dataset=["d"], max_length=512, per_device_train_batch_size=2, **options)
    plan = BatchPlan(2, 1, 1)
    data: Any = SimpleNamespace(train=train, plan=plan)
    steps = cuda_graphs.CudaGraphs(settings, runtime, data, collate, torch.device("cuda"), model_of_layers([]))
    runner: Any = SimpleNamespace(model=None, batch_of=lambda rows: rows, loss_sum=None, autocast=nullcontext)
    steps.prepare(runner, MicroBatchDecision("none", 2, "as set"), plan)
    assert steps.choice == StepChoice(other_rank is None, reason)
    assert [forward.flash_attention_4 for forward in forwards] == tried
    assert noted == {"allowed": (0.02, 0.25) if options else (0.005, 0.05), "captured": "pack 1"}
    assert (steps.captured is None) == (other_rank is not None) == (padded_batch[-1] is None)
    if steps.captured is not None:
        # What was captured without dropout is not what training replays.
        assert steps.captured.forgotten == bool(options) and not steps.captured.in_trial
