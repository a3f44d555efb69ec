"""Fixtures shared by all tests: small rows of every kind, and the expensive runs, made once."""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.ranks import Result, run_ranks, train

# As train_ddp.py has it, before torch is imported: on a busy machine threads that spin take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Shells have SIGINT ignored in what they start in the background, and nohup SIGHUP; programs started here would inherit
# that.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# A busy machine is slow, and no test is wrong for it.
hypothesis.settings.register_profile("no_deadline", deadline=None)
hypothesis.settings.load_profile("no_deadline")

REPO = Path(__file__).resolve().parent.parent

# Images of containers set PYTHONDONTWRITEBYTECODE, and then each process that a test starts compiles torch and
# Transformers again, which takes ten seconds. They share a cache that is not in the way of what set the variable.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(REPO / ".pytest_cache" / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

DEMO_MODEL = REPO / "demo" / "model"


def pytest_collection_finish() -> None:
    """Leave what the tests have imported out of later garbage collections, of which the kit asks for many."""
    gc.collect()
    gc.freeze()


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def demo_rows(name: str = "train") -> list[dict[str, Any]]:
    """The demo's chat rows."""
    return [json.loads(line) for line in (REPO / "demo" / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """Writes a YAML file and returns its path."""

    def write(text: str | bytes) -> Path:
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.fixture
def runtime() -> Any:
    """A run on one process without a GPU."""
    from tests.runtimes import cpu_runtime

    return cpu_runtime()


def save_llama(folder: Path, **options: Any) -> Path:
    """Save a Llama (two layers by default) of random weights with the demo's tokenizer; return the folder."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 1}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **{**sizes, "num_key_value_heads": 1, **options},
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose steps are well-conditioned, so that rounding stays small."""
    return save_llama(tmp_path_factory.mktemp("models") / "tiny", initializer_range=0.05)


@pytest.fixture(scope="session")
def uneven_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """13 chats of very different lengths; two of them have no supervised token within 64 tokens."""
    single = [row for row in demo_rows() if len(row["messages"]) == 2]
    longer = [row for row in demo_rows() if len(row["messages"]) > 2]
    rows = [row for pair in zip(single[:18], longer[:18], strict=True) for row in pair]
    late = {
        "messages": [{"role": "user", "content": "Who are you? " * 30}, {"role": "assistant", "content": "Nobody."}]
    }
    rows = [*rows[:4], late, *rows[4:10], late, rows[10]]
    return write_jsonl(tmp_path_factory.mktemp("rows") / "uneven.jsonl", rows)


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """The folder where jobs run; their runs are in <place>/outputs/."""
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="session")
def job(place, tiny_model, uneven_rows) -> Callable[..., Result]:
    """Run train_ddp.py on the tiny model in <place>/outputs/<name>; of an option given twice, the last counts."""

    def run(options: str, name: str, ranks: int = 1, code: int = 0, target: Any = train, args: tuple = (), **more):
        argv = (
            f"--model {tiny_model} --dataset {uneven_rows} --run_name {name} --learning_rate 0.01 --max_length 64"
        ).split()
        argv += ["--gradient_checkpointing", "none", *options.split()]
        # Of an option that takes a list, all would count.
        argv += [] if "--report_to" in argv else ["--report_to", "none"]
        result = run_ranks(ranks, target, argv, str(place), *args, folder=place / f"{name}.out", **more)
        # The harness ends the other ranks of one that failed, as a launcher does.
        ended = {code, -signal.SIGTERM} if code else {0}
        assert code in result.codes and ended >= set(result.codes), f"exit codes {result.codes}\n{result.output}"
        return result

    return run


@pytest.fixture(scope="session")
def whole_run(place, job) -> Callable[[int], Path]:
    """The folder of an uninterrupted run on so many ranks, with all its checkpoints."""

    @functools.cache
    def make(ranks: int) -> Path:
        from tests.jobs import WHOLE_RUN

        job(WHOLE_RUN, f"whole-{ranks}", ranks)
        return place / "outputs" / f"whole-{ranks}"

    return make
