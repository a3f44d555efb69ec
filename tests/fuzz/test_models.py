"""Model folders with parts missing, foreign, damaged or hostile: refused in a sentence; none of their code runs."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.conftest import DEMO_MODEL
from tests.fuzz import few, refusal, result_or_sentence
from tests.runtimes import cpu_runtime
from tests.unpickled import Touch
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.chat.tokenize import Encoder, encode_row
from unsloth_ddp.data.sources.formats import to_example
from unsloth_ddp.model.files.check import check_folder
from unsloth_ddp.model.loading.load import check_model, load_model, load_tokenizer

RUNTIME = cpu_runtime()
SAFE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo's model."""
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path, **options: Any) -> Any:
    """The model as a run loads it: looked through, then loaded."""
    mine = Settings(model=str(folder), dataset=["x"], **options)
    check_model(mine, RUNTIME)
    return load_model(mine, RUNTIME)[0]


def split(folder: Path, shards: int = 2) -> dict[str, str]:
    """Save the weights as so many shards; returns the index's map."""
    weights = load_file(folder / SAFE)
    (folder / SAFE).unlink()
    placed = {name: f"model-{number % shards + 1:05}-of-{shards:05}.safetensors" for number, name in enumerate(weights)}
    for shard in set(placed.values()):
        mine = {name: weights[name] for name in weights if placed[name] == shard}
        save_file(mine, folder / shard, metadata={"format": "pt"})
    write_index(folder, placed)
    return placed


def write_index(folder: Path, placed: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": placed}))


def change_config(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))


def test_whole_folders_load_in_one_file_and_in_shards(folder: Path) -> None:
    names = set(load(folder).state_dict())
    split(folder)
    assert set(load(folder).state_dict()) == names
    (folder.parent / "blobs").mkdir()
    for shard in folder.glob("*.safetensors"):
        # The Hub's cache holds links like these.
        shard.replace(folder.parent / "blobs" / shard.name)
        shard.symlink_to(folder.parent / "blobs" / shard.name)
    assert set(load(folder).state_dict()) == names


