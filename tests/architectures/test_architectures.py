"""Today's architectures, as tiny random models: what is trained, saved and merged is right, and nothing is lost.

Each model is written as a user downloads it: in the class of the Hub, with weights that Transformers does not model,
and with processor files.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import demo_rows, write_jsonl
from tests.ranks import run_ranks, train
from tests.tiny_models import save_tiny

# model_type -> class of the checkpoint.
ALL = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "gpt_oss": "GptOssForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "llama": "LlamaForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "cohere2_vision": "Cohere2VisionForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "mllama": "MllamaForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "jamba": "JambaForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone4_5": "Exaone4_5_ForConditionalGeneration",
    "laguna": "LagunaForCausalLM",
    "glm46v": "Glm46VForConditionalGeneration",
    "mistral4": "Mistral4ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    # The newest of Transformers 5.17, by the release whose tables name them first: 5.17, 5.16, 5.15, 5.14.
    "hy_v4": "HYV4ForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "glm5_next": "Glm5NextForConditionalGeneration",
    "qwen4_exp": "Qwen4ExpForConditionalGeneration",
    "step3p7": "Step3p7ForConditionalGeneration",
    "cohere_compass": "CohereCompassForConditionalGeneration",
    "axk1": "AXK1ForCausalLM",
    "axk2": "AXK2ForCausalLM",
    "cosmos3_edge": "Cosmos3EdgeForConditionalGeneration",
    "granite_swa": "GraniteSWAForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "muse_glimmer": "MuseGlimmerForConditionalGeneration",
    "inkling_mm_model": "InklingForConditionalGeneration",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "hunyuan_vl": "HunYuanVLForConditionalGeneration",
    "zaya": "ZayaForCausalLM",
}
# One with towers, weights of MTP and layers that carry a state, and one with experts: they stand for the others.
QUICK = ("qwen3_5", "gpt_oss")
SLOW = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALL]
# Every parameter is trained where something may be frozen or lost: in classes with towers, and of the hybrid layers.
FULL = [
    one
    for name, one in zip(ALL, SLOW, strict=True)
    if "Conditional" in ALL[name] or name in ("gpt_oss", "falcon_h1", "nemotron_h", "jamba")
]
STEPS, ROWS = 3, 8
COMMON = (
    f"--max_steps {STEPS} --global_batch_size {ROWS} --learning_rate 0.01 --lr_scheduler_type constant --warmup_steps 0"
)
# The change of a loss that a multiplication in another order explains, and of logits that bf16 does.
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("architectures")


@pytest.fixture(scope="module")
def rows(place: Path) -> Path:
    """As many chats as a step holds, so that the first loss is that of the untrained model on all rows."""
    return write_jsonl(place / "rows.jsonl", demo_rows()[:ROWS])


@pytest.fixture(scope="module")
def base(place: Path) -> Any:
    """Writes the tiny model of an architecture, once."""

    @cache
    def make(name: str) -> Path:
        folder = place / name / "base"
        extra = {"mtp.fc.weight": torch.randn(3, 3), "mtp.layers.0.norm.weight": torch.ones(5)}
        save_tiny(name, ALL[name], folder, extra)
        return folder

    return make


@pytest.fixture(scope="module")
def run(place: Path, rows: Path, base: Any) -> Any:
    """Trains a tiny model, once for each set of options; returns the run's folder and what it printed."""

    @cache
    def make(name: str, method: str, options: str = "", ranks: int = 1, sharding: str = "") -> tuple[Path, str]:
        run_name = f"{method}-{ranks}{sharding}-{abs(hash(options)) % 10**6}"
        argv = (
            f"--model {base(name)} --dataset {rows} --method {method} --run_name {run_name} --report_to none --seed 1 "
        )
        argv += f"{COMMON} --output_dir {place / name} {options}"
        environ = {"UNSLOTH_FSDP2": "1"} if sharding else {}
        folder = place / name / f"{run_name}.out"
        result = run_ranks(ranks, train, argv.split(), str(place), folder=folder, environ=environ)
        assert set(result.codes) == {0}, result.output[-3000:]
        return place / name / run_name, result.output

    return make


