"""Checkpoints that are written while training continues: what they hold, what a kill leaves, when training waits."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from safetensors.torch import load_file

from tests.jobs import LAST, WHOLE_RUN, assert_same, ends, manifest_steps
from tests.ranks import train
from tests.runtimes import cpu_runtime
from tests.waiting import wait_until
from unsloth_ddp.checkpoints import host_copy, writer
from unsloth_ddp.checkpoints.host_copy import HostCopies, tensor_bytes
from unsloth_ddp.checkpoints.writer import Checkpoints
from unsloth_ddp.training import callbacks
from unsloth_ddp.training.callbacks import ReportProgress, StopTogether
from unsloth_ddp.training.sharded_saving import saved_weights, write_weights
from unsloth_ddp.utils.threads import in_thread

EVERY_FOURTH = f"{WHOLE_RUN} --save_steps 4"
# The steps that end 30 seconds after the beginning and after the save before them, where each takes ten.
SAVED = (4, 7)


def train_while_writing(argv: list[str], cwd: str, kill_at: int = 0) -> None:
    """train_ddp.py that writes checkpoint-4 only once step 6 has begun; killed while it writes that of `kill_at`."""
    begun, begin, complete = threading.Event(), ReportProgress.on_step_begin, Checkpoints._complete

    def note(self: ReportProgress, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        begin(self, args, state, control, **kwargs)
        if state.global_step + 1 == 6:
            begun.set()

    def late(self: Checkpoints, step: int, target: Path, *rest: Any) -> str | None:
        if step == kill_at:
            self._later[0]()
            os.kill(os.getpid(), signal.SIGKILL)
        assert begun.wait(60), "training waited for the checkpoint"
        return complete(self, step, target, *rest)

    with patch.object(ReportProgress, "on_step_begin", note), patch.object(Checkpoints, "_complete", late):
        train(argv, cwd)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_checkpoint_written_during_later_steps_holds_its_own_step(job, whole_run, place, ranks):
    name = f"beside-{ranks}"
    job(EVERY_FOURTH, name, ranks, target=train_while_writing)
    run, expected = place / "outputs" / name, whole_run(ranks)
    assert manifest_steps(run) == [4, 8, LAST]
    for file in ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state*.pth"):
        for path in (expected / "checkpoint-4").glob(file):
            assert (run / "checkpoint-4" / path.name).read_bytes() == path.read_bytes(), path.name
    assert_same(ends(run, LAST), ends(expected, LAST))


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(job, whole_run, place):
    run = place / "outputs" / "killed-beside"
    job(EVERY_FOURTH, run.name, code=-signal.SIGKILL, target=train_while_writing, args=(8,))
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-4"]
    assert list((run / "checkpoint.partial" / "checkpoint-8").iterdir())
    assert f"Resuming from {run}/checkpoint-4" in job(EVERY_FOURTH, run.name).output
    assert not (run / "checkpoint.partial").exists()
    assert_same(ends(run, LAST), ends(whole_run(1), LAST))


def train_by_the_clock_without_memory(argv: list[str], cwd: str) -> None:
    """train_ddp.py on a clock of its own, which passes ten seconds in each step of rank 0, and none on other ranks.

    Memory has no room for a copy; each step finds the save before it complete.
    """
    seconds, ask = itertools.count(0, 10 if os.environ["RANK"] == "0" else 0), StopTogether.on_pre_optimizer_step
    now = [0.0]

    def pass_time(self: StopTogether, *args: Any, **kwargs: Any) -> None:
        now[0] = float(next(seconds))
        ask(self, *args, **kwargs)

    begin = ReportProgress.on_step_begin

    def check(self: ReportProgress, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}", "manifest.json")
        assert state.global_step not in SAVED or folder.is_file(), "a step began before the checkpoint was complete"
        begin(self, args, state, *rest, **kwargs)

    with (
        patch.object(ReportProgress, "on_step_begin", check),
        patch.object(host_copy, "available_bytes", lambda: host_copy.SPARE + 1000),
        patch.object(StopTogether, "on_pre_optimizer_step", pass_time),
        patch.object(callbacks, "time", SimpleNamespace(monotonic=lambda: now[0])),
    ):
        train(argv, cwd)


def test_a_checkpoint_is_saved_after_a_time_on_every_rank_and_waited_for_where_memory_has_no_room(
    job, whole_run, place
):
    options = f"{WHOLE_RUN} --save_strategy no --save_seconds 25 --num_train_epochs 3"
    printed = job(options, "by-time", 2, target=train_by_the_clock_without_memory).output
    said = "Training waits while a checkpoint is written, because host memory has no room for a copy of 4"
    assert printed.count(said) == 1, printed
    assert tuple(manifest_steps(place / "outputs" / "by-time")) == SAVED
    weights = load_file(place / "outputs" / "by-time" / "adapter_model.safetensors")
    assert_same(weights, ends(whole_run(2), LAST)["weights"])


def test_a_failure_that_is_no_failed_write_ends_the_run(tmp_path):
    checkpoints = Checkpoints(cpu_runtime(), tmp_path, {}, {}, None)

    def write(aside: Path) -> None:
        (aside / "checkpoint-1").mkdir()
        checkpoints.later(lambda: [][0])

    checkpoints.save(1, write)
    with pytest.raises(IndexError):
        checkpoints.settle()
    assert checkpoints.last is None


def test_a_writer_that_runs_out_of_memory_leaves_a_failed_save(tmp_path, capsys):
    checkpoints = Checkpoints(cpu_runtime(), tmp_path, {}, {}, None)

    def write(aside: Path) -> None:
        (aside / "checkpoint-1").mkdir()
        checkpoints.later(Mock(side_effect=MemoryError))

    checkpoints.save(1, write)
    checkpoints.settle()
    assert checkpoints.failed == "checkpoint-1 could not be written: no host memory is left for it"
    assert checkpoints.failed in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_the_end_of_a_failed_run_waits_for_a_checkpoint_that_the_next_save_waits_for(tmp_path):
    checkpoints, release = Checkpoints(cpu_runtime(), tmp_path, {}, {}, None), threading.Event()

    def write(aside: Path) -> None:
        (aside / "checkpoint-1").mkdir()
        checkpoints.later(lambda: release.wait(60) and None)

    checkpoints.save(1, write)
    settling = in_thread(checkpoints.settle, "settle")
    wait_until(lambda: checkpoints.runtime.progress.phase == "saving", 60, "the next save")
    with patch.object(writer, "wait") as wait:
        checkpoints._wait_at_the_end()
    assert wait.call_args.args[0] and not wait.call_args.args[0][0].done()
    release.set()
    settling.result(60)
    assert checkpoints.last == tmp_path / "checkpoint-1"


def test_a_write_that_fails_says_so_to_its_caller(tmp_path):
    """Tensors that follow a failed one are gathered by all ranks, and not written."""
    checkpoints = Checkpoints(cpu_runtime(), tmp_path, {}, {}, None)
    assert checkpoints.attempt(lambda: (tmp_path / "file").write_text("x"))
    assert not checkpoints.attempt(lambda: (tmp_path / "file" / "inner").write_text("x"))


def test_copies_keep_their_values_and_their_memory():
    shared = torch.arange(4.0)
    state = {
        "state": {0: {"a": shared, "b": shared, "step": 3}},
        "groups": [{"betas": (0.9, 0.99)}],
        "t": torch.ones(2, 3).T,
    }
    assert tensor_bytes(state) == 2 * 16 + 24
    copies = HostCopies()
    first = copies.of(state)
    shared += 1
    assert first["state"][0]["a"].tolist() == [0, 1, 2, 3] and first["state"][0]["a"] is first["state"][0]["b"]
    assert first["groups"] == [{"betas": (0.9, 0.99)}] and first["t"].stride() == state["t"].stride()  # type: ignore[attr-defined]
    again = copies.of(state)
    assert again["state"][0]["a"] is first["state"][0]["a"]
    assert again["state"][0]["a"].tolist() == [1, 2, 3, 4]


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **{**sizes, "num_key_value_heads": 1, **options}))


def mixtral() -> Any:
    """A model whose experts stand together in memory and apart in its files."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=50, num_local_experts=3, num_key_value_heads=1, **sizes))


