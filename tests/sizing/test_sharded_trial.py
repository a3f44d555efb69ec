"""Compare the estimates with sharding, from stand-ins of few layers, with passes over the whole model."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import DEMO_MODEL, REPO, save_llama
from tests.plan.conftest import SHAPE
from tests.ranks import run_ranks, train
from tests.runtimes import cpu_runtime
from tests.training.live_bytes import LiveBytes
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.dataset import Counts, TokenizedRows, tokenize_examples
from unsloth_ddp.data.node_folder import node_folder
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.collate import Collate, Flatten, PadRight
from unsloth_ddp.data.order.worst_rows import worst_micro_batch
from unsloth_ddp.data.sources.examples import read_examples
from unsloth_ddp.distributed.ranks import ranks_from_environment
from unsloth_ddp.distributed.runtime import Runtime, started
from unsloth_ddp.model.forward.gradient_checkpointing import GradientCheckpointing
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.loading.load import load_model
from unsloth_ddp.model.loading.stand_in import NoStandInError, layers_of, make_stand_in, period_of, unused
from unsloth_ddp.sizing.estimate import WHOLE_LOGIT, Workload, estimate_activations
from unsloth_ddp.sizing.ladder import Rung, facts_of, ladder
from unsloth_ddp.sizing.micro_batch import RowLengths
from unsloth_ddp.sizing.sharded_trial import ShardedEstimates, extrapolate, read_weights
from unsloth_ddp.training.tasks.choose import make_task
from unsloth_ddp.training.tasks.text import ImageTask, TextTask
from unsloth_ddp.utils.memory_limits import SHARDED_HEADROOM

GIB = 2**30
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def quick_collection() -> Any:
    """Leave what the libraries hold out of the garbage collection of every estimate."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers."""
    sizes = {"hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 8}
    return save_llama(tmp_path_factory.mktemp("models") / "deep", **sizes)


def settings_for(model: Path, **options: Any) -> Settings:
    return Settings(model=str(model), dataset=["d"], use_cpu=True, backend="transformers", **options)


def some_rows() -> TokenizedRows:
    """Sixteen rows, the longest of 64 tokens."""
    rows = [list(range(1, 65 - index)) for index in range(16)]
    columns = {name: [*rows, [0]] for name in ("input_ids", "labels")}
    columns["supervised"] = [len(row) for row in rows] + [0]
    return TokenizedRows(datasets.Dataset.from_dict(columns).with_format("numpy"), Counts(rows=16))


def estimates_of(
    settings: Settings, runtime: Runtime, model: Any, memory: LiveBytes, sharding: Any = None
) -> ShardedEstimates:
    """Estimates as on GPUs, whose memory is that of the CPU."""
    loss = TextTask(None, divides=True, fused_head=False).loss
    runner = MicroBatchRunner(model, CPU, loss, PadRight(0), contextlib.nullcontext)
    runtime.device_type, runtime.sharding = "cuda", sharding or runtime.sharding
    data: Any = SimpleNamespace(train=some_rows(), evaluation=None, plan=BatchPlan(1, 8, runtime.ranks.world_size))
    checkpointing = GradientCheckpointing(model, runtime, settings)
    return ShardedEstimates(
        settings,
        runtime,
        data,
        checkpointing,
        runner,
        0,
        lambda rung: pytest.fail("a captured pass was tried"),
        memory=memory,
    )


def chosen(estimates: ShardedEstimates) -> tuple[str, int, str]:
    """Return kind, rows and reason of the rung that is chosen from the ladder of a run."""
    settings, data = estimates.settings, estimates.data
    facts = facts_of(settings, data.train, data.plan, estimates.checkpointing.kinds, captured=False)
    rung, rung_reason = estimates.choose(ladder(facts))
    return rung.kind, rung.rows, rung_reason


def one_process(folder: Path, **options: Any) -> tuple[Settings, Runtime, Any]:
    settings = settings_for(folder, **options)
    runtime = cpu_runtime()
    return settings, runtime, load_model(settings, runtime)[0]


def worst(estimates: ShardedEstimates, size: int) -> list[dict[str, Any]]:
    return worst_micro_batch(estimates.data.train, size, estimates.settings.max_length)


def measured(estimates: ShardedEstimates, size: int) -> int:
    """Return the bytes that a pass over the whole model takes."""
    estimates.runner.model.train()
    batch = estimates.runner.batch_of(worst(estimates, size))
    estimates._pass(estimates.runner, batch)
    return estimates._pass(estimates.runner, batch)


# ---- the stand-in ----


def test_activations_of_all_layers_follow_from_those_of_few():
    assert extrapolate(10, 13, layers=8, period=1) == 10 + 7 * 3
    # Of 9 layers with a period of 2 half a period is counted whole.
    assert extrapolate(10, 16, layers=9, period=2) == 10 + 4 * 6
    assert extrapolate(10, 9, layers=9, period=1) == 10


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("kind", ["none", "torch"])
@pytest.mark.parametrize("size", [1, 4])
def test_the_estimate_is_what_a_pass_over_the_whole_model_takes(deep_model, method, kind, size):
    settings, runtime, model = one_process(deep_model, method=method, lora_dropout=0.0)
    with LiveBytes() as memory:
        estimates = estimates_of(settings, runtime, model, memory, "zero2")
        estimates.checkpointing.use(kind)
        estimated = estimates._activations(size, 1)
        assert estimated == pytest.approx(measured(estimates, size), rel=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "full", "train_towers": True},
        *(pytest.param(options, marks=pytest.mark.slow) for options in ({}, {"train_towers": True})),
    ],
)
def test_the_estimate_has_the_tower_and_the_patches_of_rows_with_images(options):
    demo = REPO / "demo"
    settings = Settings(
        model=str(demo / "vision_model"), dataset=[str(demo / "shapes_eval.parquet")], use_cpu=True, lora_dropout=0.0,
        **options
    )  # fmt: skip
    runtime = cpu_runtime()
    with node_folder(runtime) as folder, LiveBytes() as memory:
        read_examples(settings, runtime, folder)
        model, tokenizer = load_model(settings, runtime)
        rows, _ = tokenize_examples(settings, runtime, folder, tokenizer)
        estimates = estimates_of(settings, runtime, model, memory, "zero2")
        task = ImageTask(None, divides=False, fused_head=False)
        runner = MicroBatchRunner(model, CPU, task.loss, PadRight(0, rows.processing), contextlib.nullcontext)
        estimates.data.train, estimates.runner = rows, runner
        estimates.checkpointing.use("none")
        estimated = {size: estimates._activations(size, 1) for size in (1, 4)}
        assert estimated[4] == pytest.approx(measured(estimates, 4), rel=0.02)
        text = [unit | {"images": [], "rendered": ""} for unit in worst(estimates, 4)]
        without = estimates._pass(runner, runner.batch_of(text))
    # A trained tower keeps its activations; without images there are none.
    assert (estimated[4] - without > 100_000) == bool(options)


