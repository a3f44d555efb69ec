"""One function decides on the backend, once: by settings, devices, the model, and with `auto` by what the rows are."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.revisions import pin_revisions
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model import backend
from unsloth_ddp.model.backend import BackendFacts, choose_backend, decide_backend, with_backend
from unsloth_ddp.model.loading.load import check_model
from unsloth_ddp.utils.errors import UserError

TABLE = [line for line in (Path(__file__).parent / "backends.txt").read_text().splitlines() if not line.startswith("#")]
REFUSALS = {
    "backend unsloth needs an accelerator and none is found here; use --backend transformers": "a",
    "Unsloth would load it whole, which takes 93.1 GiB, and a GPU has 46.6 GiB; give --backend transformers": "s",
    "does not train correctly with Unsloth; use --backend transformers": "z",
    "have not been tried with Unsloth, whose kernels read the weights directly; use --backend transformers": "p",
}


def letter_of(facts: BackendFacts) -> str:
    try:
        return choose_backend(facts)[0][0].upper()
    except UserError as error:
        return next(letter for text, letter in REFUSALS.items() if text in str(error))


def test_the_backend_is_that_of_the_frozen_table() -> None:
    for line in TABLE:
        method, checkpointing, sharding, offload, size, *expected = line.split()
        loading, chosen = 100e9 if size == "large" else 10e9, []
        for cuda, asked in itertools.product((True, False), ("auto", "unsloth", "transformers")):
            letters = ""
            for fp8, rows in itertools.product((False, True), ("text", "images", "pairs", "padded")):
                of_run: Any = {"method": method, "gradient_checkpointing": checkpointing, "backend": asked, "fp8": fp8}
                facts: Any = {"sharding": sharding, "offload": offload, "loading": loading, "room": 50e9}
                settings = Settings(task="dpo" if rows == "pairs" else "sft", **of_run)
                letters += letter_of(
                    BackendFacts(settings, cuda, images=rows == "images", padded=rows == "padded", **facts)
                )
            chosen.append(letters)
        assert chosen == expected, line


@pytest.mark.parametrize(
    ("changes", "facts", "chosen"),
    [
        ({}, {"images": True, "quantized": True}, "unsloth"),
        ({"packing": "off"}, {"padded": True}, "unsloth"),
        ({"precision": "fp32"}, {"padded": True}, "unsloth"),
        ({"attn_implementation": "eager"}, {"padded": True}, "unsloth"),
        ({"lora_target_modules": ["q_proj", "up_proj"]}, {"padded": True}, "unsloth"),
        ({"lora_target_modules": ["q_proj"]}, {"padded": True}, "transformers"),
        ({"lora_target_parameters": ["all-experts"]}, {"padded": True}, "unsloth"),
        ({}, {"shares_keys": True}, "transformers"),
        ({"method": "qlora"}, {"shares_keys": True}, "transformers"),
        ({"gradient_checkpointing": "none"}, {"shares_keys": True}, "unsloth"),
        ({}, {"sharding": "fsdp2", "loading": 9e9, "room": 10e9}, "unsloth"),
        ({}, {"sharding": "fsdp2", "loading": 9.1e9, "room": 10e9}, "transformers"),
        ({}, {"sharding": "none", "loading": 20e9, "room": 10e9}, "unsloth"),
    ],
)
def test_auto_takes_the_backend_that_trains_better(changes: Any, facts: Any, chosen: str) -> None:
    assert choose_backend(BackendFacts(Settings(**changes), **facts))[0] == chosen


def undecided(sharding: Any = "none", **options: Any) -> Runtime:
    return Runtime(Ranks(), None, "cuda", "bf16", "GPU", sharding=sharding, **options)  # type: ignore[arg-type]


def model_of(folder: Path, **config: Any) -> str:
    """Return a model folder, because a model on the Hub would be looked up there."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return str(folder)


def test_auto_waits_for_rows_only_where_they_decide(tmp_path: Path, capsys: Any) -> None:
    model = model_of(tmp_path)
    for options, early, of_images in (
        ({}, None, "transformers"),
        ({"method": "full"}, None, "transformers"),
        ({"method": "qlora"}, "unsloth", "unsloth"),
        ({"gradient_checkpointing": "unsloth"}, "unsloth", "unsloth"),
        ({"backend": "unsloth"}, "unsloth", "unsloth"),
        ({"backend": "transformers"}, "transformers", "transformers"),
        ({"task": "dpo"}, "transformers", "transformers"),
    ):
        for images in (False, True):
            settings, runtime = Settings(model=model, **options), undecided()  # type: ignore[arg-type]
            decide_backend(settings, runtime)
            assert runtime.decided_backend == early
            # What runs before the rows are read needs no backend that they decide.
            pin_revisions(settings, runtime)
            capsys.readouterr()
            decide_backend(settings, runtime, images=images)
            assert runtime.backend == (of_images if images else early or "unsloth")
            said = "Using backend transformers, because Unsloth is not taken for rows with images.\n"
            assert capsys.readouterr().out == (said if images and early is None else "")
            # The reason is said once, and nothing changes what was decided.
            decide_backend(settings, runtime, images=not images)
            assert capsys.readouterr().out == ""


