"""The memory of a GPU as arithmetic, and against what was measured."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from benchmarks.memory import what_fits
from tests.conftest import REPO
from tests.plan.conftest import SHAPE
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import plan_batch
from unsloth_ddp.sizing.estimate import (
    BYTES_PACKED,
    MEASURED,
    MemoryEstimate,
    Workload,
    estimate_activations,
    estimate_memory,
    is_supported,
    judge_fit,
)
from unsloth_ddp.sizing.micro_batch import in_order, largest_micro_batch
from unsloth_ddp.sizing.sharded_bytes import ZERO_BUCKET

WORK = Workload(
    tokens=0, precision=2, master=4, optimizer="adamw_torch", checkpointing="torch", processes=1, backend="transformers"
)


def test_each_method_keeps_what_it_trains_and_packs():
    lora, qlora, full = (estimate_memory(SHAPE, m, "none", WORK) for m in ("lora", "qlora", "full"))
    assert lora.weights == 1000 * 2 + 40 * 4
    assert qlora.weights == pytest.approx(800 * BYTES_PACKED + 200 * 2 + 40 * 4)
    assert full.weights == full.gradients == 1000 * 4
    assert (lora.gradients, lora.optimizer, full.optimizer) == (160, 320, 8000)
    # 16-bit copies of what is kept in fp32 and multiplied.
    assert (lora.copies, full.copies) == (80, 1600)


def test_sharing_out_divides_and_only_ddp_adds_buckets():
    four = dataclasses.replace(WORK, processes=4)
    single, exchanged = (estimate_memory(SHAPE, "full", "none", work) for work in (WORK, four))
    assert exchanged == single
    by_ddp = (dataclasses.replace(work, ddp_buckets=True) for work in (WORK, four))
    assert [estimate_memory(SHAPE, "full", "none", work).total - single.total for work in by_ddp] == [0, 4000]
    by_kind = {kind: estimate_memory(SHAPE, "full", kind, four) for kind in ("none", "zero2", "zero3", "fsdp2")}
    assert by_kind["fsdp2"].weights == by_kind["none"].weights / 4
    assert by_kind["fsdp2"].optimizer == by_kind["none"].optimizer / 4
    assert by_kind["zero3"].weights == by_kind["zero2"].weights / 4
    assert by_kind["zero2"].optimizer == (8 + 4) * 1000 / 4
    # With Unsloth every GPU holds the whole model until all of it is sharded; else it reads its part.
    by_unsloth = estimate_memory(SHAPE, "full", "fsdp2", dataclasses.replace(four, backend="unsloth"))
    assert by_unsloth.total >= by_unsloth.loading == 4000 + 1000
    assert by_kind["fsdp2"].loading == 1000
    # Gradients are averaged after every micro-batch.
    assert by_kind["fsdp2"].gradients == 1000
    # Weights, master copies and states, and the gradients in fp32 as they are and flat.
    assert by_kind["zero2"].stepping == 2000 + 3000 + 1000 + 1000
    assert by_kind["zero2"].copies == ZERO_BUCKET * 2 + 1000 * 4
    assert not is_supported("qlora", "zero3") and is_supported("full", "zero3")


def test_what_lies_in_host_memory_leaves_the_gpu():
    four = dataclasses.replace(WORK, processes=4)

    def pair(method, sharding, offload):
        moved = dataclasses.replace(four, offload=offload)
        return estimate_memory(SHAPE, method, sharding, four), estimate_memory(SHAPE, method, sharding, moved)

    whole, moved = pair("full", "zero2", "optimizer")
    assert (moved.weights, moved.copies, moved.activations) == (whole.weights, whole.copies, whole.activations)
    # Between micro-batches a rank's gradients are on the GPU in fp32, and a buffer for the largest weight.
    assert moved.gradients == 1000 * 4 / 4 + 100 * 2
    assert (moved.optimizer, moved.host) == (0, whole.gradients + whole.optimizer)
    assert moved.lower_bound and not whole.lower_bound
    whole, moved = pair("full", "zero3", "parameters")
    assert moved.host == whole.weights + whole.gradients + whole.optimizer
    assert moved.total == whole.copies + whole.activations
    whole, moved = pair("lora", "fsdp2", "parameters")
    # It is loaded on the GPU first.
    assert (moved.weights, moved.loading) == (0, whole.loading)
    assert is_supported("qlora", "zero2", "optimizer") and not is_supported("qlora", "fsdp2", "parameters")


def test_a_mixture_of_experts_is_a_lower_bound_and_packed_by_unsloth_only():
    mixture = dataclasses.replace(SHAPE, parameters=3000, experts=2000, active_experts=500, has_experts=True)
    assert estimate_memory(mixture, "lora", "none", WORK).lower_bound
    unsloth = dataclasses.replace(WORK, backend="unsloth")
    packed = [estimate_memory(mixture, "qlora", "none", work).weights for work in (WORK, unsloth)]
    assert packed[0] - packed[1] == pytest.approx(2000 * (2 - BYTES_PACKED))
    # PEFT adds an adapter on experts to a copy of their weights; without recomputing every block keeps its own.
    adapted = dataclasses.replace(mixture, adapted_experts=2000)
    for kind, copies in (("none", 2000 * 2), ("torch", 2000 * 2 / 4)):
        work = dataclasses.replace(WORK, checkpointing=kind)
        activations = [estimate_activations(shape, "lora", work) for shape in (mixture, adapted)]
        assert activations[1] - activations[0] == copies
    assert estimate_activations(adapted, "full", WORK) == estimate_activations(mixture, "full", WORK)


def test_activations_follow_tokens_and_what_is_recomputed():
    amounts = {}
    for kind in ("none", "torch", "unsloth"):
        work = dataclasses.replace(WORK, tokens=10, checkpointing=kind)
        amounts[kind] = estimate_activations(SHAPE, "lora", work)
    assert amounts["none"] == 10 * (4 * 300 + 8) + 10 * 10 * 2
    assert amounts["torch"] == 10 * (4 * 20 + 8) + 10 * 300
    assert amounts["unsloth"] == 10 * (2 * 20 + 8) + 10 * 300
    # At the loss, where the logits are larger than a block.
    wide = dataclasses.replace(SHAPE, vocabulary=1000)
    assert estimate_activations(wide, "lora", work) == 10 * (2 * 20 + 8) + 10 * 1000 * 2
    long = dataclasses.replace(work, tokens=2**30)
    assert estimate_activations(wide, "lora", long) == 2**30 * (2 * 20 + 8 + 300)
    assert estimate_activations(SHAPE, "qlora", dataclasses.replace(WORK, tokens=10)) == amounts["torch"] + 100
    fp32 = dataclasses.replace(WORK, tokens=10, precision=4)
    assert estimate_activations(SHAPE, "lora", fp32) == 2 * amounts["torch"]
    fused = dataclasses.replace(WORK, tokens=10, checkpointing="none", backend="unsloth")
    assert estimate_activations(SHAPE, "lora", fused) == 10 * (4 * 150 + 8) + 10 * 10 * 2


def test_what_an_optimizer_keeps_goes_with_the_method_and_its_library():
    bf16 = dataclasses.replace(WORK, master=2)
    by_optimizer = {
        n: dataclasses.replace(bf16, optimizer=n) for n in ("adamw_torch", "adamw_8bit", "paged_adamw_32bit")
    }
    assert [estimate_memory(SHAPE, "full", "none", w).optimizer for w in by_optimizer.values()] == [
        4000, 900 * 2.03125 + 100 * 8, 8000,
    ]  # fmt: skip
    # Adapters are kept in fp32, and so are the copies that DeepSpeed trains.
    assert [estimate_memory(SHAPE, "lora", "none", w).optimizer for w in by_optimizer.values()] == [320, 81.25, 320]
    assert [estimate_memory(SHAPE, "full", "zero2", w).optimizer for w in by_optimizer.values()] == [
        12_000, 6031.25, 12_000,
    ]  # fmt: skip


def test_a_lower_bound_can_only_show_that_a_run_does_not_fit():
    def judged(size: float, bound: bool) -> str:
        return judge_fit(MemoryEstimate(size, 0, 0, 0, 0, loading=0, lower_bound=bound), 100.0)

    assert [judged(size, False) for size in (90.0, 95.0, 101.0)] == ["fits", "tight", "does not fit"]
    assert [judged(size, True) for size in (1.0, 95.0, 101.0)] == ["unknown", "unknown", "does not fit"]


# When these runs were made, DistributedDataParallel had buckets on several processes, whoever sent the gradients.


def test_memory_is_near_what_h200s_used(measured_job):
    shapes, rows = measured_job
    runs = json.loads((REPO / "benchmarks/results/memory/gpu_check_large.json").read_text())["runs"]
    errors = {}
    for run in runs:
        summary = run["summary"]
        shape = next(shape for name, shape in shapes.items() if run["name"].startswith(name))
        # The rows of those runs, or the comparison means nothing.
        assert in_order(rows.each, 42)[: 12 * 8].sum() == pytest.approx(summary["tokens"], rel=0.01)
        plan = plan_batch(2, summary["world_size"], 8, None)
        largest = largest_micro_batch(rows, plan, Settings(model="m", dataset=["d"], max_steps=12))
        work = Workload(largest, 2, 4, "adamw_torch", "torch", summary["world_size"])
        work = dataclasses.replace(work, ddp_buckets=True)
        memory = estimate_memory(shape, summary["settings"]["method"], "none", work)
        errors[run["name"]] = memory.total / summary["peak_memory_bytes"] - 1
    assert len(errors) == 9
    assert max(map(abs, errors.values())) < 0.04, errors
    # LoRA, no checkpointing, 8 rows of 2048: 71 GiB.
    work = Workload(16384, 2, 4, "adamw_torch", "none", 1)
    assert estimate_memory(shapes["qwen3_8b"], "lora", "none", work).total / 2**30 == pytest.approx(71, rel=0.02)


def test_memory_of_packs_is_near_what_h200s_used(measured_job):
    shapes, _ = measured_job
    errors = {}
    for run in json.loads((REPO / "benchmarks/results/speed/speed.json").read_text())["cells"]:
        if run["contestant"] not in ("kit", "kit_all") or run["exit_code"]:
            continue
        # Eight packs of 2048 tokens, or two of 8192.
        work = Workload(16384, 2, 4, "adamw_torch_fused", "none", run["processes"], packed=True, ddp_buckets=True)
        memory = estimate_memory(shapes[run["shape"]], run["method"], "none", work)
        errors[run["name"]] = memory.total / run["peak_memory_bytes"] - 1
    assert len(errors) >= 13
    assert max(map(abs, errors.values())) < 0.04, errors


def test_sharded_memory_is_near_what_h200s_used_or_a_lower_bound(measured_job):
    shapes, _ = measured_job
    runs = json.loads((REPO / "benchmarks/results/memory/sharding_cost.json").read_text())["runs"]
    errors, bounds = {}, {}
    for run in runs:
        summary = run.get("summary")
        if summary is None:
            continue
        pair = (summary["settings"]["method"], summary["sharding"])
        assert summary["settings"]["gradient_checkpointing"] == "torch"
        if pair == ("lora", "zero3"):
            # Made when the weights of all blocks stayed gathered; measured again below.
            continue
        # A row of 2048 tokens a micro-batch.
        accumulation = summary["gradient_accumulation_steps"]
        work = Workload(2048, 2, 4, "adamw_torch_fused", "torch", summary["world_size"], accumulation=accumulation)
        memory = estimate_memory(shapes["qwen3_8b"], *pair, dataclasses.replace(work, ddp_buckets=True))
        measured = max(summary["peak_memory_bytes"], summary["peak_memory_bytes_loading"])
        assert memory.lower_bound == (pair not in MEASURED)
        (bounds if memory.lower_bound else errors)[pair] = memory.total / measured - 1
        if pair[1] == "fsdp2":
            assert memory.loading == pytest.approx(summary["peak_memory_bytes_loading"], rel=0.02)
    assert errors.keys() == {
        ("lora", "none"),
        ("qlora", "none"),
        ("lora", "zero2"),
        ("full", "zero2"),
        ("lora", "fsdp2"),
    }
    assert max(map(abs, errors.values())) < 0.1, errors
    assert bounds.keys() == {("full", "fsdp2")}
    assert max(bounds.values()) < 0, bounds


@pytest.mark.parametrize(("backend", "number"), [("unsloth", 0), ("transformers", 1)])
def test_memory_of_zero3_is_near_what_h200s_used(backend, number, measured_job):
    run = json.loads((REPO / "benchmarks/results/memory/zero3_peak.json").read_text())["runs"][number]
    assert run["backend"] == backend
    measured = max(phase.get("peak_gib", 0) for phase in run["phases"])
    # A row of 2048 tokens a micro-batch.
    work = Workload(2048, 2, 4, "adamw_torch_fused", "torch", 2, backend)
    memory = estimate_memory(measured_job[0]["qwen3_8b"], "lora", "zero3", work)
    assert not memory.lower_bound
    assert memory.total / 2**30 == pytest.approx(measured, rel=0.1)
    assert estimate_memory(
        measured_job[0]["qwen3_8b"], "lora", "zero3", dataclasses.replace(work, checkpointing="none")
    ).lower_bound


def test_a_small_model_with_zero3_has_a_lower_bound_near_what_h200s_used():
    runs = json.loads((REPO / "benchmarks/results/memory/sharded_fit_zero3.json").read_text())["runs"]
    for run in runs:
        for case, peak in run["peaks"].items():
            kind, packs = case.split()
            backend = run["name"].rpartition("_")[2]
            work = Workload(2048 * int(packs), 2, 4, "adamw_torch_fused", kind, 2, backend)
            memory = estimate_memory(what_fits.shape_of("qwen3_1.7b"), "lora", "zero3", work)
            assert memory.lower_bound
            # It was 40 % below while weights that DeepSpeed keeps gathered were left out.
            assert 0.85 < memory.total / peak < 1.1, (run["name"], case)


@pytest.mark.parametrize(
    ("shape", "method", "sharding"), [("qwen3_1.7b", "full", "zero2"), ("qwen3_8b", "lora", "zero3")]
)
def test_memory_with_cpu_offload_is_near_what_an_h200_used(shape, method, sharding):
    runs = json.loads((REPO / "benchmarks/results/memory/sharding_offload_cost.json").read_text())["runs"]
    summary = next(run["summary"] for run in runs if run["name"] == f"{shape}_{method}_{sharding}-offload")
    # A pack of 2048 tokens a micro-batch.
    work = Workload(2048, 2, 4, "adamw_torch_fused", "torch", 1, summary["backend"], packed=True, accumulation=2)
    work = dataclasses.replace(work, offload=summary["offload"])
    memory = estimate_memory(what_fits.shape_of(shape), method, sharding, work)
    assert not memory.lower_bound
    # ZeRO-3 was measured with torch only.
    other = estimate_memory(
        what_fits.shape_of(shape), method, sharding, dataclasses.replace(work, checkpointing="none")
    )
    assert other.lower_bound == (sharding == "zero3")
    assert memory.total == pytest.approx(summary["peak_memory_bytes"], rel=0.1)
    assert memory.loading <= 1.02 * summary["peak_memory_bytes_loading"]


@pytest.mark.parametrize("method", ["lora", pytest.param("qlora", marks=pytest.mark.slow), "full"])
def test_memory_of_models_loaded_in_shards_is_near_what_h200s_used(method):
    runs = json.loads((REPO / "benchmarks/results/memory/sharded_load.json").read_text())["runs"]
    errors = {}
    for run in runs:
        if run["method"] == method:
            # A pack of 1024 tokens a micro-batch.
            work = Workload(1024, 2, 4, "adamw_torch_fused", "torch", 2, "transformers", packed=True, accumulation=2)
            memory = estimate_memory(what_fits.shape_of(run["shape"]), method, "fsdp2", work)
            assert not memory.lower_bound
            errors[run["name"]] = memory.total / 2**30 / max(run["gib_training"], run["gib_loading"]) - 1
            errors[run["name"], "loading"] = memory.loading / 2**30 / run["gib_loading"] - 1
    assert len(errors) == {"lora": 2, "qlora": 6, "full": 2}[method]
    assert max(map(abs, errors.values())) < 0.06, errors


def test_with_fsdp2_the_logits_count_beside_the_head_and_a_recomputed_block_beside_its_weights():
    work = dataclasses.replace(WORK, processes=2, tokens=1000)

    def gathered(**changes):
        return estimate_memory(dataclasses.replace(SHAPE, **changes), "lora", "fsdp2", work).copies

    # Each is far above everything else that is gathered, so that it alone decides the peak.
    assert gathered(vocabulary=100_000) - gathered(vocabulary=50_000) == 1000 * 50_000 * 2
    assert gathered(layer_kept=9_000_000) - gathered(layer_kept=8_000_000) == 1000 * 1_000_000
    # More logits than LOGITS_AT_ONCE exist in slices.
    assert gathered(vocabulary=4_000_000) == gathered(vocabulary=2_000_000)


def test_deepspeed_allocates_its_whole_bucket_for_a_model_of_any_size():
    runs = json.loads((REPO / "benchmarks/results/correctness/sharding_parity.json").read_text())["runs"]
    measured_sizes = 0
    for run in runs:
        summary = run["summary"]
        method, sharding, backend = summary["settings"]["method"], summary["sharding"], summary["backend"]
        if sharding not in ("zero2", "zero3"):
            continue
        measured_sizes += 1
        shape = dataclasses.replace(SHAPE, parameters=966_144, adapter=163_840)
        work = Workload(0, 4 if summary["precision"] == "fp32" else 2, 4, "sgd", "none", 2, backend=backend)
        memory = estimate_memory(shape, method, sharding, work)
        # Beside the bucket a run of this model takes 0.07 to 0.13 GiB.
        if method == "qlora":
            assert memory.total < summary["peak_memory_bytes"]
        else:
            assert memory.total == pytest.approx(summary["peak_memory_bytes"], abs=0.15 * 2**30)
    assert measured_sizes == 10


def test_estimates_and_choices_need_no_torch():
    modules = (
        "choose",
        "estimate",
        "graphs",
        "ladder",
        "micro_batch",
        "optimizer_states",
        "refuse",
        "shape",
        "sharded_bytes",
    )
    imports = "".join(f"import unsloth_ddp.sizing.{name}\n" for name in modules)
    code = f"{imports}import sys\nprint(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


def test_images_add_their_tower():
    shape = dataclasses.replace(SHAPE, numbers_a_patch=10, tower_layers=6, tower_input=8, tower_kept=100)
    work = dataclasses.replace(WORK, tokens=4, checkpointing="none")

    def added(trained: bool, kind: str) -> float:
        towers = dataclasses.replace(shape, tower_trained=trained)
        each = dataclasses.replace(work, checkpointing=kind)
        with_images = dataclasses.replace(each, pixels=1000)
        estimate = estimate_memory(towers, "lora", "none", with_images)
        assert estimate.lower_bound == trained
        return estimate.activations - estimate_memory(towers, "lora", "none", each).activations

    # 100 patches. A frozen tower holds the images in fp32 and one layer at a time, at the peak in place of the logits.
    beside = 100 * 100 - 4 * SHAPE.vocabulary * 2
    assert added(False, "none") == 4000 + beside
    assert added(True, "none") == 4000 + 100 * 6 * 100 + beside
    # Recomputed, a layer of the tower or one of the decoder, whichever is larger.
    assert added(True, "torch") == 4000 + 100 * 6 * 8 + 100 * 100 - 4 * 300
    assert added(False, "torch") == 4000 + 100 * 100 - 4 * 300
