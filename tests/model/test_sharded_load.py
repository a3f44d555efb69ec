"""Load small models in shards on two processes: the weights and step of DDP, only own parts, and bad input."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from tests.conftest import DEMO_MODEL
from tests.peak_memory import PeakMemory
from tests.ranks import run_ranks
from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.ranks import ranks_from_environment
from unsloth_ddp.distributed.runtime import Runtime, started
from unsloth_ddp.model.files import identity
from unsloth_ddp.model.files.identity import describe_model, first_difference
from unsloth_ddp.model.forward.supervised_head import fits_fused_head
from unsloth_ddp.model.loading import load, sharded_load, whole_model
from unsloth_ddp.model.loading.load import load_model, parameter_counts
from unsloth_ddp.model.modules import base_model
from unsloth_ddp.model.packing import varlen
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.memory_limits import BYTES_PACKED

FSDP2 = {"UNSLOTH_FSDP2": "1"}
# Ranks, and what makes of four of them two copies of two parts.
LAYOUTS = pytest.mark.parametrize(
    ("ranks", "environ"),
    [
        pytest.param(2, FSDP2, id="fsdp2"),
        pytest.param(4, {**FSDP2, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, id="hybrid", marks=pytest.mark.slow),
    ],
)
MIB = 2**20


def settings_for(model: Path | str, **options: Any) -> Settings:
    return Settings(model=str(model), dataset=["d"], use_cpu=True, seed=5, **options)


@contextlib.contextmanager
def two_runtimes(settings: Settings) -> Iterator[tuple[Runtime, Runtime]]:
    """Yield the runtime of this rank with FSDP2, and the same without sharding."""
    with started(settings, ranks_from_environment()) as runtime:
        runtime.backend = "transformers"
        yield runtime, Runtime(runtime.ranks, "transformers", "cpu", "fp32", "CPU")


def saved_moe(folder: Path) -> Path:
    """Save a model with untied embeddings and three experts a layer, each a tensor of its own, in several files."""
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "vocab_size": 883, "tie_word_embeddings": False}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts))
    model.save_pretrained(folder, max_shard_size="100KB")
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def bits(tensor: Any) -> torch.Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().contiguous().flatten().view(torch.uint8)


def sgd_steps(model: Any, *, average: bool) -> list[float]:
    # The trial of packed rows comes before the first step, which has to be the first use of a sharded model.
    assert average or varlen.obstacle(base_model(model)) is None
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    ids = torch.arange(1, 33).view(2, 16) + 40 * dist.get_rank()
    losses = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        for parameter in trained:
            # What DDP does.
            if average and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(settings: Settings, runtimes: tuple[Runtime, Runtime]) -> None:
    """Load both ways; weights are equal to the bit, and so is the step to fp32's precision."""
    (parts, _), (whole, _) = (load_model(settings, runtime) for runtime in runtimes)
    assert parameter_counts(parts) == parameter_counts(whole)
    ours, theirs = dict(parts.named_parameters()), dict(whole.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert weight.requires_grad == theirs[name].requires_grad
        assert weight.to_local().numel() <= weight.numel() // 2 + weight.numel() // weight.shape[0]
        assert torch.equal(bits(weight), bits(theirs[name].data)), name
    for name, buffer in parts.named_buffers():
        assert torch.equal(buffer, dict(whole.named_buffers())[name]), name
    for one, other in zip(sgd_steps(parts, average=False), sgd_steps(whole, average=True), strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    for name, weight in ours.items():
        if weight.requires_grad:
            assert torch.allclose(weight.full_tensor(), theirs[name], rtol=0, atol=1e-6), name


def load_both_ways(moe: str) -> None:
    full = settings_for(DEMO_MODEL, method="full")
    with two_runtimes(full) as runtimes:
        # The demo's 883 tokens do not divide by two, and its output head is tied.
        compare(full, runtimes)
        # A rank has empty parts of these adapters.
        compare(settings_for(DEMO_MODEL, lora_r=1), runtimes)
        compare(settings_for(moe, lora_target_modules=["q_proj"], lora_modules_to_save=["embed_tokens"]), runtimes)
        heads = {}
        for trained, options in {
            "": {},
            "beside adapters": {"lora_modules_to_save": ["lm_head"]},
            "with all": {"method": "full"},
        }.items():
            heads[trained] = fits_fused_head(load_model(settings_for(moe, **options), runtimes[0])[0])
        assert heads == {"": True, "beside adapters": False, "with all": True}
        # A weight that is not where its mesh computes, as with FSDP2's CPU offload.
        for kept, options in {True: settings_for(DEMO_MODEL), False: settings_for(moe)}.items():
            model, _ = load_model(options, runtimes[0])
            head = base_model(model).get_output_embeddings()
            away = torch.nn.Parameter(head.weight.detach().to("meta"), requires_grad=False)
            for end in (head, base_model(model).get_input_embeddings()) if kept else (head,):
                end.weight = away
            assert away.device.type == "meta" and fits_fused_head(model) is kept
        sixteen = dataclasses.replace(runtimes[0], precision="bf16")
        for asked, kept in {"bf16": torch.bfloat16, "fp32": torch.float32}.items():
            model, _ = load_model(settings_for(DEMO_MODEL, method="full", full_weights=asked), sixteen)
            losses = sgd_steps(model, average=False)
            assert {weight.dtype for weight in model.parameters()} == {kept} and losses[1] < losses[0]
        # As for weights that upstream cuts out of fused ones.
        sharded_load.SPLITTABLE = ()
        compare(settings_for(moe, method="full"), runtimes)


@LAYOUTS
def test_weights_buffers_and_steps_are_those_of_ddp(tmp_path: Path, ranks: int, environ: dict[str, str]) -> None:
    moe = saved_moe(tmp_path / "moe")
    run_ranks(ranks, load_both_ways, str(moe), folder=tmp_path / "out", environ=environ).check()


def load_packed(folder: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    settings = settings_for(DEMO_MODEL, method="qlora")
    with two_runtimes(settings) as runtimes:
        for model in (DEMO_MODEL, folder):
            if model == folder and dist.get_rank() == 0:
                packing = BitsAndBytesConfig(
                    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
                )
                AutoModelForCausalLM.from_pretrained(DEMO_MODEL, quantization_config=packing).save_pretrained(folder)
                AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(folder)
            runtimes[0].barrier()
            settings = settings_for(model, method="qlora")
            parts, whole = (load_model(settings, runtime)[0] for runtime in runtimes)
            for one in parts, whole:
                for parameter in one.parameters():
                    if parameter.requires_grad:
                        # The parts have this dtype already; TRL gives it to the whole model.
                        parameter.data = parameter.data.to(torch.bfloat16)
            assert parameter_counts(parts) == parameter_counts(whole)
            theirs = dict(whole.named_parameters())
            for name, weight in parts.named_parameters():
                assert torch.equal(bits(weight), bits(theirs[name].data)), name
            found, expected = sgd_steps(parts, average=False), sgd_steps(whole, average=True)
            # Four ranks add their gradients in another order than DDP, which bf16 adapters round.
            assert found == (expected if runtimes[0].copies == 1 else pytest.approx(expected, rel=1e-3))
        # PEFT keeps in fp32 what is not packed, and FSDP2 would gather it in 16 bit all the same.
        sixteen = dataclasses.replace(runtimes[0], precision="bf16")
        model, _ = load_model(settings_for(DEMO_MODEL, method="qlora", precision="bf16"), sixteen)
        assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


@pytest.mark.slow
@LAYOUTS
def test_4_bit_weights_are_packed_whole_and_kept_in_parts(tmp_path: Path, ranks: int, environ: dict[str, str]) -> None:
    run_ranks(ranks, load_packed, str(tmp_path / "packed"), folder=tmp_path / "out", environ=environ).check()


def load_large(model: str, mebibytes: float) -> None:
    settings = settings_for(model, lora_target_modules=["q_proj"], lora_r=1)
    with started(settings, ranks_from_environment()) as runtime:
        runtime.backend = "transformers"
        load_model(settings_for(DEMO_MODEL), runtime)  # what libraries keep from their first use
        with PeakMemory(files=True) as peak:
            model, _ = load_model(settings, runtime)
            # On a CPU a part may be a view of the mapped file, which is read when it is used.
            total = sum(weight.to_local().sum().item() for weight in model.parameters())
        print(peak.grown, mebibytes, total)
        assert mebibytes * 0.4 < peak.grown / MIB < mebibytes * 0.5 + 30


@pytest.mark.slow
def test_a_rank_reads_and_keeps_its_own_part_only(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "vocab_size": 10_000}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, tie_word_embeddings=False))
    model.save_pretrained(tmp_path / "m", max_shard_size="60MB")
    AutoTokenizer.from_pretrained(DEMO_MODEL).save_pretrained(tmp_path / "m")
    mebibytes = sum(p.numel() * 4 for p in model.parameters()) / MIB
    run_ranks(2, load_large, str(tmp_path / "m"), mebibytes, folder=tmp_path / "out", environ=FSDP2).check()


# ---- bad input: the same sentence on both ranks, of which each stands for a node with a disk of its own ----


def say_refusals(folder: str) -> None:
    with started(settings_for(DEMO_MODEL), ranks_from_environment()) as runtime:
        runtime.backend = "transformers"
        # Each process stands for a node.
        runtime.ranks = dataclasses.replace(runtime.ranks, local_rank=0, local_world_size=1)
        for name, (_, _, options, _) in REFUSED.items():
            os.chdir(Path(folder) / name / f"node_{runtime.ranks.rank}")
            with pytest.MonkeyPatch.context() as patch:
                if name == "loaded_whole":
                    patch.setattr(load, "loads_in_shards", lambda *_, **__: False)
                if name == "one_rank" and runtime.ranks.rank == 1:
                    patch.setattr(sharded_load, "_check_read", refuse)
                if name == "no_layers":
                    patch.setattr(LlamaPreTrainedModel, "_no_split_modules", None)
                with pytest.raises(UserError) as refused:
                    load_model(settings_for("./m", **options), runtime)
            print(f"{name}: {refused.value}")


def refuse(*_: Any, **__: Any) -> None:
    raise UserError("this rank refuses")


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def other_dtype(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: t.half() for name, t in load_file(path).items()}, path, {"format": "pt"})


