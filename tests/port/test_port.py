"""Files of axolotl, LLaMA-Factory and TRL become files of the kit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from unsloth_ddp.config.aliases import ALIASES
from unsloth_ddp.config.checks import check_settings
from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.data.sources.preference import converter
from unsloth_ddp.distributed.sharding import check_sharding
from unsloth_ddp.model.backend import BackendFacts, choose_backend
from unsloth_ddp.port.__main__ import main, render
from unsloth_ddp.port.convert import AXOLOTL, LLAMA_FACTORY, RULES, TRL, detect_tool, port
from unsloth_ddp.port.ported import Ported
from unsloth_ddp.utils.errors import UserError

# As such files look: the keys and kinds of values of the tools' own examples.
AXOLOTL_FILE = """
base_model: org/model
model_type: AutoModelForCausalLM
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: org/rows
    type: chat_template
    split: train
    field_messages: messages
val_set_size: 0.05
output_dir: ./outputs/lora-out
adapter: qlora
lora_r: 32
lora_alpha: 64
lora_target_linear: true
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: constant
learning_rate: 2e-4
warmup_ratio: 0.1
bf16: auto
tf32: false
adam_beta2: 0.95
gradient_checkpointing: true
evals_per_epoch: 4
saves_per_epoch: 1
wandb_project: mine
wandb_entity:
special_tokens:
loss_watchdog_threshold: 5.0
"""
LLAMA_FACTORY_FILE = """
model_name_or_path: org/model
stage: sft
do_train: true
finetuning_type: lora
lora_target: q_proj,v_proj
quantization_bit: 4
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: mine,org/rows
template: qwen3
cutoff_len: 1024
output_dir: saves/model/sft
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
num_train_epochs: 2.0
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
val_size: 0.1
eval_strategy: steps
eval_steps: 100
resume_from_checkpoint: null
"""
TRL_FILE = """
model_name_or_path: org/model
dataset_name: org/rows
dataset_train_split: train_sft
dataset_test_split: test_sft
use_peft: true
lora_target_modules: all-linear
learning_rate: 1.0e-4
eval_strategy: steps
eval_steps: 50
max_length: 512
packing: true
output_dir: out
load_best_model_at_end: true
attn_implementation: flash_attention_2
"""


def ported(text: str, tool: str | None = None, folder: Path = Path()) -> Ported:
    content = yaml.safe_load(text)
    return port(content, tool or detect_tool(content), folder)


def settings_of(result: Ported, folder: Path) -> Any:
    """The settings that train_ddp.py reads from the rendered file."""
    (folder / "kit.yaml").write_text(render(result, Path("their.yaml")))
    return parse_settings(["--config", str(folder / "kit.yaml")])


def test_a_file_of_axolotl(tmp_path: Path) -> None:
    result = ported(AXOLOTL_FILE)
    assert result.tool == AXOLOTL and result.to_do == []
    settings = settings_of(result, tmp_path)
    assert (settings.model, settings.dataset, settings.method) == ("org/model", ["org/rows"], "qlora")
    assert (settings.lora_r, settings.lora_alpha, settings.lora_target_modules) == (32, 64, ["all-linear"])
    assert (settings.max_length, settings.overlong, settings.packing) == (4096, "drop", "on")
    assert (settings.per_device_train_batch_size, settings.gradient_accumulation_steps) == (2, 4)
    assert (settings.optim, settings.lr_scheduler_type, settings.warmup_steps) == ("paged_adamw_8bit", "constant", 0.1)
    assert (settings.output_dir, settings.run_name) == ("outputs", "lora-out")
    assert (settings.eval_fraction, settings.eval_strategy, settings.save_strategy) == (0.05, "epoch", "epoch")
    assert (settings.trainer_args, settings.report_to) == ({"adam_beta2": 0.95}, ["wandb"])
    assert result.left_out.keys() == {
        "model_type", "gradient_checkpointing", "evals_per_epoch", "wandb_project", "loss_watchdog_threshold",
    }  # fmt: skip


def test_a_file_of_llama_factory_with_its_list_of_data_sets(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    info = {"mine": {"file_name": "mine.json", "columns": {"prompt": "instruction", "response": "answer"}}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    result = ported(LLAMA_FACTORY_FILE, folder=tmp_path)
    # ZeRO-3, as the file has it, is refused with QLoRA.
    assert (result.tool, result.launch_config) == (LLAMA_FACTORY, "fsdp2")
    assert result.to_do == []
    settings = settings_of(result, tmp_path)
    assert settings.columns == ["answer=output"]
    assert settings.dataset == [str(tmp_path / "data" / "mine.json"), "org/rows"]
    assert (settings.method, settings.lora_target_modules) == ("qlora", ["q_proj", "v_proj"])
    # Its own defaults.
    assert (settings.lora_r, settings.lora_alpha, settings.learning_rate) == (8, 16, 5e-5)
    assert (settings.precision, settings.eval_strategy, settings.eval_steps) == ("bf16", "steps", 100)
    assert result.left_out["ddp_timeout"] == "180000000, but it has to be 10,000,000 or below"
    assert "dataset_dir" not in result.left_out


def test_a_data_set_that_is_nowhere_is_a_thing_to_do() -> None:
    result = ported("model_name_or_path: m\ncutoff_len: 9\ndataset: identity\n")
    assert result.to_do == ["dataset identity is a name in LLaMA-Factory's dataset_info.json; give its file or Hub id."]


def test_a_file_of_trl(tmp_path: Path) -> None:
    result = ported(TRL_FILE)
    settings = settings_of(result, tmp_path)
    assert (result.tool, settings.method, settings.packing) == (TRL, "lora", "on")
    assert (settings.dataset, settings.eval_dataset) == (["org/rows"], ["org/rows"])
    assert (settings.dataset_split, settings.eval_dataset_split) == ("train_sft", "test_sft")
    assert (settings.lora_r, settings.lora_alpha, settings.lora_dropout) == (16, 32, 0.05)
    assert (settings.per_device_train_batch_size, settings.num_train_epochs) == (8, 3.0)
    assert settings.trainer_args == {"load_best_model_at_end": True}
    assert settings.attn_implementation is None and "attn_implementation" in result.left_out


def test_all_weights_are_trained_where_there_is_no_adapter() -> None:
    for text in (
        "base_model: m\nsequence_len: 9\nlora_r: 8\n",
        "model_name_or_path: m\ndataset_name: d\nuse_peft: false\n",
    ):
        options = ported(text).options
        assert options["method"] == "full" and not any(name.startswith("lora_") for name in options)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "rl: grpo",
            "rl grpo cannot be ported: the kit trains on text (task sft), pairs of answers (task dpo, orpo, simpo, "
            "cpo) and labelled",
        ),
        ("adapter: llama-adapter", "adapter llama-adapter cannot be ported: the methods are lora, qlora and full."),
        ("stage: ppo", "stage ppo cannot be ported: the kit trains on text"),
        ("finetuning_type: freeze", "finetuning_type freeze cannot be ported"),
        ("datasets: [a]", "datasets is not a list of mappings with a path"),
    ],
)
def test_a_file_that_asks_for_something_else_is_refused(line: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        ported(f"base_model: m\n{line}\n", AXOLOTL)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("entry", "options", "to_do"),
    [
        ("{path: rows.jsonl, type: alpaca}", {"dataset": ["rows.jsonl"]}, ""),
        ("{path: json, data_files: [./a.jsonl, b.jsonl], type: chat_template}",
            {"dataset": ["a.jsonl", "b.jsonl"]}, ""),
        ("{path: o/r, type: completion, name: en, split: 'train[:10%]'}", {"dataset": ["o/r@en[train[:10%]]"]}, ""),
        ("{path: o/r, split: main, shards: 8, shards_idx: 1, revision: v2}",
         {"dataset": ["o/r[main[12%:25%]]"], "dataset_revision": ["v2"]}, ""),
        ("{path: a.jsonl, split: 'train[:10%]'}", {"dataset": ["a.jsonl[train[:10%]]"]}, ""),
        ("{path: o/r, data_dir: en}", {"dataset": ["o/r"]}, "of o/r only the folder en is meant"),
        ("{path: o/r, type: {field_instruction: q, field_output: a, format: '[INST] {instruction}'}}",
         {"dataset": ["o/r"], "columns": ["q=instruction", "a=output"]}, ""),
        ("{path: o/r, type: context_qa.load_v2}",
            {"dataset": ["o/r"]}, "is of type context_qa, which the kit does not know"),
        ("{path: o/r, field_messages: chat}", {"dataset": ["o/r"], "columns": ["chat=messages"]}, ""),
        ("{path: o/r, message_property_mappings: {role: who, content: what}}",
            {"dataset": ["o/r"]}, "rename who to role and what to content in its messages."),
        ("{path: o/r, message_property_mappings: {role: from, content: value}}",
         {"dataset": ["o/r"], "columns": ["messages=conversations"]}, ""),
        ("{path: o/r, field_messages: conversations, message_property_mappings: {role: from, content: value}}",
            {"dataset": ["o/r"]}, ""),
        ("{path: o/r, field_messages: c, message_field_role: from, message_field_content: value}",
         {"dataset": ["o/r"], "columns": ["c=conversations"]}, ""),
        ("{path: o/r, field_messages: c, message_property_mappings: {role: from}}",
         {"dataset": ["o/r"], "columns": ["c=messages"]}, "datasets o/r: rename from to role in its messages."),
        ("{path: o/r, type: sharegpt}", {"dataset": ["o/r"]}, ""),
        ("{path: o/r, type: completion, field: body}", {"dataset": ["o/r"], "columns": ["body=text"]}, ""),
    ],
)  # fmt: skip
def test_data_sets_of_axolotl(entry: str, options: dict[str, Any], to_do: str) -> None:
    result = ported(f"base_model: m\ndatasets: [{entry}]\n", AXOLOTL)
    assert result.options | options == result.options
    assert "loss_on" not in result.options
    assert len(result.to_do) == bool(to_do) and to_do in "".join(result.to_do)


def test_what_differs_between_the_data_sets_of_a_file_is_carried_or_told(tmp_path: Path) -> None:
    entries = [
        {"path": "o/chats", "split": "train[:10%]", "name": "en", "field_messages": "chat"},
        {"path": "o/books", "type": "completion", "field": "chat", "revision": "v2", "extra": True},
        {"path": "o/pages", "type": "completion", "split": "main"},
    ]
    result = port({"base_model": "m", "datasets": entries, "rl": None}, AXOLOTL, Path())
    assert result.options["dataset"] == ["o/chats@en[train[:10%]]", "o/books", "o/pages[main]"]
    assert result.options["dataset_revision"] == ["main", "v2", "main"]
    assert result.options["columns"] == ["chat=messages"] and "loss_on" not in result.options
    assert result.to_do == [
        "datasets o/books: rename the column chat to text in its rows, since in datasets o/chats it is messages."
    ]
    assert "datasets o/books: extra" in result.left_out
    preferences = port({"base_model": "m", "rl": "dpo", "datasets": [{**entries[0], "extra": 1}]}, AXOLOTL, Path())
    assert preferences.options["dataset"] == ["o/chats@en[train[:10%]]"]
    assert "datasets o/chats: extra" in preferences.left_out


def test_numbers_of_samples_and_probabilities_of_llama_factory_are_those_of_each_data_set(tmp_path: Path) -> None:
    info = {
        "a": {"hf_hub_url": "o/a", "subset": "en", "split": "main", "num_samples": 50},
        "b": {"file_name": "b.json", "folder": "x"},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    content = {
        "model_name_or_path": "m", "cutoff_len": 99, "dataset": "a,b", "eval_dataset": "b",
        "dataset_dir": str(tmp_path), "max_samples": 100, "mix_strategy": "interleave_under",
        "interleave_probs": "0.7,0.3",
    }  # fmt: skip
    result = port(content, LLAMA_FACTORY, tmp_path)
    file = f"{tmp_path}/b.json[:100]"
    assert result.options["dataset"] == ["o/a@en[main[:50]]:0.7", f"{file}:0.3"]
    assert result.options["eval_dataset"] == [file]
    assert set(result.to_do) == {
        "dataset b has folder in dataset_info.json, which port does not read; name the files that are meant."
    }
    repeated = port({**content, "mix_strategy": "interleave_over"}, LLAMA_FACTORY, tmp_path)
    assert any("mix_strategy interleave_over repeats" in sentence for sentence in repeated.to_do)


@pytest.mark.parametrize(
    ("line", "config"),
    [
        ("deepspeed: deepspeed_configs/zero2.json", "zero2"), ("deepspeed: ds_z3_offload_config.json", "zero3"),
        ("deepspeed: zero1.json", "zero2"), ("fsdp: [full_shard]", "fsdp2"), ("fsdp_config: {}", "ddp"),
        ("adapter: qlora\ndeepspeed: zero3.json", "fsdp2"),
    ],
)  # fmt: skip
def test_the_launch_file_follows_from_the_sharding(line: str, config: str) -> None:
    result = ported(f"base_model: m\n{line}\n", AXOLOTL)
    assert result.launch_config == config
    assert f"accelerate_configs/{config}.yaml train_ddp.py --config THIS_FILE" in render(result, Path("x.yaml"))


@pytest.mark.parametrize("method", ["adapter: lora", "adapter: qlora", ""])
@pytest.mark.parametrize("sharding", ["deepspeed: zero2.json", "deepspeed: zero3_bf16.json", "fsdp: [full_shard]"])
def test_the_result_goes_with_its_launch_file(
    method: str, sharding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"base_model: m\ndatasets: [{{path: o/r}}]\n{method}\n{sharding}\ngradient_checkpointing: offload\n"
    result = ported(text, AXOLOTL)
    settings = settings_of(result, tmp_path)
    # Not installed by default.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    check_sharding(result.launch_config, settings, "cuda", 2)  # type: ignore[arg-type]
    choose_backend(BackendFacts(settings, sharding=result.launch_config))  # type: ignore[arg-type]


def test_an_offload_of_the_file_is_named() -> None:
    result = ported("base_model: m\ndeepspeed: ds_z3_offload_config.json\nadapter: lora\n", AXOLOTL)
    assert result.left_out["deepspeed"] == (
        "start with accelerate_configs/zero3.yaml; zero3_offload.yaml uses host memory too"
    )


def test_what_the_kit_does_anyway_is_no_loss() -> None:
    entry = "{path: o/r, type: chat_template, roles_to_train: [assistant], train_on_eos: turn}"
    assert ported(f"base_model: m\ndatasets: [{entry}]\n", AXOLOTL).left_out == {}
    other = entry.replace("turn", "last")
    assert "train_on_eos" in "".join(ported(f"base_model: m\ndatasets: [{other}]\n", AXOLOTL).left_out)


def test_full_training_of_a_quantized_model_is_refused_as_llama_factory_does() -> None:
    with pytest.raises(UserError, match="finetuning_type full with quantization_bit contradict each other"):
        ported("model_name_or_path: m\ncutoff_len: 9\nfinetuning_type: full\nquantization_bit: 4\n", LLAMA_FACTORY)


@pytest.mark.parametrize("tool", [AXOLOTL, LLAMA_FACTORY, TRL])
@pytest.mark.parametrize("value", [True, False, 1, "text", ["a"]])
def test_every_known_key_gives_options_that_the_kit_takes_or_a_reason(tool: str, value: Any) -> None:
    for key in [*ALIASES, *RULES]:
        try:
            result = port({key: value}, tool, Path())
        except UserError as refused:
            assert str(refused).endswith(".")
            continue
        except TypeError as error:
            pytest.fail(f"{key}: {value!r}: {error}")
        render(result, Path("x.yaml"))


def test_the_command_prints_or_writes_and_never_replaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    their, mine = tmp_path / "their.yaml", tmp_path / "mine.yaml"
    their.write_text(AXOLOTL_FILE)
    main([str(their)])
    printed = capsys.readouterr().out
    main([str(their), "--output", str(mine)])
    assert mine.read_text() == printed.replace("THIS_FILE", str(mine))
    assert capsys.readouterr().out.startswith("# Ported from their.yaml (axolotl).\n#\n# Left out or changed:\n")
    assert main([str(their), "--output", str(mine)]) == 2
    assert "already exists; give another name." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("model: m\n", "is a file of this kit already; give it as --config."),
        ("a: 1\n", "its keys are those of none of axolotl, LLaMA-Factory and TRL"),
        ("[1, 2]", "holds no options"),
        ("a: [", "is not YAML: expected the node content, but found '<stream end>' (line 1)."),
        (None, "cannot be read: No such file or directory."),
    ],
)
def test_what_is_no_such_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    path = tmp_path / "their.yaml"
    if content is not None:
        path.write_text(content)
    assert main([str(path)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"port: error: {path}") and said in printed


def test_what_the_kit_refuses_is_told_in_the_result() -> None:
    text = render(
        ported("base_model: m\ndatasets: [{path: d}]\nval_set_size: 0.1\ntest_datasets: [{path: e}]\n"), Path("x")
    )
    assert "# To do before it runs:\n#   eval_fraction and eval_dataset are both given" in text


def test_a_value_that_the_kit_refuses_is_left_out_with_the_reason(tmp_path: Path) -> None:
    given = {"model_name_or_path": "m", "dataset_name": "d", "eval_strategy": "no", "output_dir": "out"}
    result = port({**given, "log_level": "loud", "adam_beta2": 0.95}, TRL, tmp_path)
    assert result.options["trainer_args"] == {"adam_beta2": 0.95}
    assert result.left_out["log_level"].startswith("is 'loud', but it takes detail, debug")


@pytest.mark.parametrize("column", ["messages", "conversations", "dialog"])
@pytest.mark.parametrize("role", ["role", "from", "speaker"])
@pytest.mark.parametrize("content", ["content", "value", "text"])
def test_rows_of_axolotl_are_read_once_the_advice_is_followed(column: str, role: str, content: str) -> None:
    entry = {
        "path": "o/r", "field_messages": column, "message_property_mappings": {"role": role, "content": content},
    }  # fmt: skip
    result = port({"base_model": "m", "datasets": [entry]}, AXOLOTL, Path())
    renamed = dict(re.findall(r"(\w+) to (\w+)", "".join(result.to_do)))
    turns = [{role: "user", content: "Who?"}, {role: "assistant", content: "I."}]
    turns = [{renamed.get(name, name): text for name, text in turn.items()} for turn in turns]
    example = converter("sft", result.options.get("columns", []))({column: turns})
    assert [message["content"] for message in example.messages or []] == ["Who?", "I."]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_generations": 8, "beta": 0.0}, "beta, num_generations are for TRL's GRPOConfig, RLOOConfig, and port"),
        ({"desirable_weight": 1.0, "loss_type": "apo_zero_unpaired"}, "loss_type apo_zero_unpaired is not offered"),
        ({"loss_type": "aot", "ld_alpha": 0.5}, "loss_type aot is not offered; the losses of pairs are sigmoid,"),
        ({"loss_type": "grpo"}, "loss_type grpo is for another trainer of TRL"),
    ],
)
def test_files_of_other_trainers_of_trl_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, Any], said: str
) -> None:
    file = tmp_path / "trl.yaml"
    file.write_text(TRL_FILE + yaml.safe_dump(given))
    assert main([str(file)]) == 2
    assert said in capsys.readouterr().err


PAIRS = {"task": "dpo", "beta": 0.2}
KTO = {"task": "kto", "beta": 0.2}


@pytest.mark.parametrize(
    ("tool", "lines", "options"),
    [
        (TRL, "beta: 0.2\nloss_type: [ipo, sft]\nloss_weights: [1.0, 0.3]\n",
            PAIRS | {"preference_loss": "ipo", "sft_weight": 0.3}),
        (TRL, "beta: 0.2\nloss_type: [sft, ipo]\nloss_weights: [0.3, 1.0]\n",
            PAIRS | {"preference_loss": "ipo", "sft_weight": 0.3}),
        (TRL, "precompute_ref_log_probs: true\nloss_type: sigmoid\nbeta: 0.2\n", PAIRS | {"reference": "precomputed"}),
        (AXOLOTL, "rl: dpo\nrl_beta: 0.2\ndatasets: [{path: o/r, type: chatml.intel}]\n", PAIRS | {"dataset": ["o/r"]}),
        (AXOLOTL, "datasets: [{path: o/r, type: chat_template.default}]\nsample_packing: true\nrl: simpo\n",
            {"task": "simpo"}),
        (LLAMA_FACTORY, "pref_beta: 0.2\npref_loss: hinge\npref_ftx: 0.1\nstage: dpo\n",
            PAIRS | {"preference_loss": "hinge", "sft_weight": 0.1}),
        (LLAMA_FACTORY, "stage: dpo\npref_loss: orpo\n", {"task": "orpo"}),
        (LLAMA_FACTORY, "stage: dpo\npref_beta: 0.2\nref_model: o/other\n", PAIRS | {"reference_model": "o/other"}),
        (TRL, "loss_type: kto\nbeta: 0.2\n", KTO),
        (TRL, "desirable_weight: 1.5\nbeta: 0.2\n", KTO | {"desirable_weight": 1.5}),
        (AXOLOTL, "rl: kto\nrl_beta: 0.2\nkto_desirable_weight: 1.5\nkto_undesirable_weight: 0.5\ndatasets: [{path: "
            "o/r, type: llama3.argilla}]\n",
         KTO | {"dataset": ["o/r"], "desirable_weight": 1.5, "undesirable_weight": 0.5}),
        (LLAMA_FACTORY, "stage: kto\npref_beta: 0.2\nkto_chosen_weight: 1.5\nkto_rejected_weight: 0.5\n",
         KTO | {"desirable_weight": 1.5, "undesirable_weight": 0.5}),
    ],
)  # fmt: skip
def test_files_of_preference_runs_become_runs_that_the_kit_accepts(
    tool: str, lines: str, options: dict[str, Any]
) -> None:
    base = {TRL: TRL_FILE, AXOLOTL: "base_model: m\n", LLAMA_FACTORY: "model_name_or_path: m\n"}[tool]
    found = ported(base + lines, tool).options
    assert found | options == found and "packing" not in found
    found.pop("trainer_args", None)
    check_settings(Settings(**{"dataset": ["o/r"], "model": "m", **found}))


@pytest.mark.parametrize(
    "losses", ["[ipo, sft]\nloss_weights: [0.5, 1.0]", "[sft, ipo]\nloss_weights: [1.0, 0.5]", "[ipo, hinge]"]
)
def test_a_pair_loss_with_a_weight_or_beside_another_one_is_refused(losses: str) -> None:
    with pytest.raises(UserError, match="one loss of weight 1 is offered"):
        ported(TRL_FILE + f"beta: 0.2\nloss_type: {losses}\n", TRL)


@pytest.mark.parametrize("loss", ["nll", "dft"])
def test_files_of_supervised_fine_tuning_say_that_they_are_taken_for_it(loss: str) -> None:
    assert "trl sft" in ported(TRL_FILE + f"loss_type: {loss}\n", TRL).left_out["the trainer"]


def test_keys_of_images_and_of_what_sees_them_are_taken(tmp_path):
    info = {
        "shown": {
            "file_name": "shown.json",
            "formatting": "sharegpt",
            "columns": {"messages": "messages", "images": "images"},
        }
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    content = {
        "model_name_or_path": "m", "dataset": "shown", "cutoff_len": 99, "media_dir": "photos",
        "image_max_pixels": 262144, "image_min_pixels": 1024, "freeze_vision_tower": False,
        "freeze_multi_modal_projector": True,
    }  # fmt: skip
    found = port(content, LLAMA_FACTORY, tmp_path)
    assert (found.options["image_folder"], found.options["image_max_pixels"]) == (["photos"], 262144)
    assert found.options["train_towers"] == "tower"
    assert not any("images" in sentence for sentence in found.to_do)
    assert "image_max_pixels bounds an image" in found.left_out["image_min_pixels"]
    both = port({**content, "freeze_multi_modal_projector": False}, LLAMA_FACTORY, tmp_path)
    assert both.options["train_towers"] is True
    axolotl = port(
        {"base_model": "m", "datasets": [{"path": "org/rows", "type": "chat_template"}], "image_size": 512},
        AXOLOTL,
        tmp_path,
    )
    assert "image_max_pixels bounds an image" in axolotl.left_out["image_size"]
