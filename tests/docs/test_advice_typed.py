"""Advice that the kit prints, typed: a mistake is made, its sentence is followed, and the mistake is gone."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.docs.test_advice import SENTENCES
from unsloth_ddp.config.aliases import ALIASES
from unsloth_ddp.config.options import OPTIONS
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.port.__main__ import main as port
from unsloth_ddp.runs.__main__ import main as runs
from unsloth_ddp.utils.errors import UserError

GIVEN = ["--model", "m", "--dataset", "d.jsonl"]
# For advice that names an option without a value.
VALUES = {
    "eval_dataset": "e.jsonl", "eval_fraction": "0.1", "eval_steps": "5", "save_steps": "5", "max_steps": "5",
    "global_batch_size": "8", "precision": "bf16", "max_length": "99", "reference_model": "other",
    "num_train_epochs": "2", "dataset_num_proc": "2",
}  # fmt: skip

MISTAKES = [
    "--packing off --global_batch_tokens 1000",
    "--merge --method full",
    "--lora_trainable_tokens <a> --backend unsloth",
    "--dataset b.jsonl --columns question",
    "--eval_fraction 0.1 --eval_dataset e.jsonl",
    "--early_stopping_patience 3 --eval_fraction 0.1 --eval_strategy no",
    "--early_stopping_patience 3",
    "--compare_answers 5",
    "--shuffle_buffer 5",
    "--streaming",
    "--streaming --max_steps 5 --eval_fraction 0.1",
    """--streaming --max_steps 5 --trainer_args '{"dataloader_num_workers": 2}'""",
    "--streaming --max_steps 5 --save_strategy epoch",
    "--beta 0.2",
    "--simpo_gamma 0.2 --task dpo",
    "--task dpo --label_smoothing 0.1 --preference_loss ipo",
    "--task dpo --reference_model_revision main",
    "--task dpo --backend unsloth",
    "--task dpo --cuda_graphs on",
    "--task dpo --loss_on all",
    "--task dpo --method full --reference adapter_off",
    "--task dpo --reference precomputed --streaming --max_steps 5",
    "--task dpo --method full --streaming --max_steps 5",
    "--optim adamw_hf",
    "--lr_scheduler_type cosine_annealing",
    "--method fft",
    "--precision bfloat16",
    "--loss_on response",
    """--trainer_args '{"fp16": true}'""",
    """--trainer_args '{"max_seq_length": 99}'""",
    """--trainer_args '{"greater_is_better": true, "metric_for_best_model": "loss"}'""",
    "--gradient_checkpointing full",
    "--learning_rat 1e-4",
    "--lr 1e-4",
    "--cpu",
]


def refusal(words: list[str]) -> str:
    with pytest.raises(UserError) as refused:
        parse_settings(words)
    return str(refused.value)


def without(words: list[str], name: str) -> list[str]:
    """Return the words of a command line without an option and its values."""
    start = words.index(f"--{name}")
    following = (i for i in range(start + 1, len(words)) if words[i].startswith("--"))
    return words[:start] + words[next(following, len(words)) :]


# Words after an option that are no value.
WORDS = "or|and|which|instead|out|with|at|in"


def followed(words: list[str], sentence: str) -> list[list[str]]:
    """Return the command line after each piece of advice in a sentence: an option to give instead, or to leave out."""
    advice = re.sub(r"^command line: ", "", sentence).partition("; ")[2]
    here = [word.removeprefix("--") for word in words if word.startswith("--")]
    named = next((name for name in re.findall(r"\w+", sentence) if name in here), here[-1])
    leave = re.search(r"(?:leave|take) ([^,;]*?)(?:--(\w+))?( [^,;]*)?\bout\b|leave (?:one|it|merge)", advice)
    start, lines = words, []
    if leave and leave[2]:
        lines.append(without(words, leave[2]))
        advice = advice.replace(leave[0], "")
    if leave and (not leave[2] or "it" in (leave[1] or "")):
        start = without(words, named)
        lines.append(start)
    for name, value in re.findall(rf"--([a-z_]+)((?: (?!(?:{WORDS})\b)(?:'.*?'|[^\s;,()]+))?)", advice):
        value = value.strip().rstrip(".")
        rest = without(start, name) if f"--{name}" in start else start
        rest = without(rest, named) if re.search(rf"--{name}\b[^;,]* instead", advice) else rest
        lines.append([*rest, f"--{name}", *shlex.split(value or VALUES.get(name, ""))])
    for verb, value in re.findall(r"(?:^|; )(give|did you mean|here it is) (\w+)[.?]", f"; {advice}"):
        if verb == "give":
            lines.append([*without(words, named), f"--{named}", value])
        else:
            at = words.index(f"--{here[-1]}")
            lines.append([*words[:at], f"--{value}", *words[at + 1 :]])
    # "Leave it out, and give another" is one thing to do.
    return lines[1:] if leave and ", and give" in sentence else lines


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_a_refusal_says_to_give_is_taken(mistake: str) -> None:
    words = [*GIVEN, *shlex.split(mistake)]
    sentence = refusal(words)
    lines = followed(words, sentence)
    assert lines, f"no advice in: {sentence}"
    for line in lines:
        if "trainer_args" in sentence.partition(":")[0] and "--trainer_args" in line:
            # The option takes the field's place.
            field = sentence.split(": ")[1].split(" ")[0]
            at = line.index("--trainer_args") + 1
            fields = {name: value for name, value in json.loads(line[at]).items() if name != field}
            line = [*line[:at], json.dumps(fields), *line[at + 1 :]]
        try:
            parse_settings(line)
        except UserError as refused:
            pytest.fail(f"{sentence}\ntyped: {line}\nrefused: {refused}")


def test_what_is_said_of_the_keys_of_other_tools_is_taken() -> None:
    typed = 0
    for name, alias in ALIASES.items():
        for value, options in alias.values.items():
            if not options or name in OPTIONS or "false" in (value, *map(str, options.values())):
                continue
            sentence = refusal([*GIVEN, f"--{name}", value])
            found = re.search(r"; give (--.*)\.$", sentence)
            assert found, sentence
            # Losses of pairs need their task beside them.
            words = shlex.split(found[1]) + (["--task", "dpo"] if "preference_loss" in options else [])
            words += ["--eval_fraction", "0.1"] if "eval_strategy" in options else []
            words += ["--task", "dpo"] if "reference" in options else []
            parse_settings([*GIVEN, *dict.fromkeys(words)] if words.count("--task") > 1 else [*GIVEN, *words])
            typed += 1
    assert typed > 60


def test_a_file_of_another_tool_is_ported_by_the_command_that_its_refusal_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, mine = tmp_path / "their.yaml", tmp_path / "mine.yaml"
    theirs.write_text(
        "base_model: m\nadapter: qlora\nload_in_4bit: true\nmicro_batch_size: 2\ndatasets: [{path: d.jsonl}]\n"
    )
    sentence = refusal(["--config", str(theirs)])
    command = re.search(r"`uv run python -m unsloth_ddp\.port (.*?)`", sentence)
    assert command and port([*shlex.split(command[1]), "--output", str(mine)]) == 0
    start = re.search(r"# Start it with: uv run accelerate launch .* train_ddp\.py (.*)", capsys.readouterr().out)
    assert start and parse_settings(shlex.split(start[1])).method == "qlora"


def test_the_runs_are_listed_by_the_command_that_a_wrong_name_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = tmp_path / "outputs"
    (outputs / "mine").mkdir(parents=True)
    (outputs / "mine" / "settings.yaml").write_text("model: m\nmethod: lora\n")
    assert runs([str(outputs), "--report", "theirs"]) == 2
    command = re.search(r"python -m unsloth_ddp\.runs (\S+) lists", capsys.readouterr().err)
    assert command and runs([command[1]]) == 0 and "mine" in capsys.readouterr().out


# Commands in sentences that no test here types: what each of them needs, or the test that types it.
NEEDS = {
    r"accelerate launch|accelerate\.commands\.launch": "a launcher: tests/docs/test_readme.py and tests/run",
    r"unsloth_ddp\.chat": "a finished run: tests/export/test_export.py",
    r"unsloth_ddp\.export \S+ --to hub": "a token of the Hub, and a network",
    r"unsloth_ddp\.export": "a finished run: tests/export/test_export.py",
    r"unsloth_ddp\.(parity|preflight|plan)": "the options of a run: tests/docs/test_readme.py",
    r"unsloth_ddp\.(port|runs)": "typed above",
    r"hf (download|auth|upload)": "a network",
    r"uv (sync|pip)|pip install|git clone": "a network",
    r"cmake": "a clone of llama.cpp",
    r"-m bitsandbytes|python -c": "a GPU",
}  # fmt: skip
COMMAND = re.compile(r"(?:uv (?:run|sync|pip)|python -m|pip install|git clone|hf download|cmake -B) [^;:`\n]*")


def test_every_command_in_a_sentence_is_typed_or_marked_with_what_it_needs() -> None:
    commands = {(place, text) for place, sentence in SENTENCES for text in COMMAND.findall(sentence)}
    unmarked = [f"{place}: {text}" for place, text in commands if not any(re.search(known, text) for known in NEEDS)]
    assert len(commands) > 30 and unmarked == []
    for known in NEEDS:
        assert any(re.search(known, text) for _, text in commands), f"no sentence has a command for {known}"