def answers_of(task: str, tokens: int) -> TokenizedRows:
    """Return a pair, or a labelled answer and its mismatched one, of 400 tokens, the last ones supervised."""
    ids, labels = np.resize(np.arange(5, 800), 800), np.full(800, -100)
    for end in (400, 800):
        labels[end - tokens : end] = ids[end - tokens : end]
    further = {"desirable": [[1], [1]]} if task == "kto" else {}
    columns = {"input_ids": [ids, ids[:2]], "labels": [labels, labels[:2]], "parts": [[400, 400], [1, 1]], **further}
    columns["supervised"] = [2 * tokens, 0]
    return TokenizedRows(datasets.Dataset.from_dict(columns).with_format("numpy"), Counts(rows=1))


@pytest.mark.parametrize(
    ("task", "precision"),
    [
        ("dpo", "fp32"),
        *(
            pytest.param(*p, marks=pytest.mark.slow)
            for p in (("dpo", "bf16"), ("kto", "bf16"), ("kto", "fp32"), ("orpo", "fp32"), ("orpo", "bf16"))
        ),
    ],
)
def test_the_logits_of_answers_are_in_the_estimates_of_runs_and_of_plan(deep_model, task, precision):
    settings, runtime, model = one_process(deep_model, lora_dropout=0.0, task=task)
    pad, needed = PadRight(0), {}
    compute = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    with LiveBytes() as memory:
        estimates = estimates_of(settings, runtime, model, memory, "zero2")
        estimates.checkpointing.use("torch")
        for tokens in (200, 300):
            estimates.data.train = answers_of(task, tokens)
            loss = make_task(settings, runtime, model, estimates.data, None, divides=True).loss
            collate = Collate(pad, Flatten("positions"), head_chooses=True)
            estimates.runner = MicroBatchRunner(model, CPU, loss, collate, lambda: compute)
            needed[tokens] = estimates._activations(1, 1)
            assert needed[tokens] == measured(estimates, 1)
    rows = 1 if task == "kto" else 2
    of_plan = [
        RowLengths(np.array([400 * rows]), np.array([count * rows])).most_logits(1, 400 * rows) for count in needed
    ]
    # The policy's; those of the reference, and of mismatched rows, are computed before and have no gradient.
    work = Workload(400, 2, 4, "adamw_torch", "torch", 1, "transformers")
    planned = [
        estimate_activations(replace(SHAPE, vocabulary=883), "lora", replace(work, logits=count)) for count in of_plan
    ]
    assert needed[300] - needed[200] == planned[1] - planned[0] == (of_plan[1] - of_plan[0]) * 883 * WHOLE_LOGIT > 0


