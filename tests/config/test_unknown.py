"""Names of other tools, misspelt names and names that mean nothing, in a file and on the command line."""

from __future__ import annotations

import importlib
import typing
from typing import Any

import pytest

from unsloth_ddp.config.aliases import ALIASES, OTHER_VALUES, TOOLS, VALUED
from unsloth_ddp.config.options import OPTIONS, TYPES
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.config.unknown import unknown_options
from unsloth_ddp.config.upstream_names import known_names, sft_config_fields
from unsloth_ddp.config.values import convert_value
from unsloth_ddp.utils.errors import UserError


def refusal(*argv: str) -> str:
    with pytest.raises(UserError) as refused:
        parse_settings(["--model", "m", "--dataset", "d", *argv])
    return str(refused.value)


def test_an_alias_leads_to_an_option_that_there_is_and_a_value_that_it_takes() -> None:
    for name, alias in ALIASES.items():
        assert name not in OPTIONS and set(alias.tools) <= TOOLS.keys(), name
        assert bool(alias.option) + bool(alias.note) == 1, f"{name}: either an option or a note"
        assert alias.option is None or alias.option in OPTIONS, name
        for options in alias.values.values():
            for option, value in options.items():
                assert convert_value(option, value, "aliases") == value, name
        named = [word.strip(",;:()") for word in alias.note.split()]
        if named[:1] == ["give"] and name in " ".join(VALUED):
            assert named[1] in OPTIONS, alias.note


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--micro_batch_size 4", "there is no option micro_batch_size; here it is per_device_train_batch_size."),
        ("--load_in_4bit True", "there is no option load_in_4bit; give --method qlora."),
        ("--load_in_4bit=true", "there is no option load_in_4bit; give --method qlora."),
        ("--load_in_4bit", "there is no option load_in_4bit; give --method qlora."),
        ("--num_processes 2", "there is no option num_processes; give it to the launcher, before the name of the"),
        ("--config_file ddp.yaml", "the launcher's file goes before train_ddp.py; --config takes a file of options."),
        ("--tf 3", "there is no option tf; train_ddp.py --help lists them all."),
        ("--adam_beta2 0.9", "there is no option adam_beta2; give it in trainer_args."),
        ("--loss_type dft", "there is no option loss_type; the loss is the negative log-likelihood, "),
        ("--gradient_acumulation_steps 2", "did you mean gradient_accumulation_steps?"),
        ("--micro_batch_sice 2", "did you mean per_device_train_batch_size?"),
        ("--per_device_batch_size 2", "here it is per_device_train_batch_size."),
        ("--warmup 2", "there is no option warmup; did you mean warmup_steps?"),
        ("--batch 2", "there is no option batch; train_ddp.py --help lists them all."),
        ("--deepspeed ds_config_zero2.json", "accelerate launch --config_file accelerate_configs/zero2.yaml"),
        (
            "--use_lora True --bf16 True --tune_llm True --lr -1",
            "4 options do not exist: use_lora (give --method lora), bf16 (give --precision bf16), tune_llm (leave it "
            "out), lr (here it is learning_rate); train_ddp.py --help lists those that do.",
        ),
    ],
)
def test_a_name_on_the_command_line_is_refused_with_the_right_option(words: str, said: str) -> None:
    assert said in refusal(*words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--optim adamw", "optim adamw is not one that Transformers knows; give adamw_torch_fused."),
        ("--optim AdamW_8bit", "optim AdamW_8bit is not one that Transformers knows; give adamw_8bit."),
        ("--optim muon", "knows; the documentation of Transformers' TrainingArguments lists them."),
        ("--lr_scheduler_type cos", "lr_scheduler_type cos is not one that Transformers knows; did you mean cosine?"),
        ("--lr_scheduler_type none", "lr_scheduler_type none is not one that Transformers knows; give constant."),
        ("--gradient_checkpointing true", "but it takes auto, none, torch or unsloth; give auto."),
        ("--precision bfloat16", "precision is 'bfloat16', but it takes auto, bf16, fp16 or fp32; give bf16."),
        ("--method sft", "method is 'sft', but it takes lora, qlora or full."),
    ],
)
def test_a_value_of_another_tool_is_refused_with_the_right_one(words: str, said: str) -> None:
    assert said in refusal(*words.split())


