"""The manifest: read whatever stands there, find every damage, compare two runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unsloth_ddp.checkpoints import manifest, resume_point
from unsloth_ddp.checkpoints.identity import trained_identity
from unsloth_ddp.checkpoints.manifest import Damaged, Manifest
from unsloth_ddp.checkpoints.writer import to_remove
from unsloth_ddp.config.options import Settings
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.versions import versions

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)
names = st.from_regex(r"[a-z_][a-z0-9_.]{0,20}(/[a-z_][a-z0-9_]{0,10}){0,2}", fullmatch=True)
manifests = st.builds(
    Manifest,
    step=st.integers(0, 10**9),
    run=st.dictionaries(st.text(), values),
    versions=st.dictionaries(st.text(), st.text()),
    files=st.dictionaries(names, st.tuples(st.integers(0, 2**60), st.text(max_size=32))),
)


@given(manifests)
def test_a_manifest_is_read_as_it_was_written(written):
    assert manifest.from_text(written.to_text()) == written


@given(manifests, st.data())
def test_a_manifest_cut_short_or_changed_is_damaged(written, data):
    text = written.to_text().rstrip()
    cut = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(Damaged):
        manifest.from_text(text[:cut])
    content = json.loads(text)
    content["step"] += 1
    with pytest.raises(Damaged, match="own checksum"):
        manifest.from_text(json.dumps(content))


@given(
    st.text()
    | values.map(json.dumps)
    | st.dictionaries(st.sampled_from(["format", "step", "files"]), values).map(json.dumps)
)
def test_anything_else_is_damaged(text):
    with pytest.raises(Damaged):
        manifest.from_text(text)


def test_deep_nesting_is_damaged():
    with pytest.raises(Damaged, match="not JSON"):
        manifest.from_text("[" * 200_000)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "", "a\0b"])
def test_a_manifest_never_points_outside_its_folder(name):
    with pytest.raises(Damaged, match="not a file of this folder"):
        manifest.from_text(Manifest(1, {}, {}, {name: (1, "x")}).to_text())


@pytest.mark.parametrize(
    ("field", "value"), [("step", -1), ("step", True), ("run", []), ("versions", 3), ("files", {"a": 1})]
)
def test_values_of_the_wrong_type_are_damaged(field, value):
    content = json.loads(Manifest(1, {}, {}, {}).to_text())
    del content["checksum"]
    content[field] = value
    content["checksum"] = manifest._checksum_of(content)
    with pytest.raises(Damaged, match=r"wrong type|lacks a part"):
        manifest.from_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A complete checkpoint of three files."""
    path = tmp_path / "checkpoint-3"
    (path / "global_step3").mkdir(parents=True)
    (path / "trainer_state.json").write_text('{"global_step": 3}')
    (path / "optimizer.pt").write_bytes(bytes(range(256)) * 40_000)
    (path / "global_step3" / "rank_0.pt").write_bytes(b"shard")
    text = Manifest(3, {}, {}, manifest.describe_files(path)).to_text()
    (path / manifest.FILE_NAME).write_text(text)
    return path


def test_a_whole_checkpoint_is_whole(folder):
    assert manifest.verify(folder).files.keys() == {"trainer_state.json", "optimizer.pt", "global_step3/rank_0.pt"}


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def link_elsewhere(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    (path.parent.parent / "elsewhere").write_bytes(content)
    path.symlink_to(path.parent.parent / "elsewhere")


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("damage", "name", "reason"),
    [
        (Path.unlink, "manifest.json", "no manifest.json"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "manifest.json", "cannot be read"),
        (lambda path: path.write_text(""), "manifest.json", "not JSON"),
        (Path.unlink, "optimizer.pt", "optimizer.pt is missing"),
        (lambda path: path.write_bytes(b""), "optimizer.pt", "optimizer.pt has 0 bytes instead of 10,240,000"),
        (change_a_byte, "optimizer.pt", "content of optimizer.pt"),
        (change_a_byte, "global_step3/rank_0.pt", "content of global_step3/rank_0.pt"),
        (link_elsewhere, "optimizer.pt", "optimizer.pt is missing"),
        (replace_by_pipe, "manifest.json", "manifest.json cannot be read: it is not a file"),
        (replace_by_device, "manifest.json", "manifest.json cannot be read: it is not a file"),
        (lambda path: os.truncate(path, 1 << 40), "manifest.json", "cannot be read: it has over 67,108,864 bytes"),
    ],
)
def test_every_damage_is_found_and_named(folder, damage, name, reason):
    damage(folder / name)
    with pytest.raises(Damaged, match=reason):
        manifest.verify(folder)