def test_the_model_stays_as_it_is(deep_model):
    settings, runtime, model = one_process(deep_model)
    decoder = model.get_base_model().model
    decoder.register_buffer("passes", torch.zeros(()))
    decoder.register_forward_hook(lambda module, *_: module.passes.add_(1) and None)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with LiveBytes() as memory:
        estimates = estimates_of(settings, runtime, model, memory, "zero2")
        assert estimates.estimate(2).needed
        assert estimates.estimate(2) == estimates.estimate(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert len(layers_of(model)) == 8


def test_what_was_changed_in_a_model_is_copied(deep_model):
    _, _, model = one_process(deep_model)
    base = model.get_base_model()
    called: list[Any] = []
    forward = base.forward

    def with_switch(self: Any, *args: Any, switch: bool = False, **more: Any) -> Any:
        called.append(self)
        return forward(*args, **more)

    base.forward = with_switch.__get__(base)
    stand_in = make_stand_in(model, 2, torch.bfloat16, CPU)
    with unused(model):
        stand_in(input_ids=torch.arange(4)[None], switch=True)
    assert called == [stand_in.get_base_model()] and called[0] is not base
    assert {p.dtype for p in stand_in.parameters()} == {torch.bfloat16}
    assert len(layers_of(stand_in)) == 2
    weight_ids = {id(p) for p in model.parameters()}
    assert not any(id(p) in weight_ids for p in stand_in.parameters())
    # What the copy cannot follow ends before it uses the model.
    base.__dict__["part"] = {"model": base.model}
    base.forward = (lambda self, **inputs: self.part["model"](**inputs)).__get__(base)
    stand_in = make_stand_in(model, 2, torch.bfloat16, CPU)
    with pytest.raises(NoStandInError, match="its LlamaModel cannot be copied"), unused(model):
        stand_in(input_ids=torch.arange(4)[None])


def test_layers_of_several_kinds_are_taken_by_the_period():
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, GptOssConfig

    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 99, "num_hidden_layers": 13, "head_dim": 8}
    with torch.device("meta"):
        alike = LlamaForCausalLM(LlamaConfig(**sizes))
        gemma = AutoModelForCausalLM.from_config(Gemma3TextConfig(**sizes))
        oss = AutoModelForCausalLM.from_config(GptOssConfig(**sizes, num_local_experts=2))
    assert [period_of(layers_of(model)) for model in (alike, gemma, oss)] == [1, 6, 2]
    alike.model.layers[0].mlp = torch.nn.Linear(2, 2)
    with pytest.raises(NoStandInError, match="its layers differ"):
        period_of(layers_of(alike))


@pytest.mark.parametrize("kind", ["none", "torch"])
def test_alternating_layers_are_estimated(kind, tmp_path):
    from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    kinds = ["sliding_attention", "full_attention"] * 4
    config = Gemma3TextConfig(vocab_size=883, num_hidden_layers=8, layer_types=kinds, sliding_window=16, **sizes)
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(tmp_path)
    settings, runtime, model = one_process(tmp_path)
    with LiveBytes() as memory:
        estimates = estimates_of(settings, runtime, model, memory, "zero2")
        estimates.checkpointing.use(kind)
        assert period_of(layers_of(model)) == 2
        assert estimates._activations(2, 2) == pytest.approx(measured(estimates, 2), rel=0.02)


