"""The plan before renting: rows, memory and time as arithmetic, and against what was measured."""

from __future__ import annotations

import dataclasses
import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.conftest import DEMO_MODEL, demo_rows, save_llama, write_jsonl
from tests.mixtures import save_mixture
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan, plan_batch
from unsloth_ddp.data.order.packing import best_fit
from unsloth_ddp.plan import __main__ as command
from unsloth_ddp.plan.compute import Hardware, guess_hours, make_memory_row, make_plan
from unsloth_ddp.plan.report import plan_as_json, render_plan, verdict_sentence
from unsloth_ddp.sizing.choose import choose_step, make_workload
from unsloth_ddp.sizing.estimate import Workload, estimate_memory
from unsloth_ddp.sizing.micro_batch import RowLengths, in_order, largest_micro_batch
from unsloth_ddp.utils.errors import UserError

# ---- rows ----


def test_a_micro_batch_of_answers_has_the_logits_of_their_tokens():
    rows = RowLengths(np.full(6, 1000), supervised=np.array([1, 100, 200, 300, 400, 950]))
    batch = BatchPlan(2, 1, 1)

    def logits(rows: RowLengths, tokens: int = 2000, **options: Any) -> int:
        return make_workload(Settings(model="m", dataset=["d"], **options), rows, tokens, batch).logits

    # The 1,350 tokens of the two with the most, in tiles of 128.
    assert logits(rows, task="dpo") == 11 * 128
    assert logits(rows) == 0 and logits(dataclasses.replace(rows, pixels=np.zeros(6))) == 11 * 128
    packed = rows.packed(best_fit(rows.each, 2000))
    assert logits(packed, 4000, task="orpo") == -(-np.sort(packed.supervised)[1:].sum() // 128) * 128
    # With nearly all tokens, those of all.
    assert logits(packed, 1900, task="orpo") == 1900
    # The share of the rows that were read, of any other ones.
    assert logits(dataclasses.replace(rows, streamed=True), task="kto") == 6 * 128


def packs_of(lengths: np.ndarray, capacity: int = 2048) -> RowLengths:
    return RowLengths(lengths, supervised=lengths).packed(best_fit(lengths, capacity))


def test_the_largest_micro_batch_is_that_of_the_run():
    rows = RowLengths(np.array([1, 2, 3, 4, 5, 60]), supervised=np.ones(6))
    order = in_order(rows.each, seed=3)
    settings = Settings(model="m", dataset=["d"], seed=3)
    plan = plan_batch(2, 1, 2, None)

    def largest(rows: RowLengths, plan: BatchPlan, steps: int) -> int:
        return largest_micro_batch(rows, plan, dataclasses.replace(settings, max_steps=steps))

    assert largest(rows, plan, 1) == 2 * max(order[:2])
    assert largest(rows, plan, 3) == largest(rows, plan, 300) == 120
    # Packs are joined, and the longest of a step share a micro-batch.
    packs = packs_of(np.array([1, 2, 3, 4, 5, 60]), 5)
    assert sorted(packs.each) == [5, 5, 5, 60]
    assert largest(packs, plan, 2) == 65
    packs = packs_of(np.array([10, 20, 30, 40]), 10)
    orders = [in_order(packs.each, 3, epoch) for epoch in range(20)]
    pairs = [max(sum(order[:2]), sum(order[2:])) for order in orders]
    assert largest(packs, plan, 1) == sum(orders[0][:2])
    assert [largest(packs, plan, 2 * epochs) for epochs in range(1, 21)] == [max(pairs[:n]) for n in range(1, 21)]
    assert largest(packs, BatchPlan(2, 2, 1), 20) == 70


def test_the_first_rows_of_a_stream_stand_for_all(demo_shape, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("unsloth_ddp.data.sources.examples.STREAM_HEAD", 20)
    json_file = tmp_path / "plan.json"
    command.main(
        ["--streaming", "--packing", "off", "--max_steps", "50", "--max_length", "64", "--json", str(json_file)]
    )
    printed = capsys.readouterr().out
    made = json.loads(json_file.read_text())
    assert (made["rows"]["rows"], made["rows"]["streamed"], made["plan"]["steps"]) == (20, True, 50)
    batch = made["plan"]["batch"]
    rows = batch["per_device"] * batch["accumulation"]
    assert made["plan"]["tokens_a_step"] == pytest.approx(made["rows"]["tokens"] / 20 * rows)
    assert made["plan"]["micro_batch"] == 64 * batch["per_device"]
    assert "the first 20 (" in printed and "per epoch" not in printed
    assert "Rows are streamed: the plan is made from the first 20 rows" in printed


# ---- memory against what was measured ----


def test_a_mixtures_memory_is_a_lower_bound_and_says_so(capsys, tmp_path):
    folder = save_mixture("qwen3_moe", tmp_path)
    assert command.main(["--model", str(folder), "--dataset", "demo/train.jsonl", "--gpu_memory", "24GB"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The run may fit: method lora with DDP needs at least " in said
    assert "so take every figure of memory as a lower bound. With the transformers backend QLoRA leaves" in said
    assert "each token used all" not in said


def test_a_model_whose_rows_unsloth_pads_is_planned_with_packs_of_transformers(capsys, tmp_path):
    few = write_jsonl(tmp_path / "few.jsonl", demo_rows()[:8])
    words = ["--model", str(save_mixture("gpt_oss", tmp_path)), "--dataset", str(few)]
    for backend, rows in (("auto", "packed"), ("transformers", "packed"), ("unsloth", "padded")):
        assert command.main([*words, "--backend", backend]) == 0
        assert f"packing auto is planned as {rows} rows" in " ".join(capsys.readouterr().out.split()), backend


def test_what_is_recomputed_is_the_first_kind_that_fits(measured_job):
    shapes, _ = measured_job
    settings = Settings(model="m", dataset=["d"])
    work = Workload(16384, 2, 4, "adamw_torch", "none", 1)

    def kind(gib: float | None, method: str = "lora", sharding: str = "none", asked: str = "auto") -> str:
        chosen = dataclasses.replace(settings, gradient_checkpointing=asked)
        room = gib and gib * 2**30
        return make_memory_row(chosen, shapes["qwen3_8b"], method, sharding, work, room).checkpointing

    # 71 GiB were measured with none.
    assert kind(None) == kind(141) == kind(80) == "none"
    assert kind(60) == "torch"
    assert kind(10) == "unsloth"
    assert kind(141, sharding="fsdp2") == "none"
    assert kind(10, asked="none") == "none"


def test_with_sharding_a_plan_leaves_as_much_free_as_a_run(measured_job):
    shapes, _ = measured_job
    settings = Settings(model="m", dataset=["d"])
    work = Workload(16384, 2, 4, "adamw_torch", "none", 2)
    needed = estimate_memory(shapes["qwen3_8b"], "lora", "zero2", work).passing

    def row(share: float) -> Any:
        return make_memory_row(settings, shapes["qwen3_8b"], "lora", "zero2", work, needed / share)

    assert (row(0.81).checkpointing, row(0.85).checkpointing) == ("none", "torch")
    given = dataclasses.replace(settings, gradient_checkpointing="none")
    assert make_memory_row(given, shapes["qwen3_8b"], "lora", "zero2", work, needed / 0.85).verdict == "fits"


def test_a_micro_batch_is_planned_as_a_run_chooses_it(measured_job):
    shapes, _ = measured_job
    rows = packs_of(np.full(64, 2048))
    batch = plan_batch(1, 2, 32, None)

    def planned(gib: float | None, **options) -> int:
        settings = Settings(model="m", dataset=["d"], **{"num_train_epochs": 1000, **options})
        return choose_step(settings, shapes["qwen3_8b"], rows, batch, gib and gib * 2**30).batch.per_device

    # 8 packs of 2048 without recomputing were measured at 83 GiB, and chosen on a GPU of 140.
    # With 24 GiB one pack would fit without recomputing; four of them with it are worth more.
    ordinary = [planned(gib, cuda_graphs="off") for gib in (None, 140, 40, 24)]
    assert ordinary == [16, 8, 16, 4]
    # A replayed pass is as fast with four packs as with more, and with two nearly so.
    assert [planned(gib, cuda_graphs="on") for gib in (None, 140, 40, 24)] == [4, 4, 2, 4]
    # A short run compiles only where it would have to recompute layers, and not for a few steps.
    assert [planned(gib, max_steps=12) for gib in (140, 64)] == [8, 4]
    assert planned(64, max_steps=2) == planned(64, cuda_graphs="off")
    # Two processes replay too, unless DDP has to look for unused weights.
    assert [planned(gib) for gib in (None, 140, 40, 24)] == [4, 4, 2, 4]
    # Recomputing with torch is captured, moving activations to host memory is not.
    assert planned(141, gradient_checkpointing="torch") == 4
    assert planned(141, gradient_checkpointing="unsloth") == 16
    assert planned(140, ddp_find_unused_parameters=True) == 8
    assert planned(141, method="full") == planned(141, method="full", cuda_graphs="off")
    # With sharding nothing is captured, and what is left of split weights goes to more rows.
    sharded = {
        sharding: choose_step(
            Settings(model="m", dataset=["d"], num_train_epochs=1000), shapes["qwen3_8b"], rows, batch, 32e9, sharding
        ).batch.per_device
        for sharding in ("none", "zero2", "fsdp2")
    }
    assert sharded == {"none": 1, "zero2": 8, "fsdp2": 16}
    assert planned(141, per_device_train_batch_size=4) == planned(141, gradient_accumulation_steps=16) == 1


def test_host_memory_is_offered_where_no_sharding_does(measured_job):
    shapes, _ = measured_job
    rows = RowLengths(np.full(64, 2048), supervised=np.full(64, 2048))
    settings = Settings(model="m", dataset=["d"], method="full", gradient_checkpointing="torch")

    def offered(gib: float | None, gpus: int) -> dict[tuple[str, str], str]:
        hardware = Hardware(1, gpus, gpu_memory=gib and gib * 2**30)
        made = make_plan(settings, shapes["qwen3_8b"], rows, plan_batch(1, gpus, 16, None), hardware)
        report = render_plan(made)
        rows_offered = {(row.method, row.config): row.verdict for row in made.memory if row.offload != "none"}
        assert ("Host memory of a node: " in " ".join(report.split())) == bool(
            {"fits", "unknown"} & set(rows_offered.values())
        )
        return rows_offered

    assert offered(None, 2) == {} and offered(141, 2) == {}
    # On one GPU DeepSpeed alone does it, and adapters fit as they are.
    assert offered(80, 1) == {("full", "zero2_offload"): "fits", ("full", "zero3_offload"): "unknown"}
    assert (
        offered(24, 2)["full", "fsdp2_offload"] == "unknown"
        and offered(12, 2)["full", "fsdp2_offload"] == "does not fit"
    )


# ---- the command ----


def plan(*words: str) -> int:
    return command.main(list(words))


def test_the_demo_without_a_speed_has_a_guess_of_the_time(capsys, tmp_path):
    path = tmp_path / "plan.json"
    words = ["--nodes", "2", "--gpus_per_node", "2", "--gpu_memory", "80GB", "--packing", "off"]
    assert plan(*words, "--json", str(path)) == 0
    shown = capsys.readouterr().out
    printed = " ".join(shown.split())
    assert "4 rows per device x 1 accumulation x 4 processes = 16 rows" in printed
    # As train_ddp.py's own table has them.
    assert "760 (18,040 tokens, mean 24, longest 43)" in printed and "144 (48 per epoch)" in printed
    assert "time, a guess under a minute on 4 GPUs (H100 or H200)" in printed
    assert "The run fits: method lora with DDP needs about" in printed
    assert max(map(len, shown.splitlines())) <= 100
    found = json.loads(path.read_text())
    # Where the estimate is a lower bound, that is no verdict.
    assert {row["verdict"] for row in found["plan"]["memory"] if not row["lower_bound"]} == {"fits"}
    assert {row["verdict"] for row in found["plan"]["memory"] if row["lower_bound"]} == {"unknown"}
    assert {(row["method"], row["sharding"]) for row in found["plan"]["memory"]} >= {
        ("qlora", "fsdp2"),
        ("full", "zero3"),
    }
    held = {
        row["model_copies"]: row
        for row in found["plan"]["memory"]
        if (row["method"], row["sharding"]) == ("lora", "fsdp2")
    }
    assert held[2]["weights"] == 2 * held[1]["weights"] and held[2]["lower_bound"]


def test_on_one_node_there_is_no_copy_to_plan(tmp_path):
    path = tmp_path / "plan.json"
    assert plan("--gpus_per_node", "2", "--packing", "off", "--json", str(path)) == 0
    found = json.loads(path.read_text())["plan"]
    assert {row["model_copies"] for row in found["memory"]} == {1}


@pytest.mark.parametrize(
    ("model", "method", "speed", "gpu"),
    [
        # docs/speed.md: chats with the kit's defaults on an H200.
        ("qwen3_8b", "lora", 17_304, "NVIDIA H200"), ("qwen3_8b", "qlora", 16_935, "NVIDIA H200"),
        ("qwen3_1.7b", "lora", 64_514, None), ("qwen3_1.7b", "full", 51_760, None),
    ],
)  # fmt: skip
def test_the_guess_of_the_time_holds_what_was_measured(measured_job, model, method, speed, gpu):
    shapes, _ = measured_job
    settings = Settings(model="m", dataset=["d"], method=method)
    rows = packs_of(np.full(40_960, 512))
    made = make_plan(settings, shapes[model], rows, plan_batch(8, 1, 8, None), Hardware(1, 1, gpu=gpu))
    least, most, shown = guess_hours(made)
    assert least * 0.98 <= made.tokens / speed / 3600 <= most * 1.02 and most < 2 * least
    assert shown == (gpu or "H100 or H200")
    other = make_plan(settings, shapes[model], rows, plan_batch(8, 1, 8, None), Hardware(1, 1, gpu="NVIDIA A100"))
    assert guess_hours(other)[0] == pytest.approx(least * 989 / 312)


def test_the_plan_is_for_the_gpus_of_this_machine_unless_others_are_named(monkeypatch, capsys):
    seen = command.Gpu("NVIDIA GeForce RTX 4090", 24 * 2**30, (8, 9), 2)
    monkeypatch.setattr(command, "find_gpu", lambda: seen)
    assert plan("--packing", "off") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 node x 2 GPUs" in printed and "on 2 GPUs (NVIDIA GeForce RTX 4090)" in printed
    assert "The run fits: method lora with DDP needs about" in printed and "on a GPU of 24.0 GiB." in printed
    assert plan("--packing", "off", "--gpus_per_node", "4") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 node x 4 GPUs" in printed and "Give --gpu_memory, such as 80GB, to learn what fits" in printed


def test_the_widest_plan_fits_100_columns(measured_job):
    shapes, _ = measured_job
    settings = Settings(model="m", dataset=["d"])
    rows = packs_of(np.full(4096, 2048))
    hardware = Hardware(16, 8, 24e9)
    batch = plan_batch(1, 128, 2048, None)
    report = make_plan(settings, shapes["qwen3_8b"], rows, batch, hardware)
    text = render_plan(report, width=100)
    assert max(map(len, text.splitlines())) <= 100
    for row, verdict in {r"full +none +unsloth": "does not fit", r"full +fsdp2 +torch": "fits"}.items():
        (line,) = [line for line in text.splitlines() if re.match(row, line)]
        assert line.endswith(verdict)
    # Bounds say so, in the table and in JSON.
    assert "≥" in text and "unknown" in text
    assert {m["verdict"] for m in plan_as_json(report)["plan"]["memory"] if m["lower_bound"]} <= {
        "unknown",
        "does not fit",
    }


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nodes", "0"], "--nodes is 0"),
        # As a run would, before anything is downloaded.
        (["--lr_scheduler_type", "cosine_with_min_lr"], "lr_scheduler_type cosine_with_min_lr does not work with"),
        (["--bandwidth", "25Gbps"], "there is no option bandwidth; plan no longer predicts"),
        (["--node_bandwidth", "400GB/s"], "no option node_bandwidth; plan no longer predicts"),
        (["--tokens_per_second", "17100"], "no option tokens_per_second; the time left is in the log lines of a run"),
        (["--gpu_memory", "big"], "memory 'big'"),
        (["--compute_capability", "T4"], "--compute_capability is T4, but it has the form 7.5"),
        (["--compute_capability", "7.5", "--precision", "bf16"], "not supported by a GPU of compute capability 7.5;"),
        (
            ["--compute_capability", "7.5", "--method", "full", "--full_weights", "bf16"],
            "full_weights bf16 needs precision bf16",
        ),
        (["--gpus_per_node", "3", "--global_batch_size", "16"], "does not divide"),
        (["--model", "./nowhere", "--dataset", "rows.jsonl"], "dataset rows.jsonl: there is no such file"),
        (["--model", "./nowhere", "--dataset", "demo/train.jsonl"], "cannot be planned for"),
        (["--methods", "lora"], "there is no option methods"),
        (["--json", f"{__file__}/plan.json"], "plan.json cannot be written: "),
    ],
)
def test_mistakes_get_a_sentence(words, sentence, capsys):
    assert plan(*words) == 2
    assert sentence in capsys.readouterr().err


def test_training_arguments_are_refused_as_a_run_refuses_them():
    with pytest.raises(UserError, match="inducter"):
        command.check_training_arguments(Settings(trainer_args={"torch_compile_backend": "inducter"}))
    # A GPU may do what this process, on the CPU, cannot.
    command.check_training_arguments(Settings(trainer_args={"tf32": True}, precision="bf16"))


def test_packs_are_planned_where_packing_is_on(capsys, tmp_path):
    path = tmp_path / "plan.json"
    assert plan("--packing", "on", "--max_length", "128", "--global_batch_tokens", "1000", "--json", str(path)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    found = json.loads(path.read_text())
    packs = found["rows"]["packs"]
    # 18,040 tokens fill nearly all of it.
    assert 18_040 / 128 <= packs < 1.05 * 18_040 / 128
    assert f"packs {packs:,} (18,040 tokens" in printed and "= 8 packs" in printed
    assert found["plan"]["steps"] == 3 * -(-packs // 8)


def test_packing_is_planned_as_a_run_decides_on_it(capsys, tmp_path):
    few = ("--model", str(DEMO_MODEL), "--dataset", str(write_jsonl(tmp_path / "few.jsonl", demo_rows()[:8])))
    for words, rows in ((("--precision", "fp32"), "padded"), ((), "packed"), (("--backend", "transformers"), "packed")):
        assert plan(*few, *words) == 0
        assert f"packing auto is planned as {rows} rows" in capsys.readouterr().out, words
    for words, place in (
        (["--precision", "fp32"], "unsloth (fp32)"),
        (["--backend", "transformers", "--attn_implementation", "sdpa"], "transformers (bf16, sdpa)"),
    ):
        assert plan(*few, *words, "--global_batch_tokens", "1000") == 2
        said = capsys.readouterr().err
        assert f"rows are padded: backend {place} has no attention kernel for packed rows; give" in said


def test_a_t4_is_planned_in_fp16_and_without_packs(capsys):
    assert plan("--compute_capability", "7.5", "--backend", "unsloth") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "method lora, fp16, backend unsloth" in printed
    assert (
        "packing auto is planned as padded rows, because backend unsloth (fp16) on a GPU (compute capability 7.5, "
        "older than flash attention) has no attention kernel for packed rows; --packing on plans packs"
    ) in printed.replace("- ", "")


def test_a_labelled_answer_counts_without_its_mismatched_row(tmp_path):
    rows = [{"prompt": f"What is {n}?", "completion": "It is not " * 2**n, "label": n > 1} for n in range(4)]
    file, path = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "plan.json"
    found = []
    for task, options in {
        "kto": ("--packing", "on"),
        "kto ": ("--packing", "off"),
        "sft": ("--packing", "off"),
    }.items():
        if task == "sft":
            write_jsonl(file, [{name: row[name] for name in ("prompt", "completion")} for row in rows])
        words = ("--model", str(DEMO_MODEL), "--task", task.strip(), "--dataset", str(file), "--json", str(path))
        assert plan(*words, *options) == 0
        found.append(json.loads(path.read_text())["rows"]["tokens"])
    assert found[0] == found[1] == found[2]


def test_a_pair_takes_both_its_rows_in_a_pack_and_twice_the_longer_one_without(tmp_path, capsys):
    rows = [{"prompt": f"What is {n}?", "chosen": "It is.", "rejected": "It is not " * 8} for n in range(4)]
    file, path = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "plan.json"
    tokens = {}
    for packing in ("on", "off"):
        options = ("--model", str(DEMO_MODEL), "--task", "dpo", "--dataset", str(file), "--packing", packing)
        assert plan(*options, "--json", str(path)) == 0
        tokens[packing] = json.loads(path.read_text())["rows"]["tokens"]
    assert 1.2 < tokens["off"] / tokens["on"] < 2
    assert "off: a captured step sums the losses of tokens, and dpo compares whole answers" in capsys.readouterr().out


def test_where_nothing_fits_the_smallest_is_planned(capsys):
    auto = ("--per_device_train_batch_size", "auto", "--gradient_checkpointing", "auto")
    assert plan("--gpu_memory", "1MB", *auto) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "gradient_checkpointing unsloth," in printed and "1 pack per device" in printed
    assert "No method and sharding in the table fits either" in printed


def test_what_fits_is_named_before_what_may_fit():
    def row(sharding, verdict, method="lora"):
        return SimpleNamespace(
            method=method, sharding=sharding, config=sharding, verdict=verdict, memory=SimpleNamespace(total=9e9)
        )

    rows = [row("none", "does not fit"), row("zero3", "unknown"), row("fsdp2", "fits"), row("none", "fits", "qlora")]
    report = SimpleNamespace(settings=Settings(model="m"), memory=rows, hardware=SimpleNamespace(gpu_memory=8e9))
    assert verdict_sentence(report).endswith("What fits by the table: lora with fsdp2, qlora with DDP.")
    del rows[2:]
    assert verdict_sentence(report).endswith("What may fit by the table: lora with zero3.")


def test_another_reference_is_counted_beside_the_model_while_it_computes(tmp_path, capsys):
    other = save_llama(tmp_path / "other", hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    rows = [{"prompt": f"What is {n}?", "chosen": "It is.", "rejected": "It is not."} for n in range(4)]
    file, path = write_jsonl(tmp_path / "rows.jsonl", rows), tmp_path / "plan.json"
    options = ("--model", str(DEMO_MODEL), "--task", "dpo", "--dataset", str(file), "--gpus_per_node", "2")
    found: dict[str, list[dict[str, Any]]] = {"none": [], "fsdp2": []}
    another = ("--reference_model", str(other))
    for reference in ((), another, ("--streaming", "--max_steps", "2"), ("--streaming", "--max_steps", "2", *another)):
        assert plan(*options, *reference, "--json", str(path)) == 0
        memory = json.loads(path.read_text())["plan"]["memory"]
        for row in memory:
            if row["method"] == "lora" and row["sharding"] in found:
                found[row["sharding"]].append(row)
        if reference == another:
            assert {row["sharding"] for row in memory} == {"none", "fsdp2"}
            assert f"Reference: {other} is loaded beside the model" in " ".join(capsys.readouterr().out.split())
    # In 16 bit.
    added = 2 * AutoModelForCausalLM.from_pretrained(other).num_parameters()
    assert found["none"][1]["loading"] - found["none"][0]["weights"] == added
    assert found["fsdp2"][1]["loading"] - found["fsdp2"][0]["weights"] == added / 2
    assert found["none"][1]["total"] == max(found["none"][0]["total"], found["none"][1]["loading"])
    # A stream has it in each step, without FSDP2.
    assert found["none"][3]["weights"] - found["none"][2]["weights"] == added
    assert {row["sharding"] for row in memory} == {"none"} and len(found["fsdp2"]) == 3
