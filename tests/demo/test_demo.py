"""The README's first command, whole: what it prints, what it leaves, and that what it leaves works elsewhere."""

from __future__ import annotations

import json
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.common import reload
from unsloth_ddp.config.parse import parse_settings

SUMMARY_KEYS = {
    "world_size", "global_batch_size", "steps", "tokens", "supervised_tokens", "train_loss", "eval_loss",
    "tokens_per_second", "peak_memory_bytes", "wall_time_seconds", "versions", "settings", "demo_accuracy_before",
    "demo_accuracy_after",
}  # fmt: skip


def test_it_learns_to_answer_questions_it_was_not_trained_on(demo):
    assert demo.summary["demo_accuracy_before"] < 0.05
    assert demo.summary["demo_accuracy_after"] >= 0.9
    assert re.search(r"answered exactly: 0\.\d% before, \d+\.\d% after \(150\)", demo.text)
    assert demo.text.count("before: ") == demo.text.count("after:  ") == 3


def test_only_the_main_process_speaks(demo):
    assert re.sub(" +", " ", demo.text).count("backend transformers") == 1
    assert demo.text.count("Done: 144 steps") == 1
    assert demo.errors.count("tokenizer has new PAD/BOS/EOS") <= 1
    assert "Saving the dataset" not in demo.errors


def test_the_table_says_what_will_run(demo):
    for part in (
        "2 on 1 node",
        "fp32",
        "(1,129,984 parameters, adapter included)",
        "lora (163,840 trainable parameters",
        "760 (18,040 tokens, longest 43)",
    ):
        assert part in demo.text
    assert "4 rows a device x 2 accumulation x 2 processes = 16 rows" in demo.text


def test_the_summary_has_what_the_run_came_to(demo):
    assert demo.summary.keys() >= SUMMARY_KEYS
    assert demo.summary["world_size"] == 2
    assert demo.summary["global_batch_size"] == 16
    assert demo.summary["tokens"] == 3 * 18040
    assert demo.summary["supervised_tokens"] == 3 * 2700
    assert demo.summary["eval_loss"] < 0.1


def test_the_folder_holds_logs_settings_and_curves(demo):
    assert {p.name for p in (demo.folder / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}
    again = parse_settings(["--config", str(demo.folder / "settings.yaml")])
    assert (again.run_name, again.merge, again.learning_rate) == ("demo", True, 1e-3)
    events = EventAccumulator(str(demo.folder / "tensorboard")).Reload()
    wanted = {
        "train/loss",
        "train/learning_rate",
        "train/grad_norm",
        "train/tokens_per_second",
        "train/rank_loss_spread",
    }
    assert set(events.Tags()["scalars"]) >= wanted | {"eval/loss"}
    losses = [point.value for point in events.Scalars("train/loss")]
    assert losses[-1] < 0.1 < losses[0]


def test_the_adapter_works_in_plain_peft(demo, capsys):
    reload.main(demo.folder)
    loaded = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert loaded["eval_loss"] == pytest.approx(demo.summary["eval_loss"], rel=1e-5)


def test_the_merged_model_says_the_same_as_the_adapter(demo):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.folder / "merged")
    asked = [{"role": "user", "content": "In which city does Kato Elster live?"}]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        adapter = AutoPeftModelForCausalLM.from_pretrained(demo.folder, dtype=torch.float32)(**inputs).logits
        merged = AutoModelForCausalLM.from_pretrained(demo.folder / "merged", dtype=torch.float32)(**inputs).logits
    assert merged[0, -1].argmax() == adapter[0, -1].argmax()
    # The merged weights are kept in 16 bit.
    torch.testing.assert_close(merged, adapter, rtol=0, atol=0.05 * adapter.abs().max().item())