def test_the_weights_of_a_model_are_read_whole_and_packed(deep_model):
    _, _, model = one_process(deep_model)
    read = read_weights(model, layers_of(model), 2, CPU)
    numbers = sum(p.numel() for p in model.parameters())
    assert sum(weight.whole for weight in read.weights) == numbers * 2
    assert sum(weight.stored for weight in read.weights) == numbers * 4
    assert sum(weight.count for weight in read.weights) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert [weight.whole for weight in read.head] == [883 * 32 * 2]
    layer = sum(p.numel() for p in layers_of(model)[0].parameters())
    assert sum(weight.whole for weight in read.block) == layer * 2
    assert not read.split
    # 4-bit weights take what they take; what lies in host memory takes nothing of the device.
    packed = model.get_base_model().lm_head
    packed.weight = torch.nn.Parameter(torch.zeros(100, 1, dtype=torch.uint8), requires_grad=False)
    assert [weight.whole for weight in read_weights(model, layers_of(model), 2, CPU).head] == [100]
    assert not any(weight.stored for weight in read_weights(model, layers_of(model), 2, torch.device("meta")).weights)


# ---- the choice ----


def needed_of(estimates: ShardedEstimates, sizes: Sequence[int]) -> dict[tuple[str, int], int]:
    needed = {}
    for kind in ("none", "torch"):
        estimates.checkpointing.use(kind)
        needed |= {(kind, size): estimates.estimate(size).needed or 0 for size in sizes}
    return needed


def room_for(needed: int) -> int:
    return int(needed / (1 - SHARDED_HEADROOM)) + 1


def test_the_first_kind_and_the_most_rows_that_fit_are_chosen(deep_model):
    settings, runtime, model = one_process(deep_model)
    with LiveBytes() as memory:
        estimates = estimates_of(settings, runtime, model, memory, "zero2")
        needed = needed_of(estimates, (1, 2, 4, 8))
        assert needed["torch", 8] < needed["none", 8]
        assert [needed["none", size] for size in (1, 2, 4, 8)] == sorted(needed["none", size] for size in (1, 2, 4, 8))

        memory.all = room_for(needed["none", 8])
        expected = (
            f"estimated from 2 layers, 8 x 64 tokens need about {needed['none', 8] / GIB:.1f} of "
            f"{memory.all / GIB:.1f} GiB"
        )
        assert chosen(estimates) == ("none", 8, expected)
        memory.all = room_for(needed["torch", 8])
        assert chosen(estimates)[:2] == ("torch", 8)
        # An estimate ends no run.
        memory.all = needed["torch", 1]
        kind, rows, rung_reason = chosen(estimates)
        assert (kind, rows) == ("torch", 1) and rung_reason.endswith(", with little room to spare")


def test_a_model_without_a_stand_in_keeps_the_safe_choice(deep_model, monkeypatch):
    settings, runtime, model = one_process(deep_model)
    with LiveBytes() as memory:
        estimates = estimates_of(settings, runtime, model, memory, "zero2")
        layers = layers_of(model)
        layers[0].self_attn.sliding_window = 7
        assert chosen(estimates) == ("torch", 1, "not estimated with sharding zero2: its layers differ")
        del layers[0].self_attn.sliding_window
        assert chosen(estimates)[0] == "none"

        def breaks(*args: Any, **more: Any) -> Any:
            raise IndexError("layer 7")

        monkeypatch.setattr(type(model.get_base_model().model), "forward", breaks)
        kind, rows, rung_reason = chosen(estimates)
        assert (kind, rows) == ("torch", 1) and rung_reason.endswith("its layers cannot be tried alone (IndexError)")


def two_ranks(folder: str) -> None:
    """Load in shards, choose where a rank has less room, runs out of memory, or has no stand-in; then take a step."""
    settings = settings_for(Path(folder))
    with started(settings, ranks_from_environment()) as runtime, LiveBytes() as memory:
        runtime.backend = "transformers"
        model, _ = load_model(settings, runtime)
        gc.freeze()
        rank, choices = runtime.ranks.rank, {}
        estimates = estimates_of(settings, runtime, model, memory)
        needed = needed_of(estimates, [8])

        def choose(name: str) -> None:
            choices[name] = chosen(estimates)

        memory.all = room_for(needed["none", 8]) if rank == 0 else room_for(needed["torch", 8])
        choose("less room")
        memory.all = 2**40
        choose("all room")
        passes = estimates._pass

        def short(runner: Any, batch: Any) -> int:
            if rank == 1 and estimates.checkpointing.kind == "none":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return passes(runner, batch)

        estimates._pass = short  # type: ignore[method-assign]
        choose("out of memory")

        def broken(runner: Any, batch: Any) -> int:
            if rank == 1:
                raise KeyError("layer")
            return passes(runner, batch)

        estimates._pass = broken  # type: ignore[method-assign]
        choose("no stand-in")
        losses = []
        for kind in ("none", "torch"):
            estimates.checkpointing.use(kind)
            model.train()
            ids = torch.arange(8)[None]
            model(input_ids=ids, labels=ids).loss.backward()
            losses.append(
                sum(p.grad.to_local().double().norm().item() for p in model.parameters() if p.grad is not None)
            )
            model.zero_grad()
        runtime.device_type = "cpu"
    print("found:" + json.dumps({"rank": rank, "found": choices, "gradients": losses, "needed": needed["none", 8]}))


