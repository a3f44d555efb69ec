"""Ranks and backend: what a launcher's variables mean, who decides, and what precedes `import unsloth`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import threading
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest
import triton

from tests.ranks import run_ranks
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.hub import DECIDED, use_cache_if_hub_is_unreachable
from unsloth_ddp.distributed.backend import import_backend
from unsloth_ddp.distributed.ranks import Ranks, forget_mpi, ranks_from_environment
from unsloth_ddp.distributed.runtime import Runtime, control_timeout, keep_tuned_kernels, started
from unsloth_ddp.utils.errors import UserError

FAKE_UNSLOTH = """
import json, os
CACHE = os.environ["UNSLOTH_COMPILE_LOCATION"]
FILES = sorted(os.listdir(CACHE))

class FastLanguageModel:
    calls = []
    @classmethod
    def from_pretrained(cls, **given):
        from transformers import LlamaConfig, LlamaForCausalLM
        cls.calls.append(given)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
        config = LlamaConfig(vocab_size=8, num_hidden_layers=1, architectures=["LlamaForCausalLM"], **sizes)
        return LlamaForCausalLM(config), object()
    @classmethod
    def get_peft_model(cls, model, **given):
        cls.calls.append(given)
        return model
"""

LLAMA_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def test_plain_python_is_one_process():
    assert ranks_from_environment({}) == Ranks(0, 0, 1, 1)


def test_a_launchers_variables_are_read():
    environ = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    ranks = ranks_from_environment(environ)
    assert (ranks.is_main, ranks.is_local_main, ranks.nodes) == (False, False, 2)


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "contradict"),
        ({"WORLD_SIZE": "2"}, "RANK and LOCAL_RANK are not set, .* unset WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "LOCAL_RANK is not set, so no launcher"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "3"}, "contradict"),
    ],
)
def test_impossible_variables_are_refused(environ, sentence):
    with pytest.raises(UserError, match=sentence):
        ranks_from_environment(environ)


def test_what_mpi_left_in_a_shell_is_ignored_and_a_process_of_mpi_refused(capsys):
    environ = {"PMI_SIZE": "4", "PMI_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    forget_mpi(environ)
    assert environ == {}
    assert capsys.readouterr().out.startswith("PMI_SIZE 4 is ignored")
    launched = {"WORLD_SIZE": "2", "RANK": "1", "OMPI_COMM_WORLD_RANK": "1"}
    forget_mpi(launched)
    assert len(launched) == 3
    with pytest.raises(UserError, match=r"OMPI_COMM_WORLD_RANK is 1 .* one of several"):
        forget_mpi({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"})


def test_the_wait_for_one_process_grows_with_the_data(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b" " * 2_000_000)
    assert control_timeout(Settings(dataset=[str(rows)])).total_seconds() == 3610
    assert control_timeout(Settings(dataset=["owner/name"])).total_seconds() == 8 * 3600


@pytest.mark.parametrize(
    ("given", "environ", "reachable", "offline"),
    [
        ({"model": "a/b"}, {}, False, "1"), ({"model": "a/b"}, {}, True, None), ({}, {}, False, None),
        ({"dataset": ["rows.jsonl", "a/b"]}, {}, False, "1"), ({"eval_dataset": ["a/b"]}, {}, False, "1"),
        ({"task": "dpo", "reference_model": "a/b"}, {}, False, "1"),
        # A mirror is asked, through a proxy.
        ({"model": "a/b"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, None, "1"),
        ({"model": "a/b"}, {"https_proxy": "http://127.0.0.1:9"}, None, "1"),
        ({"model": "a/b"}, {"https_proxy": "socks5://127.0.0.1:9"}, None, None),
        ({"model": "a/b"}, {"HF_HUB_OFFLINE": "0"}, False, "0"),
        # As the Hub's libraries read it, an empty one is not set.
        ({"model": "a/b"}, {"HF_HUB_OFFLINE": ""}, False, "1"), ({"model": "a/b"}, {"https_proxy": ""}, True, None),
    ],
)  # fmt: skip
def test_an_unreachable_hub_is_not_waited_for(monkeypatch, capsys, given, environ, reachable, offline):
    for name in (*DECIDED, "HF_ENDPOINT", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    def answer(request, timeout):
        # An answer of any kind, or none.
        raise HTTPError(request.full_url, 503, "busy", {}, None) if reachable else URLError("no route")

    if reachable is not None:
        monkeypatch.setattr("urllib.request.urlopen", answer)
    settings = Settings(**{"model": "./m", "dataset": ["rows.jsonl"], **given})
    use_cache_if_hub_is_unreachable(settings, check_model=False)
    assert os.environ.get("HF_HUB_OFFLINE") == offline
    assert ("a/b has to be in this machine's cache" in capsys.readouterr().out) == (offline == "1")


def test_a_name_server_that_does_not_answer_is_waited_for_a_moment_only(monkeypatch):
    answers = threading.Event()
    for name in (*DECIDED, "HF_ENDPOINT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("urllib.request.urlopen", lambda *given, **more: answers.wait())
    monkeypatch.setattr("unsloth_ddp.data.sources.hub.ANSWER_TIME", 0.01)
    use_cache_if_hub_is_unreachable(Settings(model="a/b", dataset=["d.jsonl"]), check_model=False)
    answers.set()
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_model_that_is_not_in_the_cache_is_refused_without_the_hub(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    settings = Settings(model="Qwen/Qwen3-8B", dataset=["d.jsonl"])
    with pytest.raises(UserError) as refused:
        use_cache_if_hub_is_unreachable(settings)
    assert str(refused.value).startswith(
        f"model Qwen/Qwen3-8B is no folder here and not in the Hub's cache ({tmp_path}), and"
    )
    assert "(uv run hf download Qwen/Qwen3-8B) with HF_HOME on a disk" in str(refused.value)
    (tmp_path / "models--unsloth--qwen3-8b-unsloth-bnb-4bit").mkdir()
    use_cache_if_hub_is_unreachable(settings)
    use_cache_if_hub_is_unreachable(dataclasses.replace(settings, model="./nowhere"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    use_cache_if_hub_is_unreachable(dataclasses.replace(settings, model="a/other"))


def test_libraries_are_silent_when_a_run_imports_them(monkeypatch):
    for name in ("_start_processes", "_stop_processes"):
        monkeypatch.setattr(f"unsloth_ddp.distributed.runtime.{name}", lambda *given: None)
    loggers = [logging.getLogger(name) for name in ("torch.utils._pytree", "bitsandbytes")]
    for logger in loggers:
        monkeypatch.setattr(logger, "level", logging.NOTSET)
    with started(Settings(use_cpu=True), Ranks()):
        assert [logger.level for logger in loggers] == [logging.ERROR] * 2


@pytest.mark.parametrize("given, expected", [({}, None), ({"full_determinism": True}, ":4096:8")])
def test_full_determinism_is_prepared_before_the_gpu_is_used(monkeypatch, given, expected):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "x")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    seen = []
    start = "unsloth_ddp.distributed.runtime._start_processes"
    monkeypatch.setattr(start, lambda *_: seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
    monkeypatch.setattr("unsloth_ddp.distributed.runtime._stop_processes", lambda *_: None)
    with started(Settings(use_cpu=True, trainer_args=given), Ranks()):
        assert seen == [expected]


def leave_a_group_of_one(error: str) -> None:
    """Start the group that a launcher announces for one process, and leave it, perhaps by an error."""
    from torch import distributed

    raised = pytest.raises(ValueError, match=error) if error else contextlib.nullcontext()
    with raised, started(Settings(), ranks_from_environment()):
        assert distributed.is_initialized()
        if error:
            raise ValueError(error)
    assert not distributed.is_initialized()


@pytest.mark.parametrize("error", ["", "broken"])
def test_a_group_of_one_process_is_destroyed(error, tmp_path):
    run_ranks(1, leave_a_group_of_one, error, folder=tmp_path).check()


def decide_and_hand_out(folder: str) -> None:
    """Rank 0 decides, hands out one item a rank, and fails at each in both ways; every rank writes what it saw."""
    ranks = ranks_from_environment()
    with started(Settings(), ranks) as runtime:
        items = [list(range(10**rank)) for rank in range(ranks.world_size)]
        seen = [runtime.broadcast_from_main(lambda: f"from rank {ranks.rank}"), runtime.gather(ranks.rank)]
        seen.append(len(runtime.scatter_from_main(lambda: items)))
        for run in (runtime.on_main, runtime.scatter_from_main):
            for error in (UserError("mend it"), KeyError("broken")):
                try:
                    run(lambda error=error: (_ for _ in ()).throw(error))
                except Exception as caught:
                    seen.append(f"{type(caught).__name__}: {caught}")
        (Path(folder) / f"{ranks.rank}.json").write_text(json.dumps(seen))


def test_what_the_main_process_decides_or_hands_out_reaches_every_rank(tmp_path):
    run_ranks(3, decide_and_hand_out, str(tmp_path), folder=tmp_path).check()
    for rank in range(3):
        *seen, user_error, broken, user_error_again, broken_again = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen == ["from rank 0", [0, 1, 2], 10**rank]
        assert user_error == user_error_again == "UserError: mend it"
        told = "RuntimeError: rank 0 failed: 'broken'" if rank else "KeyError: 'broken'"
        assert broken == broken_again == told


@pytest.fixture
def fake_unsloth(tmp_path, monkeypatch):
    """An `unsloth` that records what it is given, and a runtime that uses it."""
    (tmp_path / "unsloth.py").write_text(FAKE_UNSLOTH)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    monkeypatch.setenv("UNSLOTH_COMPILE_LOCATION", "x")
    monkeypatch.delenv("UNSLOTH_COMPILE_LOCATION")
    yield Runtime(Ranks(5, 1, 8, 4), "unsloth", "cuda", "bf16", "GPU")
    sys.modules.pop("unsloth", None)


def alone_in(runtime: Runtime) -> None:
    """The same runtime as rank 0 of 1, for code that talks to other ranks."""
    runtime.ranks = Ranks()


def test_the_cache_is_the_jobs_own(fake_unsloth):
    alone_in(fake_unsloth)
    import_backend(fake_unsloth, Settings())
    cache = Path(sys.modules["unsloth"].CACHE)
    assert cache.is_dir()
    fake_unsloth.cleanup.close()
    assert not cache.exists()


@pytest.mark.parametrize("rewritten", [False, True])
def test_unsloth_rewrites_no_trainer_but_the_kits(fake_unsloth, monkeypatch, tmp_path, rewritten):
    import torch
    import trl

    alone_in(fake_unsloth)
    (tmp_path / "unsloth.py").unlink()
    (tmp_path / "unsloth/models").mkdir(parents=True)
    (tmp_path / "unsloth/__init__.py").write_text('import os; CPU = os.environ["UNSLOTH_ALLOW_CPU"]')
    (tmp_path / "unsloth/models/__init__.py").write_text("")
    (tmp_path / "unsloth/models/rl.py").write_text("GIVEN = []; _patch_trl_rl_trainers = GIVEN.append")
    for name in ("unsloth.models", "unsloth.models.rl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    # As a version of Unsloth would leave it that does not know the variable.
    monkeypatch.setattr(trl, "SFTTrainer", type("UnslothSFTTrainer" if rewritten else "SFTTrainer", (), {}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    import_backend(fake_unsloth, Settings())
    fake_unsloth.cleanup.close()
    assert sys.modules["unsloth"].CPU == "1"
    assert "UNSLOTH_ALLOW_CPU" not in os.environ
    assert ([] if rewritten else ["sft_trainer"]) == sys.modules["unsloth.models.rl"].GIVEN
    for name in ("unsloth.models", "unsloth.models.rl"):
        sys.modules.pop(name)


@pytest.mark.parametrize("clear", [False, True])
def test_a_named_cache_is_kept_and_cleared_only_when_asked(fake_unsloth, tmp_path, clear):
    alone_in(fake_unsloth)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "old.py").write_text("")
    import_backend(fake_unsloth, Settings(compiled_cache_dir=str(cache), clear_compiled_cache=clear))
    fake_unsloth.cleanup.close()
    assert ([] if clear else ["old.py"]) == sys.modules["unsloth"].FILES
    assert cache.is_dir()


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_unsloth_loads_the_whole_model_on_the_local_rank(fake_unsloth, method, monkeypatch):
    monkeypatch.setenv("UNSLOTH_COMPILE_LOCATION", os.getcwd())
    from unsloth_ddp.model.loading.load import _load_unsloth

    settings = Settings(model="m", method=method, gradient_checkpointing="unsloth", full_weights="bf16")
    _load_unsloth(settings, fake_unsloth)
    load, *adapter = sys.modules["unsloth"].FastLanguageModel.calls
    assert load["device_map"] == {"": 1}
    assert load["offload_embedding"] is False
    assert load["load_in_4bit"] is (method == "qlora")
    assert load["full_finetuning"] is (method == "full")
    assert load["float32_mixed_precision"] is (False if method == "full" else None)
    assert bool(adapter) is (method != "full")
    if adapter:
        assert sorted(adapter[0]["target_modules"]) == sorted(LLAMA_LAYERS)
        assert adapter[0]["use_gradient_checkpointing"] == "unsloth"


def test_tuned_kernels_are_kept_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set first, so that it is as before after the test.
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", "")
    monkeypatch.delenv("TRITON_CACHE_AUTOTUNING")
    keep_tuned_kernels()
    assert triton.knobs.autotuning.cache is True
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", "0")
    keep_tuned_kernels()
    assert triton.knobs.autotuning.cache is False