def test_a_missing_shard_is_named(folder: Path) -> None:
    split(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert (
        "model-00002-of-00002.safetensors is missing, which model.safetensors.index.json lists as one of 2"
        in refusal(lambda: load(folder))
    )


def test_a_shard_that_holds_other_weights_is_named(folder: Path) -> None:
    split(folder)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")
    assert "in model-00002-of-00002.safetensors, which does not contain it" in refusal(lambda: load(folder))


@pytest.mark.parametrize("name", ["../{}", "/etc/passwd", "a/../../{}", "..", "", "a\0b", "x" * 300])
def test_an_index_names_no_file_outside_its_folder(folder: Path, name: str) -> None:
    placed = split(folder, 1)
    shutil.copy(folder / "model-00001-of-00001.safetensors", folder.parent / "outside.safetensors")
    write_index(folder, dict.fromkeys(placed, name.format("outside.safetensors")))
    message = refusal(lambda: load(folder))
    assert ("is missing" if name.startswith("x") else "is not a file of this folder; do not use this model") in message


def test_weights_that_no_file_holds_are_refused_and_not_drawn_at_random(folder: Path) -> None:
    change_config(folder, num_hidden_layers=99, layer_types=None)
    message = refusal(lambda: load(folder))
    assert (
        re.search(r"its files lack \d+ weights \(the first: model\.layers\.", message) and "would be random" in message
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@few
@given(JSON | st.dictionaries(st.sampled_from(["weight_map", "metadata"]), JSON, max_size=2))
def test_any_index_is_whole_or_refused(folder: Path, content: Any) -> None:
    (folder / SAFE).unlink(missing_ok=True)
    (folder / INDEX).write_text(json.dumps(content))
    assert result_or_sentence(lambda: check_folder(folder, safetensors_only=True)) is None
    refusal(lambda: check_folder(folder, safetensors_only=True))


NAMES = st.sampled_from(["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", SAFE])


@settings(few, max_examples=25)
@given(
    NAMES,
    st.floats(0, 1, exclude_max=True) | st.binary(max_size=20) | JSON.map(lambda value: json.dumps(value).encode()),
)
@example("config.json", b"[" * 3000)
@example("config.json", b"null")
@example("tokenizer.json", b"{}")
@example("tokenizer_config.json", b"[]")
@example(SAFE, b"\xff" * 8)
@example(SAFE, 0.99)
def test_any_file_cut_off_or_replaced_loads_or_is_refused(folder: Path, name: str, content: float | bytes) -> None:
    whole = (DEMO_MODEL / name).read_bytes()
    (folder / name).write_bytes(whole[: int(content * len(whole))] if isinstance(content, float) else content)
    try:
        result_or_sentence(lambda: load(folder))
    finally:
        (folder / name).write_bytes(whole)


@settings(few, max_examples=25)
@given(st.sampled_from(sorted(json.loads((DEMO_MODEL / "config.json").read_text()))), JSON)
@example("num_attention_heads", 0)
@example("hidden_size", "big")
@example("hidden_size", 24)
@example("hidden_act", "system('touch ran')")
@example("dtype", "zzz")
@example("architectures", 3)
@example("vocab_size", 10)
@example("head_dim", -1)
def test_any_value_in_a_config_loads_or_is_refused(folder: Path, name: str, value: Any) -> None:
    content = (DEMO_MODEL / "config.json").read_text()
    change_config(folder, **{name: value})
    try:
        result_or_sentence(lambda: load(folder))
    finally:
        (folder / "config.json").write_text(content)


def pickle_weights(folder: Path, **more: Any) -> None:
    """Leave the weights in a pickle file alone."""
    torch.save({**load_file(folder / SAFE), **more}, folder / "pytorch_model.bin")
    (folder / SAFE).unlink()


@pytest.mark.parametrize(
    ("size", "value"), [("num_hidden_layers", 10**9), ("n_layer", 2000), ("vocab_size", 50_000_000)]
)
def test_sizes_that_the_files_cannot_have_are_refused_before_a_model_is_built(
    folder: Path, size: str, value: int
) -> None:
    config = json.loads((folder / "config.json").read_text())
    for changed in ({**config, size: value}, {**config, "text_config": {size: value}}):
        (folder / "config.json").write_text(json.dumps(changed))
        said = refusal(lambda: check_model(Settings(model=str(folder), dataset=["x"]), RUNTIME))
        assert f"config.json has {size} {value:,}, but the weight files hold only" in said
    # What some configs say beside the number of layers.
    (folder / "config.json").write_text(json.dumps({**config, "max_window_layers": 900}))
    check_model(Settings(model=str(folder), dataset=["x"]), RUNTIME)


def normalize_with(folder: Path, charsmap: bytes) -> None:
    """Give the tokenizer a normalizer of these bytes, which its library in Rust reads without checking them."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}
    path.write_text(json.dumps(content))


def test_a_tokenizer_that_panics_is_refused_when_it_is_loaded_or_used(folder: Path) -> None:
    normalize_with(folder, b"\xff\0\0\0" + b"\xff" * 300)
    for read in (lambda: load(folder), lambda: load_tokenizer(Settings(model=str(folder)))):
        assert "loaded: a library in Rust panicked (Precompiled: Error(" in refusal(read)
    normalize_with(folder, b"\x04\0\0\0abcdefgh")
    encoder = Encoder(load_tokenizer(Settings(model=str(folder))), supervise_all=True)
    said = refusal(lambda: encode_row(encoder, to_example({"text": "Hello."}), 64))
    assert "the model's tokenizer cannot tokenize the row: a library in Rust panicked (index out of bounds: " in said


def test_pickles_are_refused_unless_asked_for_and_never_executed(folder: Path, tmp_path: Path) -> None:
    assert load(folder, use_safetensors=False) is not None
    pickle_weights(folder)
    message = refusal(lambda: load(folder))
    assert "has its weights in pickle files" in message and "--no_use_safetensors" in message
    assert load(folder, use_safetensors=False) is not None
    shutil.copy(DEMO_MODEL / SAFE, folder / SAFE)
    pickle_weights(folder, evil=Touch(tmp_path / "ran"))
    for safe in (True, False):
        refusal(lambda safe=safe: load(folder, use_safetensors=safe))
    assert not (tmp_path / "ran").exists()


def own_architecture(folder: Path) -> None:
    change_config(folder, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})


def known_architecture(folder: Path) -> None:
    change_config(folder, auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})


def own_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    changed = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


@pytest.mark.parametrize("where", [own_architecture, known_architecture, own_tokenizer])
def test_code_that_comes_with_a_model_is_not_run(folder: Path, tmp_path: Path, where: Callable[[Path], None]) -> None:
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    where(folder)
    result_or_sentence(lambda: load(folder))
    if where is own_architecture:
        assert "trust_remote_code" in refusal(lambda: load(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kept", [0.0, 0.5])
def test_a_truncated_pickle_is_refused_before_it_is_loaded(folder: Path, kept: float) -> None:
    pickle_weights(folder)
    path = folder / "pytorch_model.bin"
    os.truncate(path, int(path.stat().st_size * kept))
    assert f"{path.name} is truncated; download it again." in refusal(
        lambda: check_folder(folder, safetensors_only=False)
    )


def test_a_pickle_of_an_old_torch_is_read(folder: Path) -> None:
    torch.save(load_file(folder / SAFE), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (folder / SAFE).unlink()
    load(folder, use_safetensors=False)


def test_a_sharded_checkpoint_as_a_model_is_told_how_to_become_one(folder: Path) -> None:
    (folder / "weights").mkdir()
    (folder / SAFE).rename(folder / "weights" / "shard-00000-of-00002.safetensors")
    message = refusal(lambda: check_folder(folder, safetensors_only=True))
    assert f"python -m unsloth_ddp.export {folder} --to merged" in message and "go on with the run" in message