def test_ranks_choose_the_same_with_weights_in_shards(deep_model, tmp_path):
    result = run_ranks(2, two_ranks, str(deep_model), folder=tmp_path / "out", environ={"UNSLOTH_FSDP2": "1"}).check()
    reports = [json.loads(line[6:]) for line in result.output.splitlines() if line.startswith("found:")]
    first, second = (report["found"] for report in sorted(reports, key=lambda report: report["rank"]))
    assert first == second
    assert {name: choice[:2] for name, choice in first.items()} == {
        "less room": ["torch", 8],
        "all room": ["none", 8],
        "out of memory": ["torch", 8],
        "no stand-in": ["torch", 1],
    }
    assert first["no stand-in"][2] == "not estimated with sharding fsdp2: its layers cannot be tried alone (KeyError)"
    for report in reports:
        none, torch_ = report["gradients"]
        assert none > 0 and none == pytest.approx(torch_, rel=1e-5)


# ---- a whole run ----


def estimating_train(argv: list[str], folder: str, room: int) -> None:
    """train_ddp.py with FSDP2 on the CPU, which chooses as on GPUs that have so much room."""
    from unsloth_ddp.model.forward import gradient_checkpointing
    from unsloth_ddp.training.step.first_rung import FirstRung

    def choose(self: FirstRung, rungs: list[Rung], resumed: dict[str, Any], last: Rung | None) -> Any:
        if resumed:
            return really(self, rungs, resumed, last)
        gc.freeze()
        # On the CPU accelerate forgets FSDP2 when it is asked for a context before training begins.
        self.trials.runner = dataclasses.replace(self.trials.runner, autocast=contextlib.nullcontext)
        with LiveBytes(room) as self.trials.memory:
            return self.trials.choose(rungs)

    really = FirstRung._choose
    gradient_checkpointing.kinds_here = lambda runtime, settings: ("none", "torch")
    FirstRung._choose = choose  # type: ignore[method-assign]
    train(argv, folder)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_run_takes_the_same_steps_with_what_it_chooses(job, place, method):
    base = f"--method {method} --packing off --global_batch_size 8 --max_steps 3 --logging_steps 1 --learning_rate 1e-3"
    auto = f"{base} --gradient_checkpointing auto --per_device_train_batch_size auto --save_steps 1"
    more: dict[str, Any] = {"environ": {"UNSLOTH_FSDP2": "1"}, "target": estimating_train}
    job(f"{base} --save_strategy no", f"untried-{method}", 2, environ=more["environ"])
    results = {}
    for name, room in (("all", 2**40), ("none", 1)):
        results[name] = job(auto, f"chosen-{method}-{name}", 2, args=(room,), **more)
    summaries = {
        name: json.loads((place / "outputs" / f"chosen-{method}-{name}" / "summary.json").read_text())
        for name in results
    }
    assert {n: (s["gradient_checkpointing"], s["per_device_train_batch_size"]) for n, s in summaries.items()} == {
        "all": ("none", 4),
        "none": ("torch", 1),
    }
    assert "estimated from 2 layers, 4 x" in results["all"].output
    file = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    expected = load_file(place / "outputs" / f"untried-{method}" / file)
    for name in results:
        weights = load_file(place / "outputs" / f"chosen-{method}-{name}" / file)
        assert all(torch.allclose(weights[key], expected[key], atol=2e-5) for key in expected)
    checkpoint = place / "outputs" / f"chosen-{method}-none" / "checkpoint-2"
    resumed = job(f"{auto} --resume {checkpoint}", f"resumed-{method}", 2, args=(2**40,), **more)
    # Its ladder begins with the rung of the run that it resumes.
    assert "gradient checkpointing torch:" in resumed.output and "estimated" not in resumed.output