def tensors(folder: Path) -> dict[str, Tensor]:
    return {key: value for path in sorted(folder.glob("model*.safetensors")) for key, value in load_file(path).items()}


def first_loss(folder: Path) -> float:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return next(entry["loss"] for entry in history if "loss" in entry)


def encoded(folder: Path) -> list[tuple[Tensor, Tensor]]:
    """Token ids and labels of the rows, as an independent reader has them: the answer and the token after it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for row in demo_rows()[:ROWS]:
        ids, labels = [], []
        for index, message in enumerate(row["messages"]):
            until = tokenizer.apply_chat_template(row["messages"][: index + 1], tokenize=True, return_dict=False)
            answer = message["role"] == "assistant"
            prompt = (
                tokenizer.apply_chat_template(
                    row["messages"][:index], tokenize=True, return_dict=False, add_generation_prompt=True
                )
                if answer
                else until
            )
            labels += [-100] * (len(prompt) - len(ids)) + (until[len(prompt) :] if answer else [])
            ids = until
        # The newline after the end of the last turn is not supervised.
        found.append((torch.tensor([ids]), torch.tensor([labels])))
    return found


def token_mean_loss(model: Any, folder: Path) -> float:
    total = count = 0.0
    with torch.no_grad():
        for ids, labels in encoded(folder):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, :-1].float()
            wanted = labels[0, 1:]
            total += torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum").item()
            count += int((wanted != -100).sum())
    return total / count


def load(name: str, folder: Path, **options: Any) -> Any:
    import transformers

    model, loading = getattr(transformers, ALL[name]).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **options
    )
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    return model.eval()


def logits_of(model: Any, folder: Path) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(input_ids=ids, use_cache=False).logits[0] for ids, _ in encoded(folder)[:2]])


def distance(one: Tensor, other: Tensor) -> float:
    """Relative, at the median token: rounding sends a few tokens of a mixture to other experts."""
    return float(((one - other).norm(dim=-1) / other.norm(dim=-1)).median())


@pytest.mark.parametrize("name", SLOW)
def test_lora_trains_loads_in_plain_peft_and_merges(name: str, base: Any, run: Any) -> None:
    from peft import PeftModel

    folder, printed = run(name, "lora", "--merge --logging_steps 1")
    start = load(name, base(name))
    assert first_loss(folder) == pytest.approx(token_mean_loss(start, base(name)), rel=ROUNDING)
    before = logits_of(start, base(name))

    adapted = PeftModel.from_pretrained(start, folder).eval()
    saved = {key for key in load_file(folder / "adapter_model.safetensors") if ".lora_B." in key}
    loaded = {key.replace(".default", ""): value for key, value in adapted.state_dict().items() if ".lora_B." in key}
    assert saved == loaded.keys()
    zero = [key for key, value in loaded.items() if not value.any()]
    # Short rows fill no block that DeepSeek V4 compresses.
    assert name == "deepseek_v4" or not zero, f"never trained: {zero[:3]}"
    assert (f"{len(zero)} adapters of {len(saved)} did not change" in " ".join(printed.split())) == bool(zero)
    after = logits_of(adapted, base(name))
    change = distance(before, after)
    assert change > 0.01

    merged, wanted = tensors(folder / "merged"), tensors(base(name))
    assert {key: value.shape for key, value in merged.items()} == {key: value.shape for key, value in wanted.items()}
    assert json.loads((folder / "merged" / "config.json").read_text())["architectures"] == [ALL[name]]
    for key in ("mtp.fc.weight", "mtp.layers.0.norm.weight"):
        torch.testing.assert_close(merged[key].float(), wanted[key], rtol=1e-2, atol=1e-2)
    assert "Kept 2 weights of" in printed
    assert distance(logits_of(load(name, folder / "merged"), base(name)), after) < max(0.15 * change, 0.03)
    for written in (folder, folder / "merged"):
        assert (written / "preprocessor_config.json").exists() == (base(name) / "preprocessor_config.json").exists()


@pytest.mark.parametrize("name", FULL)
def test_full_training_keeps_every_weight_and_freezes_towers(name: str, base: Any, run: Any) -> None:
    folder, printed = run(name, "full", "--logging_steps 1 --weight_decay 0.5 --learning_rate 0.001")
    start, found = tensors(base(name)), tensors(folder)
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in start.items()}
    model = load(name, base(name))
    assert first_loss(folder) == pytest.approx(token_mean_loss(model, base(name)), rel=ROUNDING)
    load(name, folder)
    assert all(torch.equal(found[key], start[key]) for key in start if key.startswith("mtp."))
    from unsloth_ddp.model.parts import parts_beside_text

    parts = parts_beside_text(model)
    trained = dict(load(name, folder).named_parameters())
    for path, module in parts.items():
        for inner, weight in module.named_parameters():
            assert torch.equal(trained[f"{path}.{inner}"], weight), f"{path}.{inner}"
    assert ("frozen; --train_towers trains them" in " ".join(printed.split())) == bool(parts)
    changed = [key for key, value in model.named_parameters() if not torch.equal(value, trained[key])]
    assert len(changed) > (len(trained) - sum(len(list(part.parameters())) for part in parts.values())) / 3


OPTIONS = "--optim sgd --weight_decay 0.5 --logging_steps 1 --per_device_train_batch_size 2"


def assert_same_weights(one: Path, other: Path, rtol: float = 1e-6, atol: float = 2e-6) -> None:
    file = "adapter_model.safetensors"
    first, second = (load_file(run / file) if (run / file).exists() else tensors(run) for run in (one, other))
    assert first.keys() == second.keys()
    for key in first:
        torch.testing.assert_close(
            second[key], first[key], rtol=rtol, atol=atol, msg=lambda text, key=key: f"{key}: {text}"
        )


# Weights that some steps do not reach are towers and experts, stacked or in a list.
ALL_IN_TWO = (
    "qwen3_5", "gemma4", "mistral3", "gpt_oss", "falcon_h1", "qwen3_5_moe", "llama4", "gemma3", "lfm2_moe",
    "deepseek_v3",
)  # fmt: skip
# With all weights one model with towers stands for the others; adapters, those of experts too,
# tests/training/test_mixtures.py compares.
IN_TWO = ("qwen3_5", "full")
SLOWLY_IN_TWO = [(name, method) for name in ALL_IN_TWO for method in ("lora", "full") if (name, method) != IN_TWO]


@pytest.mark.parametrize(
    ("name", "method"), [IN_TWO, *(pytest.param(*p, marks=pytest.mark.slow) for p in SLOWLY_IN_TWO)]
)
def test_two_processes_take_the_steps_of_one(name: str, method: str, run: Any) -> None:
    assert_same_weights(*(run(name, method, OPTIONS, ranks)[0] for ranks in (1, 2)))


@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma4", "gemma3", "lfm2_moe"))]
)
def test_packs_of_two_processes_take_the_steps_of_one(name: str, run: Any) -> None:
    options = f"{OPTIONS} --packing on --global_batch_size 8"
    (one, said), (two, _) = (run(name, "lora", options, ranks) for ranks in (1, 2))
    assert "so a mask keeps rows apart" in " ".join(said.split())
    assert_same_weights(one, two)


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("gemma4", marks=pytest.mark.slow)])
def test_shards_take_the_steps_of_one_process(name: str, run: Any) -> None:
    """Their classes name layers of towers, some of which the model has not."""
    one, shards = run(name, "full", OPTIONS, 1)[0], run(name, "full", OPTIONS, 2, "fsdp2")[0]
    assert_same_weights(one, shards, rtol=1e-5, atol=5e-6)


def test_a_tower_that_no_row_uses_decays_on_no_process(run: Any, base: Any) -> None:
    """One process has no gradient for it; the exchange of two would make zeros, with which the optimizer decays it."""
    start, found = tensors(base("mistral3")), tensors(run("mistral3", "full", f"{OPTIONS} --train_towers", 2)[0])
    towers = [key for key in start if key.startswith("vision_tower.") or ".vision_tower." in key]
    assert towers and all(torch.equal(start[key], found[key]) for key in towers)
    assert any(not torch.equal(start[key], found[key]) for key in start.keys() - towers)
