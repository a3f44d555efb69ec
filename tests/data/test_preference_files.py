"""Preference files as people have them, through the checks of a run and the plan to the texts that are compared."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from tests.conftest import DEMO_MODEL, write_jsonl
from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.data.dataset import TokenizedRows, tokenize_examples
from unsloth_ddp.data.order.mismatched import answer_start
from unsloth_ddp.data.sources.examples import read_examples
from unsloth_ddp.plan import __main__ as plan
from unsloth_ddp.run.file_checks import check_data
from unsloth_ddp.sizing import count
from unsloth_ddp.utils.errors import UserError

Rows = list[dict[str, Any]]


def turns(*texts: str, system: str = "") -> Rows:
    """Return the messages of a conversation, the user's first."""
    begin = [{"role": "system", "content": system}] if system else []
    return begin + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def shared(*texts: str, system: str = "") -> Rows:
    """Return the turns of a conversation in ShareGPT's form."""
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    return [{"from": names[turn["role"]], "value": turn["content"]} for turn in turns(*texts, system=system)]


def written(path: Path, rows: Rows) -> Path:
    """Write rows as the suffix says; lists in a CSV file are JSON."""
    if path.suffix == ".jsonl":
        return write_jsonl(path, rows)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            cells = [{k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows]
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(cells)
    return path


def arrived(path: Path, options: str, runtime: Any) -> TokenizedRows:
    """Return the rows of a file as a run has them, after the checks before torch is imported."""
    settings = parse_settings(f"--model {DEMO_MODEL} --dataset {path} {options}".split())
    check_data(settings, 1)
    folder = path.parent / "data"
    folder.mkdir()
    read_examples(settings, runtime, folder)
    return tokenize_examples(settings, runtime, folder, AutoTokenizer.from_pretrained(DEMO_MODEL))[0]


def shown(rows: TokenizedRows) -> list[list[Any]]:
    """Return the prompt of each row and its answers, or its answer and label, as the model sees them."""
    tokenizer, found = AutoTokenizer.from_pretrained(DEMO_MODEL), []
    for row in rows.dataset.with_format(None).select(range(rows.counts.rows)):
        texts: list[Any] = []
        for begin, end in pairwise([0, row["parts"][0], sum(row["parts"])]):
            start = answer_start(np.array(row["labels"][begin:end]))
            # The decoder drops the space that a text begins with.
            prompt = tokenizer.decode(row["input_ids"][begin : begin + start])
            texts += [prompt, tokenizer.decode(row["input_ids"][begin:end]).removeprefix(prompt)]
        assert texts[0] == texts[2], "both answers have the same prompt"
        label = [bool(row["desirable"][0])] if "desirable" in row else [texts[3]]
        found.append([*texts[:2], *label])
    return found


ASK, GOOD, BAD = "Name a sea.", "The Baltic.", "A lake."
TALK = (turns("Hi", "Hello.", ASK, GOOD), turns("Hi", "Hello.", ASK, BAD))
HUMAN = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Name a sea.\n\nAssistant:"
# As the demo's template renders them.
ASKED, BRIEF = "<|user|> Name a sea.<|end|><|assistant|>", "<|system|> You are brief.<|end|>"
CHAT, LATER = "<|bos|>" + ASKED, "<|bos|><|user|> Hi<|end|><|assistant|> Hello.<|end|>" + ASKED
PREFERRED = [" The Baltic.<|end|>", " A lake.<|end|>"]
SYSTEM, ANSWERS = {"system": "You are brief."}, {"chosen": GOOD, "rejected": BAD}
IN_TEXT = [" The Baltic.<|eos|>", " A lake.<|eos|>"]
PAIRS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "UltraFeedback": ("a.parquet", {"prompt": ASK, "prompt_id": "ab12", "messages": turns(ASK, GOOD),
        "chosen": turns(ASK, GOOD), "rejected": turns(ASK, BAD), "score_chosen": 8.5, "score_rejected": 2.0},
            [CHAT, *PREFERRED]),
    "HH-RLHF": ("a.jsonl", {"chosen": f"{HUMAN} {GOOD}", "rejected": f"{HUMAN} {BAD}"}, [HUMAN, *IN_TEXT]),
    "HH-RLHF after its prompt": ("a.parquet", {"prompt": HUMAN, "response": f" {GOOD}", "chosen": f" {GOOD}",
        "rejected": " "
        f"{BAD}"}, [HUMAN, *IN_TEXT]),
    "Orca": ("a.jsonl", {**SYSTEM, "question": ASK, **ANSWERS}, ["<|bos|>" + BRIEF + ASKED, *PREFERRED]),
    "Orca without a system prompt": ("a.parquet", {"system": "", "question": ASK, **ANSWERS}, [CHAT, *PREFERRED]),
    "Orca of distilabel": ("a.jsonl", {**SYSTEM, "input": ASK, **ANSWERS, "generations": [GOOD, BAD],
        "rating": [9.0, 1.0], "in_gsm8k_train": False}, ["<|bos|>" + BRIEF + ASKED, *PREFERRED]),
    "Argilla's mix": ("a.parquet", {"dataset": "mix", "chosen": TALK[0], "rejected": TALK[1], "chosen_rating": 5.0},
        [LATER, *PREFERRED]),
    "Argilla's Capybara": ("a.parquet", {"conversation": [{"input": "Hi", "output": "Hello."}], "prompt": ASK,
        "chosen": TALK[0], "rejected": TALK[1]}, [LATER, *PREFERRED]),
    "ORPO's mix": ("a.jsonl", {"source": "mix", "prompt": ASK, "question": ASK, "chosen": turns(ASK, GOOD),
        "rejected": turns(ASK, BAD)}, [CHAT, *PREFERRED]),
    "LLaMA-Factory, Alpaca": ("a.json", {**SYSTEM, "history": [["Hi", "Hello."]], "instruction": ASK, "input": "",
        **ANSWERS}, ["<|bos|>" + BRIEF + LATER.removeprefix("<|bos|>"), *PREFERRED]),
    "LLaMA-Factory, ShareGPT": ("a.json", {"conversations": shared("Hi", "Hello.", ASK), "chosen": shared("", GOOD)[1],
        "rejected": shared("", BAD)[1]}, [LATER, *PREFERRED]),
    "axolotl, chatml.argilla": ("a.jsonl", {**SYSTEM, "instruction": ASK, "chosen_response": GOOD,
        "rejected_response": BAD}, ["<|bos|>" + BRIEF + ASKED, *PREFERRED]),
    "axolotl, chatml.prompt_pairs": ("a.jsonl", {**SYSTEM, "prompt": f"{ASK}\n", **ANSWERS}, ["You are brief.\n\nName "
        "a sea.\n", "The Baltic.<|eos|>", "A lake.<|eos|>"]),
    "axolotl, chatml.ultra": ("a.jsonl", {**SYSTEM, "prompt": ASK, "chosen": turns(ASK, GOOD), "rejected": turns(ASK,
        BAD)}, ["<|bos|>" + BRIEF + ASKED, *PREFERRED]),
    "axolotl, chat_template": ("a.jsonl", {"messages": turns("Hi", "Hello.", ASK), "chosen": turns("", GOOD)[1],
        "rejected": turns("", BAD)[1]}, [LATER, *PREFERRED]),
    "PKU-SafeRLHF after a choice": ("a.jsonl", {"prompt": turns(ASK), "chosen": turns("", GOOD)[1:],
        "rejected": turns("", BAD)[1:], "is_response_0_safe": True, "better_response_id": 0}, [CHAT, *PREFERRED]),
    "SHP after a choice": ("a.csv", {"post_id": "x1", "instruction": ASK, **ANSWERS, "score_ratio": 2.5},
        [CHAT, *PREFERRED]),
    "TRL's texts": ("a.csv", {"prompt": "Q: Name a sea.\nA:", "chosen": f" {GOOD}", "rejected": f" {BAD}"}, ["Q: Name "
        "a sea.\nA:", *IN_TEXT]),
    "TRL's messages": ("a.csv", {"prompt": turns(ASK), "chosen": turns("", GOOD)[1:], "rejected": turns("", BAD)[1:]},
        [CHAT, *PREFERRED]),
}  # fmt: skip
# Each row of a pair's two answers, the better one first.
LABELLED: dict[str, tuple[str, Any, list[str]]] = {
    "kto-mix-14k": ("a.parquet", lambda text: {"prompt": turns(ASK), "completion": turns("", text)[1:]},
        [CHAT, *PREFERRED]),
    "TRL's texts": ("a.csv", lambda text: {"prompt": "Q: Name a sea.\nA:", "completion": f" {text}"}, ["Q: Name a "
        "sea.\nA:", *IN_TEXT]),
    "LLaMA-Factory, messages": ("a.json", lambda text: {"messages": turns("Hi", "Hello.", ASK, text)},
        [LATER, *PREFERRED]),
    "LLaMA-Factory, kto_tag": ("a.jsonl", lambda text: {"instruction": ASK, "input": "", "output": text},
        [CHAT, *PREFERRED]),
    "axolotl, chatml.intel": ("a.jsonl", lambda text: {**SYSTEM, "question": ASK, "completion": text},
        ["<|bos|>" + BRIEF + ASKED, *PREFERRED]),
    "axolotl, chatml.argilla_chat": ("a.parquet", lambda text: {"completion": turns(ASK, text)}, [CHAT, *PREFERRED]),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def counted_once() -> Iterator[None]:
    """Count the demo's model for the first plan only; the rows change nothing of it."""
    shape = count.read_model_shape(Settings(model=str(DEMO_MODEL)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(count, "read_model_shape", lambda _: shape)
        yield


def planned(path: Path, task: str) -> dict[str, Any]:
    """Return what the plan command says of the rows of a file."""
    json_file = path.with_suffix(".plan")
    options = f"--model {DEMO_MODEL} --dataset {path} --task {task} --packing on --json {json_file}"
    plan.main(options.split())
    found: dict[str, Any] = json.loads(json_file.read_text())
    assert all(row["total"] > 0 for row in found["plan"]["memory"])
    return found["rows"]


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_arrive_as_the_texts_that_are_compared(name: str, tmp_path: Path, runtime: Any) -> None:
    file, row, expected = PAIRS[name]
    path, task = written(tmp_path / file, [row] * 2), "orpo" if name.startswith("ORPO") else "dpo"
    rows = arrived(path, f"--task {task}", runtime)
    assert shown(rows) == [expected] * 2
    assert planned(path, task)["tokens"] == rows.counts.tokens


@pytest.mark.parametrize("name", LABELLED)
def test_labelled_answers_arrive_with_their_labels(name: str, tmp_path: Path, runtime: Any) -> None:
    file, row, (prompt, *answers) = LABELLED[name]
    column = "kto_tag" if "kto_tag" in name else "label"
    path = written(tmp_path / file, [row(GOOD) | {column: True}, row(BAD) | {column: False}])
    rows = arrived(path, "--task kto", runtime)
    assert shown(rows) == [[prompt, answers[0], True], [prompt, answers[1], False]]
    assert planned(path, "kto")["tokens"] == rows.counts.tokens


PAIR = {"prompt": turns(ASK), **ANSWERS}
LABEL = {"prompt": turns(ASK), "completion": GOOD, "label": True}
ONE = {"messages": turns(ASK, GOOD)}
BESIDE = "with prompt, messages, conversations or instruction beside them, or as whole conversations."
# Options and the row, and what is said, after the place for those that are refused.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "pairs as text": ("--task sft", PAIR, "the row is a preference pair (chosen, rejected); give --task dpo, or to "
        "learn only the chosen answer, --columns chosen=messages (a list) or chosen=completion (text)."),
    "a bad answer as text": ("--task sft", {**LABEL, "label": False}, "the row has label false, which in KTO's format "
        "marks an answer not to learn; give --task kto, or remove such rows, or the column."),
    "pairs as labelled answers": ("--task kto", PAIR, "the row is a preference pair (chosen, rejected); give --task "
        "dpo."),
    "labelled answers as pairs": ("--task orpo", LABEL, "the row is one answer with a label; give --task kto, or "
        f"write pairs, which have chosen and rejected, {BESIDE}"),
    "chats as pairs": ("--task dpo", ONE, "the row has one answer; give --task sft, or write pairs, which have chosen "
        f"and rejected, {BESIDE}"),
    "chats as labelled answers": ("--task kto", ONE, "the row has no label, which --task kto learns from; add a "
        "column label (true or false), or learn all answers with --task sft."),
    "one answer of two": ("--task dpo", {"prompt": ASK, "chosen": GOOD}, "the row has no rejected answer beside the "
        "other; add it or remove the row."),
    "no prompt": ("--task dpo", ANSWERS, "the row has no prompt, and chosen and rejected do not begin with the same "
        "words; add a column prompt, or remove the row."),
    "a prompt of another name": ("--task dpo", {"query": ASK, "chosen": "The sea.", "rejected": "The lake."}, "the "
        "row has no prompt, but a column query, which is not read; give --columns query=prompt, or query=instruction "
        "to use the chat template."),
    "a labelled prompt of another name": ("--task kto", {"query": ASK, "completion": GOOD, "label": True}, "the row "
        "has no prompt, but a column query, which is not read; give --columns query=prompt, or query=instruction to "
        "use the chat template."),
    "PKU-SafeRLHF before a choice": ("--task dpo", {"prompt": ASK, "response_0": GOOD, "response_1": BAD,
        "better_response_id": 0}, "the "
        "row (prompt, response_0, response_1, better_response_id) is no pair of answers that the kit knows; write the "
        f"better answer as chosen and the other as rejected, {BESIDE}"),
    "SHP before a choice": ("--task dpo", {"history": ASK, "human_ref_A": GOOD, "human_ref_B": BAD, "labels": 1}, "the "
        "row (history, human_ref_A, human_ref_B, labels) is no pair of answers that the kit knows; write the better "
        f"answer as chosen and the other as rejected, {BESIDE}"),
    "several rejected answers": ("--task dpo", {**PAIR, "rejected": [BAD, "No."]}, "rejected is a list of texts ('A "
        "lake.', ...); write it as one text, or as a list of messages with role and content."),
    "a list of prompts": ("--task dpo", {**PAIR, "prompt": [ASK]}, "prompt is a list of texts ('Name a sea.'); write "
        "it as one text, or as a list of messages with role and content."),
    "several labelled answers": ("--task kto", {**LABEL, "completion": [GOOD, BAD]}, "completion is a list of texts "
        "('The Baltic.', ...); write it as one text, or as a list of messages with role and content."),
    "an answer that is a number": ("--task dpo", {**PAIR, "chosen": 4}, "chosen is a number, and an answer is text, a "
        "message or a list of messages; write it as one of them."),
    "a label of another kind": ("--task kto", {**LABEL, "label": "good"}, "label is 'good', and a label is true "
        "(desirable) or false (undesirable); correct it or remove the row."),
    "a score as label": ("--task kto", {**LABEL, "label": 0.7}, "label is '0.7', and a label is true (desirable) or "
        "false (undesirable); correct it or remove the row."),
    "answers to other prompts": ("--task dpo", {"chosen": turns(ASK, GOOD), "rejected": turns("Hi", BAD)}, "chosen "
        "goes on with a user message where its answer should begin, so it is no answer to the same prompt as the "
        "other; give both the same prompt, or remove the row."),
    "a prompt that is answered": ("--task dpo", {**PAIR, "prompt": turns(ASK, GOOD)}, "the prompt ends with an "
        "assistant message, and chosen begins with another one; end the prompt with the question."),
    "pictures": ("--task dpo", {**PAIR, "images": ["a.png"]}, "the row has images, which task dpo does not take; "
        "remove them, or give --task sft and rows with the good answers as messages."),
}  # fmt: skip


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_in_a_row_is_one_sentence(mistake: str, tmp_path: Path, runtime: Any) -> None:
    options, row, said = REFUSED[mistake]
    path = write_jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(UserError) as refused:
        arrived(path, options, runtime)
    assert str(refused.value) == f"{path}:1: {said}"


TOLD: dict[str, tuple[str, dict[str, Any], str]] = {
    "identical answers": ("--task dpo", {**PAIR, "rejected": GOOD}, "2 of 2 training rows: chosen and rejected are "
        "the same tokens, so there is nothing to prefer; remove such rows."),
    "an empty answer": ("--task dpo", {**PAIR, "rejected": " "}, "2 of 2 training rows: an answer is empty or only "
        "white space, so training teaches the model when to answer nothing; remove such rows unless that is meant."),
    "an empty labelled answer": ("--task kto", {**LABEL, "completion": ""}, "2 of 2 training rows: an answer is empty "
        "or only white space, so training teaches the model when to answer nothing; remove such rows unless that is "
        "meant."),
    "a prompt repeated in both texts": ("--task dpo", {"prompt": ASK, "chosen": f"{ASK} {GOOD}", "rejected": f"{ASK} "
        f"{BAD}"}, "2 of 2 training rows: the answer begins with its prompt, so the model reads it twice and learns "
            "to repeat it; take it out of one of them unless that is meant."),
    "a prompt repeated in a labelled answer": ("--task kto", {**LABEL, "completion": f"{ASK}\n{GOOD}"}, "2 of 2 "
        "training rows: the answer begins with its prompt, so the model reads it twice and learns to repeat it; take "
        "it out of one of them unless that is meant."),
    "answers of one kind": ("--task kto", LABEL, "2 of 2 training rows are desirable, and kto learns from answers of "
        "both kinds; add the others."),
}  # fmt: skip


@pytest.mark.parametrize("mistake", TOLD)
def test_a_mistake_in_many_rows_is_told_once(mistake: str, tmp_path: Path, runtime: Any, capsys: Any) -> None:
    options, row, said = TOLD[mistake]
    arrived(write_jsonl(tmp_path / "a.jsonl", [row] * 2), options, runtime)
    assert sum(line.startswith(said) for line in capsys.readouterr().out.splitlines()) == 1


def test_a_greeting_may_be_answered_with_itself(tmp_path: Path, runtime: Any, capsys: Any) -> None:
    arrived(
        write_jsonl(tmp_path / "a.jsonl", [{"prompt": turns("Hi"), "chosen": "Hi", "rejected": "Hiya"}]),
        "--task dpo",
        runtime,
    )
    assert "begins with its prompt" not in capsys.readouterr().out


@pytest.mark.parametrize(("task", "row"), [("dpo", PAIR), ("kto", LABEL)])
def test_prompts_longer_than_the_limit_leave_no_answer(
    task: str, row: dict[str, Any], tmp_path: Path, runtime: Any
) -> None:
    rows = [{**row, "prompt": turns(f"{ASK} " * 40)}] * 2
    with pytest.raises(UserError) as refused:
        arrived(write_jsonl(tmp_path / "a.jsonl", rows), f"--task {task} --max_length 32", runtime)
    assert str(refused.value) == (
        "The training set has no supervised token in 2 rows; max_length 32 cuts off every answer, so raise it."
    )