@pytest.mark.parametrize("optimizer", [
    "optimizer.pt", "optimizer.bin", "optimizer_0/__0_0.distcp",
    "global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
])  # fmt: skip
@pytest.mark.parametrize("rng", ["rng_state.pth", "rng_state_0.pth"])
def test_the_state_of_a_run_is_known_by_every_name_and_missed_by_one(optimizer, rng):
    files = ["adapter_model.safetensors", "trainer_state.json", optimizer, "scheduler.pt", rng]
    assert manifest.missing_state(files) is None
    for left_out, name in ((optimizer, "optimizer.pt"), ("scheduler.pt", "scheduler.pt"), (rng, "rng_state.pth")):
        assert manifest.missing_state([file for file in files if file != left_out]) == name


@pytest.mark.parametrize("resume", ["auto", "{folder}"])
def test_no_run_goes_on_from_weights_alone(folder, resume):
    with pytest.raises(UserError, match=r"checkpoint-3 holds no scheduler\.pt, so a run cannot resume from it"):
        resume_point._find(Settings(resume=resume.format(folder=folder)), folder.parent, continues=True)
    assert folder.is_dir()


def test_the_newest_whole_checkpoint_is_taken_and_damaged_ones_are_named():
    found = {step: Path(f"checkpoint-{step}") for step in (9, 10, 100)}

    def read(path: Path) -> str:
        if path.name != "checkpoint-9":
            raise Damaged(f"{path.name} is torn")
        return "whole"

    assert manifest.newest(found, read) == (
        (found[9], "whole"),
        [(found[100], "checkpoint-100 is torn"), (found[10], "checkpoint-10 is torn")],
    )
    assert manifest.newest({100: found[100]}, read)[0] is None


FACTS = {
    "model": "m",
    "seed": 1,
    "learning_rate": 0.1,
    "lr_scheduler_type": "linear",
    "global_batch_size": 8,
    "data": "a",
    "world_size": 2,
    "sharding": "none",
}


def test_equal_runs_have_nothing_to_say():
    assert manifest.compare_runs(FACTS, FACTS) == manifest.Comparison()


@pytest.mark.parametrize(
    ("change", "part", "text"),
    [
        ({"global_batch_size": 16}, "refused", "global_batch_size 8 -> 16"),
        ({"data": "b"}, "refused", "data a -> b"),
        ({"seed": 2}, "refused", "seed 1 -> 2"),
        ({"lr_scheduler_type": "cosine"}, "refused", "lr_scheduler_type linear -> cosine"),
        ({"world_size": 4}, "reported", "world_size 2 -> 4"),
        ({"sharding": "zero2"}, "impossible", "sharding none -> zero2"),
        ({"offload": "parameters"}, "impossible", "offload none -> parameters"),
    ],
)
def test_a_change_is_refused_or_said_with_both_values(change, part, text):
    found = manifest.compare_runs(FACTS, {**FACTS, **change})
    assert [sentence.split(":")[0] for sentence in getattr(found, part)] == [text]
    assert sum(map(len, (found.impossible, found.refused, found.reported))) == 1


def test_a_checkpoint_of_other_trained_weights_cannot_be_resumed():
    before = {**FACTS, "trained": "28 tensors (a)", "lora_r": 16}
    assert manifest.compare_runs(before, {**before}) == manifest.Comparison()
    (text,) = manifest.compare_runs(before, {**before, "trained": "28 tensors (b)", "lora_r": 8}).impossible
    assert text.startswith("other weights are trained than before (lora_r 16 -> 8), ")
    (text,) = manifest.compare_runs(before, {**before, "trained": "7 tensors (b)"}).impossible
    assert "(28 tensors (a) -> 7 tensors (b))" in text
    # Earlier releases did not keep it.
    assert manifest.compare_runs(FACTS, {**FACTS, "trained": "7 tensors (b)"}) == manifest.Comparison()


