"""Shards of weights and optimizer: written by each rank, read by any number of ranks, and by torch's own reader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.ranks import run_ranks
from unsloth_ddp.checkpoints import sharded_state
from unsloth_ddp.checkpoints.shards import MissingTensor, Shards, write_shards
from unsloth_ddp.distributed.ranks import Ranks, ranks_from_environment

# Sizes that neither two nor four ranks divide; the last is a single row, of which most ranks hold nothing.
SHAPES = {"first": (7, 3), "second": (10, 7), "third": (1, 10)}


def network(seed: int) -> torch.nn.Module:
    """Three layers without a bias, the second one frozen."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential()
    for name, (out, into) in SHAPES.items():
        model.add_module(name, torch.nn.Linear(into, out, bias=False))
    model.get_submodule("second").weight.requires_grad_(False)  # type: ignore[union-attr]
    return model


def sharded(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The network and its optimizer as this rank holds them; whole, in a job of one process."""
    from torch.distributed.fsdp import fully_shard

    model = network(seed)
    if torch.distributed.is_initialized():
        for layer in [*model.children(), model]:
            fully_shard(layer)
    return model, torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step whose rows all ranks see."""
    torch.manual_seed(5)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(tensor: Any) -> torch.Tensor:
    """The whole tensor of which each rank holds a part."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that training changes."""
    found = {name: whole(weight) for name, weight in model.named_parameters()}
    for name, weight in model.named_parameters():
        found |= {f"{name}.{key}": whole(value) for key, value in optimizer.state.get(weight, {}).items()}
    return found


def start() -> Ranks:
    """Form the group of a job with several ranks."""
    ranks = ranks_from_environment()
    if ranks.world_size > 1:
        torch.distributed.init_process_group("gloo")
    return ranks


def save(folder: str) -> None:
    """Train two steps, save, train one more; keep what both points came to."""
    ranks = start()
    model, optimizer = sharded(seed=0)
    for _ in range(2):
        step(model, optimizer)
    checkpoint = Path(folder)
    sharded_state.save_weights(checkpoint, model, ranks.rank, ranks.world_size)
    sharded_state.save_optimizer(checkpoint, model, optimizer, ranks.rank, ranks.world_size, lambda write: write())
    saved = state_of(model, optimizer)
    step(model, optimizer)
    if ranks.is_main:
        torch.save((saved, state_of(model, optimizer)), checkpoint / "expected")
    else:
        state_of(model, optimizer)


def load(folder: str) -> None:
    """Load into another network, and train one more step, exactly as before."""
    ranks = start()
    checkpoint = Path(folder)
    saved, later = torch.load(checkpoint / "expected", weights_only=True)
    model, optimizer = sharded(seed=1)
    optimizer.param_groups[0]["lr"] = 7.0
    sharded_state.load_weights(checkpoint, model)
    sharded_state.load_optimizer(checkpoint, model, optimizer, ranks.rank, ranks.world_size)
    for expected, exact in ((saved, True), (later, False)):
        found = state_of(model, optimizer)
        assert found.keys() == expected.keys()
        for name in found.keys() - {"second.weight"}:
            if exact:
                assert torch.equal(found[name], expected[name]), name
            else:
                # The frozen weight of the other network is not loaded, so that the step below begins as before.
                torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7, msg=name)
        if exact:
            with torch.no_grad():
                second: Any = dict(model.named_parameters())["second.weight"]
                _copy_whole(second, saved["second.weight"])
            step(model, optimizer)


def _copy_whole(weight: Any, values: torch.Tensor) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if isinstance(weight, DTensor):
        values = distribute_tensor(values, weight.device_mesh, weight.placements)
    weight.copy_(values)