def adapted(model: Any, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    options = {"target_modules": ["q_proj", "down_proj"], **options}
    return get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **options))


MODELS = {
    "full": llama,
    "full, tied": lambda: llama(tie_word_embeddings=True),
    "full, experts": mixtral,
    "lora": lambda: adapted(llama()),
    "dora": lambda: adapted(llama(), use_dora=True),
    "head trained": lambda: adapted(llama(), modules_to_save=["lm_head"]),
    "embedding adapted": lambda: adapted(llama(), target_modules=["q_proj", "embed_tokens"]),
    "tied embedding adapted": lambda: adapted(
        llama(tie_word_embeddings=True), target_modules=["q_proj", "embed_tokens"]
    ),
    "experts adapted": lambda: adapted(mixtral(), target_parameters=["mlp.experts.down_proj"]),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_the_files_hold_what_save_pretrained_writes(tmp_path, kind):
    model = MODELS[kind]()
    found, expected = tmp_path / "found", tmp_path / "expected"
    found.mkdir()
    model.save_pretrained(expected)
    weights = HostCopies().of(saved_weights(model))
    write_weights(model, weights, found, lambda state: model.save_pretrained(found, state_dict=state))
    assert sorted(path.name for path in found.iterdir()) == sorted(path.name for path in expected.iterdir())
    (name,) = (path.name for path in expected.glob("*.safetensors"))
    assert_same(load_file(found / name), load_file(expected / name))