def test_trained_weights_are_known_by_names_and_shapes_whoever_holds_them():
    def described(model):
        return trained_identity(model)["trained"]

    model, same, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2), torch.nn.Linear(3, 4)
    assert described(model) == described(same) != described(other)
    assert described(torch.nn.Sequential(model)) != described(model)
    # ZeRO-3 keeps the shape of a weight that lies elsewhere.
    same.weight.ds_shape, same.weight.data = same.weight.shape, torch.empty(0)
    assert described(same) == described(model)
    same.weight.requires_grad_(False)
    assert described(same).startswith("1 tensors") and described(same) != described(model)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (
            {"learning_rate": 0.1, "optim": "a"},
            {"learning_rate": 0.2, "optim": "b"},
            "learning_rate 0.1 -> 0.2, optim a -> b:",
        ),
        ({"trainer_args": {}}, {"trainer_args": {"adam_beta2": 0.9}}, "adam_beta2 default -> 0.9:"),
        ({"trainer_args": {"optim_args": "x"}}, {"trainer_args": {"seed": 1}}, "optim_args x -> default:"),
        ({"trainer_args": {"adam_beta2": 0.9}}, {"trainer_args": {"adam_beta2": 0.9, "x": 1}}, None),
        ({"lr_scheduler_type": "linear"}, {"lr_scheduler_type": "cosine"}, None),
        (
            {"lr_scheduler_type": "linear"},
            {"lr_scheduler_type": "reduce_lr_on_plateau"},
            "lr_scheduler_type linear -> red",
        ),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {"lr_scheduler_type": "reduce_lr_on_plateau"}, None),
        ({}, {"lr_scheduler_type": "reduce_lr_on_plateau", "trainer_args": {"adam_beta2": 0.9}, "optim": "a"}, None),
    ],
)  # fmt: skip
def test_what_the_optimizers_saved_state_holds_cannot_be_changed(before, now, said):
    compared = manifest.compare_runs(before, now)
    found = compared.impossible
    assert len(found) == (said is not None)
    # Whoever asks only whether two runs are the same finds the difference too.
    assert said is None or (compared.refused and found[0].startswith(said) and "go back to the first" in found[0])


@pytest.mark.parametrize(
    ("sharding", "possible"), [("none", True), ("fsdp2", True), ("zero2", False), ("zero3", False)]
)
def test_deepspeed_checkpoints_keep_their_number_of_processes(sharding, possible):
    before = {**FACTS, "sharding": sharding}
    found = manifest.compare_runs(before, {**before, "world_size": 1})
    assert bool(found.impossible) is not possible
    assert bool(found.reported)


def test_shards_can_be_read_without_sharding_and_by_no_other_kind():
    before = {**FACTS, "sharding": "fsdp2"}
    alone = {**before, "sharding": "none", "world_size": 1}
    found = manifest.compare_runs(before, alone, shards=True)
    assert found.impossible == []
    assert found.reported == ["world_size 2 -> 1", "sharding fsdp2 -> none"]
    assert manifest.compare_runs(before, alone).impossible
    assert manifest.compare_runs(before, {**before, "sharding": "zero2"}, shards=True).impossible
    assert manifest.holds_shards(["trainer_state.json", "weights/shard-00000-of-00002.safetensors"])
    assert not manifest.holds_shards(["pytorch_model_fsdp.bin", "optimizer.bin"])


def test_known_checksums_are_not_computed_again(tmp_path):
    (tmp_path / "weights").mkdir()
    for name in ("weights/shard", "state.json"):
        (tmp_path / name).write_text(name)
    found = manifest.describe_files(tmp_path, {"weights/shard": "as its writer found it"})
    assert found["weights/shard"] == (13, "as its writer found it")
    assert found["state.json"] == manifest.describe_files(tmp_path)["state.json"]


@pytest.mark.parametrize(
    ("processes", "packing", "said"), [(16, "packs of up to 90 tokens", True), (4, "packs", False), (16, "off", False)]
)
def test_packs_that_cannot_be_shared_are_named_as_what_is_wrong(processes, packing, said):
    before = {**FACTS, "packing": "packs of up to 180 tokens"}
    found = manifest.compare_runs(
        before, {**before, "world_size": processes, "packing": packing, "global_batch_size": 16}
    )
    assert len(found.refused) == 2
    shared = "its steps hold 8 packs, which 16 processes cannot share: start as many as divide 8"
    assert found.instead == (shared if said else "go back to the first value")