def test_a_decided_backend_cannot_be_changed_nor_read_before() -> None:
    runtime = undecided()
    with pytest.raises(AttributeError):
        _ = runtime.backend
    runtime.backend = "unsloth"
    with pytest.raises(AttributeError, match="backend unsloth is decided, and cannot be changed to transformers"):
        runtime.backend = "transformers"
    assert runtime.backend == "unsloth"


def test_a_model_is_checked_before_rows_decide_on_its_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is quantized already is refused before its rows are read, so they may not decide."""
    monkeypatch.setattr("unsloth_ddp.model.loading.load.check_local_model", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "GPU")
    settings, runtime = Settings(model=model_of(tmp_path)), undecided()
    decide_backend(settings, runtime)
    check_model(settings, runtime)
    assert runtime.decided_backend is None
    settings, runtime = Settings(model=model_of(tmp_path, quantization_config={"quant_method": "awq"})), undecided()
    decide_backend(settings, runtime)
    with pytest.raises(
        UserError, match=r"quantized already \(awq\), which this kit does not train with backend unsloth"
    ):
        check_model(settings, runtime)


@pytest.mark.parametrize(
    ("config", "chosen"),
    [
        ({"model_type": "gpt_oss"}, "transformers"),
        ({"model_type": "wrapped", "text_config": {"model_type": "gpt_oss"}}, "transformers"),
        # Transformers does not train such weights.
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, "unsloth"),
        ({"model_type": "llama"}, "unsloth"),
        ({"model_type": "../gpt_oss"}, "unsloth"),
        ({"model_type": None}, "unsloth"),
    ],
)
def test_models_whose_rows_unsloth_pads_take_transformers(
    config: Any, chosen: str, capsys: Any, tmp_path: Path
) -> None:
    settings, runtime = Settings(model=model_of(tmp_path, **config)), undecided()
    decide_backend(settings, runtime, images=False)
    said = "because Unsloth is not taken for a model whose rows it pads." in capsys.readouterr().out
    assert (runtime.backend, said) == (chosen, chosen == "transformers")
    assert with_backend(settings).backend == ("transformers" if said else "auto")


@pytest.mark.parametrize("asked", ["auto", "unsloth"])
@pytest.mark.parametrize("copies", [1, 4])
def test_fsdp2_counts_the_whole_model_beside_a_shard_on_the_smallest_gpu(
    asked: Any, copies: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(backend, "gpu_bytes", lambda: 4_000_000)
    monkeypatch.setattr(backend, "bytes_while_loading", lambda _, parts: sizes.append(parts) or 3_000_000)
    settings, runtime = Settings(model=model_of(tmp_path), backend=asked), undecided("fsdp2", copies=copies)
    runtime.ranks = Ranks(rank=0, local_rank=0, world_size=8, local_world_size=2)
    monkeypatch.setattr(runtime, "gather", lambda value: [value] * 7 + [3_000_000])
    monkeypatch.setattr(runtime, "broadcast_from_main", lambda read: read())
    if asked == "unsloth":
        with pytest.raises(
            UserError, match=r"Unsloth would load it whole.*; give --backend transformers, which loads it"
        ):
            decide_backend(settings, runtime)
    else:
        decide_backend(settings, runtime)
        assert runtime.backend == "transformers"
        assert capsys.readouterr().out.startswith(
            f"Using backend transformers, which loads model {tmp_path} in shards: "
        )
    assert sizes == [8 // copies]


def test_every_rank_takes_the_facts_of_the_main_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other nodes may have another version of Transformers, in which they would read something else."""
    settings, runtime = Settings(model=model_of(tmp_path)), undecided()
    monkeypatch.setattr(runtime, "broadcast_from_main", lambda read: {"padded": True, "quantized": False})
    decide_backend(settings, runtime)
    assert runtime.backend == "transformers"


def test_the_decision_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom unsloth_ddp.model.backend import choose_backend, decide_backend\n"
        "print([name for name in ('torch', 'transformers', 'trl', 'unsloth') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