@pytest.mark.parametrize(("option", "values"), OTHER_VALUES.items())
def test_the_values_given_instead_are_taken_and_the_others_are_not(option: str, values: dict[str, str]) -> None:
    known = known_names(option) if option in ("optim", "lr_scheduler_type") else typing.get_args(TYPES[option])
    assert set(values.values()) <= set(known) and not values.keys() & set(known)


def test_all_unknown_names_of_a_file_are_told_at_once_with_the_command_that_ports_it(config: Any) -> None:
    path = config("base_model: m\nsequence_len: 512\nmicro_batch_size: 2\nload_in_4bit: true\nlora_r: 8\nxyzzy: 1\n")
    message = refusal("--config", str(path))
    assert message == (
        f"{path}: `uv run python -m unsloth_ddp.port {path}` turns this file of axolotl into one of this kit; 5 "
        "options do not exist: base_model (here it is model), sequence_len (here it is max_length), micro_batch_size "
        "(here it is per_device_train_batch_size), load_in_4bit (give method: qlora), xyzzy; train_ddp.py --help "
        "lists those that do."
    )


def test_a_file_of_another_tool_is_answered_shortly(config: Any) -> None:
    names = [name for name, alias in ALIASES.items() if "A" in alias.tools][:40]
    message = refusal("--config", str(config("".join(f"{name}: 1\n" for name in names))))
    assert "turns this file of axolotl into one of this kit; 40 options do not exist: " in message
    assert ", and 35 more; " in message and len(message) < 800


def test_nested_options_are_refused_with_the_reason(config: Any) -> None:
    path = config("lora:\n  r: 8\n")
    assert refusal("--config", str(path)) == (
        f"{path}: there is no option lora; options do not nest; write each as a line of its own, without indentation."
    )


def test_a_long_list_of_unknown_names_is_cut() -> None:
    message = str(unknown_options(dict.fromkeys(f"{'x' * 70}{n}" for n in range(60)), "command line"))
    assert ", and 35 more; " in message and len(message) < 2500


def test_the_fields_of_sft_config_are_those_of_the_installed_trl() -> None:
    import dataclasses

    from trl.trainer.sft_config import SFTConfig

    assert {f.name for f in dataclasses.fields(SFTConfig) if f.init} <= sft_config_fields().keys()


@pytest.mark.parametrize(
    ("command", "words", "said"),
    [
        ("chat", "RUN --plane", "there is no option plane; did you mean plain?"),
        ("chat", "RUN --max-new-token 5", "there is no option max_new_token; did you mean max_new_tokens?"),
        ("export", "RUN --to gguf --quantise q8_0", "there is no option quantise; did you mean quantize?"),
        ("export", "RUN --to gguf --lora_r 8", "there is no option lora_r; it is an option of train_ddp.py."),
        ("runs", "--reprot A", "there is no option reprot; did you mean report?"),
        ("runs", "--foo", "there is no option foo; python -m unsloth_ddp.runs --help lists them all."),
        ("plan", "--gpus_per_nod 4", "there is no option gpus_per_nod; did you mean gpus_per_node?"),
        ("plan", "--nnodes 2", "there is no option nnodes; did you mean nodes?"),
        ("port", "FILE --outptu x", "there is no option outptu; did you mean output?"),
        ("chat", "RUN what is it", "what belongs to no option; every value follows"),
    ],
)
def test_every_command_names_the_nearest_of_its_options(
    command: str, words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"unsloth_ddp.{command}.__main__").main
    code = main(words.split())
    printed = capsys.readouterr().err
    assert (code, len(printed.splitlines())) == (2, 1)
    assert f"command line: {said}" in printed