def test_a_fact_that_is_not_known_yet_is_not_compared():
    assert manifest.compare_runs(FACTS, {"seed": 1}) == manifest.Comparison()


@settings(max_examples=300)
@given(st.sets(st.integers(0, 50)), st.integers(0, 50), st.none() | st.integers(0, 50), st.none() | st.integers(1, 5))
def test_the_newest_and_the_best_stay_and_the_limit_holds(others, written, best, limit):
    steps = sorted({*others, written})
    gone = to_remove(steps, written, best, limit)
    left = set(steps) - set(gone)
    assert written in left and len(set(gone)) == len(gone)
    assert best not in gone or (best is not None and best > written)
    assert max(left) == written
    if limit is not None:
        assert len(left) <= max(limit, 2)
        assert len(left) >= min(limit, len([s for s in steps if s <= written]))


@pytest.mark.parametrize(
    "name",
    ["scaler.pt", "rng_state_7.pth", "latest", "global_step9/mp_rank_00_model_states.pt", "optimizer_0/.metadata"],
)
def test_a_file_that_a_resume_would_read_and_the_run_did_not_write_is_named(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"from elsewhere")
    with pytest.raises(Damaged, match=f"it holds {name}, which its manifest does not list; remove that file"):
        manifest.verify(folder)


def test_notes_beside_a_checkpoint_do_not_matter(folder):
    for name in ("README.md", "zero_to_fp32.py", "pytorch_model.bin"):
        (folder / name).write_text("mine")
    assert manifest.verify(folder).step == 3


ZERO = [
    "trainer_state.json", "scheduler.pt", "rng_state_0.pth",
    "global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
]  # fmt: skip
SHARDED = ["trainer_state.json", "scheduler.pt", "rng_state_0.pth", "optimizer_0/__0_0.distcp", "optimizer_0/.metadata"]
PLAIN = ["trainer_state.json", "scheduler.pt", "rng_state_0.pth", "optimizer.pt"]


def checkpoint_of(run: Path, files: list[str]) -> Path:
    """Make checkpoint-3 of a run, with files of these names."""
    made = run / "checkpoint-3"
    for name in files:
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_bytes(b'{"global_step": 3}')
    described = Manifest(3, {}, {}, manifest.describe_files(made))
    (made / manifest.FILE_NAME).write_text(described.to_text())
    return made


def test_packages_that_changed_since_the_checkpoint_are_named():
    now = versions()
    same, older = (Manifest(3, {}, found) for found in (now, {**now, "torch": "2.0.1", "gone": "1\x1b[2J"}))
    assert resume_point.ResumePoint(Path("c"), same).compare({}, anyway=False) == []
    (said,) = resume_point.ResumePoint(Path("c"), older).compare({}, anyway=False)
    assert said.startswith(f"Packages changed since the checkpoint: torch 2.0.1 -> {now['torch']}, gone 1")
    assert said.endswith("-> none. Numbers may differ from those of an uninterrupted run.") and said.isprintable()


@pytest.mark.parametrize("files", [ZERO, SHARDED])
def test_a_checkpoint_from_elsewhere_that_would_be_unpickled_is_refused_unless_trusted(tmp_path, files):
    made, own = checkpoint_of(tmp_path / "theirs", files), tmp_path / "mine"
    resume = Settings(resume=str(made))
    with pytest.raises(UserError, match=r"lies outside this run's folder, and reading .* --trust_checkpoint"):
        resume_point._find(resume, own, continues=False)
    assert resume_point._find(Settings(resume=str(made), trust_checkpoint=True), own, continues=False).folder == made
    assert resume_point._find(resume, made.parent, continues=True).folder == made
    assert resume_point._find(Settings(), made.parent, continues=True).folder == made


def test_a_checkpoint_of_plain_tensors_from_elsewhere_is_resumed(tmp_path):
    made = checkpoint_of(tmp_path / "theirs", PLAIN)
    assert resume_point._find(Settings(resume=str(made)), tmp_path / "mine", continues=False).folder == made