def save_and_load_packed(folder: str) -> None:
    """Save an optimizer that also has state of a form of its own on each rank, and load it."""
    ranks = start()
    model, optimizer = sharded(seed=0)
    step(model, optimizer)
    for state in optimizer.state.values():
        state["scales"] = torch.full((2,), float(ranks.rank))
    sharded_state.save_optimizer(Path(folder), model, optimizer, ranks.rank, ranks.world_size, lambda write: write())
    torch.distributed.barrier()
    again, other = sharded(seed=1)
    sharded_state.load_optimizer(Path(folder), again, other, ranks.rank, ranks.world_size)
    assert len(other.state) == 2
    assert all(state["scales"].tolist() == [float(ranks.rank)] * 2 for state in other.state.values())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The shards of a job of so many ranks."""
    made: dict[int, Path] = {}

    def make(ranks: int) -> Path:
        if ranks not in made:
            folder = tmp_path_factory.mktemp(f"shards-{ranks}")
            run_ranks(ranks, save, str(folder), folder=folder / "out").check()
            made[ranks] = folder
        return made[ranks]

    return make


@pytest.mark.parametrize(("wrote", "reads"), [(2, 2), (2, 4), (4, 2), (2, 1)])
def test_any_number_of_ranks_reads_what_another_wrote(checkpoint, tmp_path, wrote, reads):
    run_ranks(reads, load, str(checkpoint(wrote)), folder=tmp_path).check()


def test_every_rank_writes_its_own_part_and_frozen_weights_stay_out(checkpoint):
    folder = checkpoint(2)
    expected = torch.load(folder / "expected", weights_only=True)[0]
    one, other = (load_file(folder / "weights" / f"shard-0000{rank}-of-00002.safetensors") for rank in (0, 1))
    assert one.keys() == {"first.weight", "third.weight"}
    assert other.keys() == {"first.weight"}
    assert torch.equal(torch.cat([one["first.weight"], other["first.weight"]]), expected["first.weight"])
    optimizer = load_file(folder / "optimizer" / "shard-00001-of-00002.safetensors")
    assert optimizer.keys() == {"first.weight.exp_avg", "first.weight.exp_avg_sq"}


def test_state_of_a_form_of_its_own_is_read_by_as_many_ranks_only(tmp_path):
    run_ranks(2, save_and_load_packed, str(tmp_path), folder=tmp_path / "out").check()
    with pytest.raises(MissingTensor, match="can be read by as many processes as wrote it only"):
        sharded_state.load_optimizer(tmp_path, *sharded(seed=1), 0, 1)


def test_shards_are_read_whole_without_a_process_group(checkpoint):
    folder = checkpoint(4)
    expected = torch.load(folder / "expected", weights_only=True)[0]
    shards = Shards(folder / "weights")
    assert sorted(shards.names) == ["first.weight", "third.weight"]
    for name in shards.names:
        assert torch.equal(shards.whole(name), expected[name])


def test_a_weight_that_was_not_saved_is_named(checkpoint, tmp_path):
    shards = Shards(checkpoint(2) / "weights")
    with pytest.raises(MissingTensor, match=r"holds no fourth\.weight"):
        shards.read_into({"fourth.weight": torch.zeros(1)})
    with pytest.raises(MissingTensor, match=r"first\.weight in .* is \[7, 3\] and not \[3, 7\]"):
        shards.read_into({"first.weight": torch.zeros(3, 7)})
    for rank in (0, 2, 3):
        name = f"shard-0000{rank}-of-00004.safetensors"
        shutil.copy(checkpoint(4) / "weights" / name, tmp_path / name)
    with pytest.raises(MissingTensor, match=r"holds only a part of first\.weight"):
        Shards(tmp_path).whole("first.weight")
    (tmp_path / "shard-00000-of-00004.safetensors").write_bytes(b"nothing")
    with pytest.raises(MissingTensor, match="cannot be read"):
        Shards(tmp_path)


def test_no_number_changes_in_any_type_or_shape(tmp_path):
    tensors = {
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "turned": torch.arange(6, dtype=torch.float16).reshape(2, 3).T,
        "flags": torch.tensor([True, False, True]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "double": torch.tensor([0.1, float("nan"), float("inf")], dtype=torch.float64),
    }
    path = write_shards(tmp_path, tensors, 0, 1)
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].nan_to_num(7), tensor.nan_to_num(7)), name
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["DCP_SHARDING_INFO"])["turned"] == {"saved_offsets": [0, 0]}