def other_values(folder: Path) -> None:
    """Write another fine-tune of the model: the header is the same, and so is the beginning."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 100_000] = bytes(100_000)
    path.write_bytes(content)


def absent_tensor(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {"model.norm.weight": "a.safetensors", "nosuch": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def no_file(folder: Path) -> None:
    absent_tensor(folder)
    (folder / "a.safetensors").unlink()


def other_sizes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 884}))


# What is done to the files, on which nodes, the options, and the sentence.
REFUSED: dict[str, tuple[Any, list[int], dict[str, Any], str]] = {
    "cut": (cut, [1], {}, "model m: model.safetensors is damaged"),
    "other_dtype": (
        other_dtype,
        [1],
        {},
        "model.safetensors on .*rank 1.* differs from that on .*rank 0.*; each rank reads",
    ),
    "other_values": (other_values, [1], {}, "model.safetensors on .*rank 1.* differs from that on .*rank 0"),
    "loaded_whole": (other_values, [1], {}, "model.safetensors on .*rank 1.* differs from that on .*rank 0"),
    "absent_tensor": (absent_tensor, [0, 1], {}, "json lists nosuch in a.safetensors, which does not contain it"),
    "no_file": (no_file, [1], {}, "a.safetensors is missing, which model.safetensors.index.json lists"),
    "other_sizes": (other_sizes, [0, 1], {}, "the sizes of its weights differ from its config.json"),
    "no_layers": (None, [], {}, r"FSDP2 cannot shard LlamaForCausalLM: .*\(_no_split_modules\); give .*_cls_to_wrap"),
    "one_rank": (None, [], {}, "this rank refuses"),
    "shared": (
        None,
        [],
        {"lora_modules_to_save": ["embed_tokens"]},
        "FSDP2 cannot shard the weight that .*lm_head.* share",
    ),
}


def test_a_model_that_cannot_be_loaded_is_refused_alike_on_every_rank(tmp_path: Path) -> None:
    for name, (damage, nodes, _, _) in REFUSED.items():
        for node in range(2):
            shutil.copytree(DEMO_MODEL, tmp_path / name / f"node_{node}" / "m")
            if node in nodes:
                damage(tmp_path / name / f"node_{node}" / "m")
    result = run_ranks(2, say_refusals, str(tmp_path), folder=tmp_path / "out", environ=FSDP2).check()
    first, second = (
        {line.partition(": ")[0]: line for line in output.splitlines() if line.partition(": ")[0] in REFUSED}
        for output in result.outputs
    )
    assert first == second
    for name, (_, _, _, sentence) in REFUSED.items():
        assert re.search(sentence, first[name]), first[name]


def test_the_first_file_that_differs_is_named() -> None:
    assert first_difference({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) is None
    assert first_difference({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == "b"
    assert first_difference({"a": "1"}, {"a": "1", "c": "3"}) == "c"


def test_little_of_large_files_is_read_for_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        (tmp_path / f"model-{number}.safetensors").touch()
        os.truncate(tmp_path / f"model-{number}.safetensors", 2**32)
    (tmp_path / "config.json").write_text("{}")
    # As on file systems whose blocks have a megabyte.
    monkeypatch.setattr(Path, "open", lambda path, mode, buffering=2**20: open(path, mode, buffering))  # noqa: SIM115
    monkeypatch.setattr(identity, "check_folder", lambda *_, **__: None)
    before = bytes_read()
    assert len(describe_model(settings_for(str(tmp_path)))) == 21
    assert bytes_read() - before < 1100 * 2**16


def bytes_read() -> int:
    with open("/proc/self/io") as file:
        return int(re.findall(r"rchar: (\d+)", file.read())[0])


def test_a_weight_file_that_was_not_downloaded_is_compared_too(tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "m")
    pointer = tmp_path / "m" / "consolidated.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\n")
    found = describe_model(settings_for(str(tmp_path / "m")))
    assert found[pointer.name].startswith("43 bytes, ")


# ---- Unsloth, which loads the whole model first ----


def test_bytes_of_a_whole_model_follow_the_method() -> None:
    tensors = [
        ("model.embed_tokens.weight", "BF16", [100, 10]),
        ("q.weight", "F32", [10, 10]),
        ("norm.weight", "BF16", [10]),
    ]
    assert whole_model.whole_bytes(tensors, 2, packs=False) == 2 * 1110
    assert whole_model.whole_bytes(tensors, 2, packs=True) == pytest.approx(2 * 1010 + 100 * BYTES_PACKED)
    assert whole_model.whole_bytes([("q.weight", "U8", [50, 1])], 2, packs=True) == 50
    # 966,144 values: trained ones are kept in fp32, and a quarter lies beside them while they are split.
    assert whole_model.bytes_while_loading(settings_for(DEMO_MODEL, method="full"), 4) == 966_144 * 4 * 5 // 4
    assert whole_model.bytes_while_loading(settings_for("./nosuch"), 4) is None


def test_the_hub_is_asked_for_sizes_only_where_files_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a download that was interrupted: the index is there, and one of its files."""
    asked: list[str] = []
    snapshot = saved_moe(tmp_path / "moe")
    monkeypatch.setattr(whole_model, "model_folder", lambda _: snapshot)
    monkeypatch.setattr(
        "huggingface_hub.get_safetensors_metadata",
        lambda name, revision: SimpleNamespace(files_metadata={}) if not asked.append(name) else None,
    )
    complete = whole_model.read_tensors(settings_for("owner/moe"))
    assert not asked and len(complete) > 20
    shutil.copy(next(snapshot.glob("model-*.safetensors")), snapshot / "consolidated.safetensors")
    assert whole_model.read_tensors(settings_for("owner/moe")) == complete
    (snapshot / "consolidated.safetensors").unlink()
    next(snapshot.glob("model-*.safetensors")).unlink()
    assert len(whole_model.read_tensors(settings_for("owner/moe"))) < len(complete)
    assert asked == ["owner/moe"]
