"""Test the choice of a template, the parts of a row that have to arrive, and the spans of the assistant."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.data.test_tokenize import CHATML, IM, PLAIN, THINK, TOOL, TURNS, core, from_trl, make_tokenizer, supervised
from unsloth_ddp.data.chat.template import prints_date
from unsloth_ddp.data.chat.tokenize import EncodedRow, Encoder
from unsloth_ddp.data.chat.tokens import stop_tokens
from unsloth_ddp.data.chat.turn_spans import shared
from unsloth_ddp.data.sources.formats import to_example
from unsloth_ddp.utils.errors import UserError

__all__ = ["core"]

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL_TURNS = [
    {"role": "user", "content": "Please add 2 and 3."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "5"},
    {"role": "assistant", "content": "Five."},
]
REASONED = [
    {"role": "user", "content": "Q1?"},
    {"role": "assistant", "content": "A1.", "reasoning_content": "R1."},
    {"role": "user", "content": "Q2?"},
    {"role": "assistant", "content": "A2.", "reasoning_content": "R2."},
]
IN_CONTENT = [
    {"role": "user", "content": "Q1?"},
    {"role": "assistant", "content": "<think>\nR1.\n</think>\n\nA1."},
]


def encode(tokenizer: Any, row: dict[str, Any], **options: Any) -> EncodedRow:
    encoder = Encoder(tokenizer, **({"supervise_all": False} | options))
    return encoder.encode(to_example(json.loads(json.dumps(row))))


def trained(tokenizer: Any, row: dict[str, Any], **options: Any) -> list[str]:
    encoded = encode(tokenizer, row, **options)
    return supervised(tokenizer, {"input_ids": encoded.input_ids, "labels": encoded.labels})


def qwen3(core: Tokenizer) -> Any:
    return make_tokenizer(core, from_trl("qwen3"), "<|im_end|>", IM)


# ---- a generation prompt behind every chat ----


@pytest.mark.parametrize(
    ("begin", "ends", "more"),
    [
        ("<|turn|>{}\n", "<|end|>", ""), ("<|turn|><|{}|>", "<|end|>\n", ""), ("### {}: ", "<|end|>\n\n", ""),
        ("{}: ", "</s>", ""), ("<|turn|><|{}|>", "<|end|>\n", "<think></think>"),
    ],
)  # fmt: skip
def test_a_prompt_that_no_one_asked_for_is_not_trained(core: Tokenizer, begin: str, ends: str, more: str) -> None:
    named = begin.replace("{}", "' + m['role'] + '").replace("\n", "\\n")
    source = f"{{% for m in messages %}}{{{{ '{named}' + m['content'] + '{ends}' }}}}{{% endfor %}}".replace(
        "\n", "\\n"
    )
    source += f"{{{{ '{begin.format('assistant')}{more}' }}}}".replace("\n", "\\n")
    tokenizer = make_tokenizer(core, source, "</s>", "<|turn|> <|user|> <|assistant|> <|end|>")
    runs = trained(tokenizer, {"messages": TURNS})
    assert [run.strip() for run in runs] == [f"{TURNS[n]['content']}{ends}".strip() for n in (1, 3)]
    assert [run.strip() for run in trained(tokenizer, {"messages": TURNS[:2]})] == [runs[0].strip()]
    whole = encode(tokenizer, {"messages": TURNS}, supervise_all=True)
    assert tokenizer.decode(whole.labels).rstrip().endswith(ends.strip())


# ---- parts that have to arrive ----


@pytest.mark.parametrize("supervise_all", [False, True])
@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        # The word "add" stands in the user's message.
        ({"messages": TOOL_TURNS}, "does not render tools, so the call of add is not in the rendered row; give one"),
        ({"messages": TURNS, "tools": [{"name": "look_up"}]}, "does not render tools, so look_up is not"),
        (
            {"messages": [{**TURNS[0], "content": "add"}, TURNS[1]], "tools": [TOOL]},
            "does not render tools, so add is not",
        ),
        (
            {"messages": REASONED},
            "leaves out the reasoning_content of the answer; give --reasoning_in_content, which writes it into the "
            "content",
        ),
        (
            {"messages": [TURNS[0], {**TURNS[1], "thinking": "R"}]},
            "leaves out the thinking of the answer; give --reasoning_in_content",
        ),
    ],
)
def test_a_part_that_a_template_leaves_out_is_refused(
    core: Tokenizer, row: dict[str, Any], sentence: str, supervise_all: bool
) -> None:
    with pytest.raises(UserError, match=sentence):
        encode(make_tokenizer(core, CHATML), row, supervise_all=supervise_all)


@pytest.mark.parametrize("role", ["system", "user", "tool", "assistant"])
def test_a_message_that_a_template_leaves_out_is_refused(core: Tokenizer, role: str) -> None:
    template = CHATML.replace("{% for m in messages %}", f"{{% for m in messages if m['role'] != '{role}' %}}")
    turns = [{"role": "system", "content": "s"}, *TURNS[:2], {"role": "tool", "content": "5"}, TURNS[3]]
    with pytest.raises(UserError, match=rf"leaves out message \d of the row, of role {role}; give one that renders it"):
        encode(make_tokenizer(core, template), {"messages": turns}, supervise_all=True)


def test_a_key_under_which_the_template_reads_reasoning_is_named(core: Tokenizer) -> None:
    tokenizer = make_tokenizer(core, from_trl("gptoss"), "<|return|>", "<|start|> <|channel|> <|message|> <|end|>")
    with pytest.raises(UserError, match="leaves out the reasoning_content of the answer; rename it to thinking, or"):
        encode(tokenizer, {"messages": REASONED[:2]})


def test_tool_calls_of_templates_that_want_arguments_as_text_are_rendered(core: Tokenizer) -> None:
    tokenizer = make_tokenizer(core, from_trl("deepseekv3"), "<eos>")
    assert '{"a": 2}' in trained(tokenizer, {"messages": TOOL_TURNS})[0]


def test_reasoning_in_the_content_does_not_follow_an_empty_block(core: Tokenizer) -> None:
    tokenizer = make_tokenizer(core, from_trl("qwen3_8"), "<|im_end|>", IM)
    assert trained(tokenizer, {"messages": IN_CONTENT}) == ["R1.\n</think>\n\nA1.<|im_end|>"]


def test_keys_that_the_template_does_not_read_are_named(core: Tokenizer) -> None:
    turns = [{**TURNS[0], "name": "Ann", "id": None}, {**TURNS[1], "mood": "good"}]
    assert encode(make_tokenizer(core, CHATML), {"messages": turns}).unread_keys == ("mood", "name")


def test_every_tool_call_of_a_message_has_to_arrive(core: Tokenizer) -> None:
    two = [TOOL_TURNS[0], {**TOOL_TURNS[1], "tool_calls": [CALL, CALL]}, *TOOL_TURNS[2:]]
    tokenizer = make_tokenizer(core, from_trl("gptoss"))
    assert len(trained(tokenizer, {"messages": TOOL_TURNS, "tools": [TOOL]})) == 2
    with pytest.raises(UserError, match="leaves out tool call 2 of the 2 in message 2; write each call as a message"):
        encode(tokenizer, {"messages": two, "tools": [TOOL]})


def test_text_beside_tool_calls_that_a_template_leaves_out_is_not_called_reasoning(core: Tokenizer) -> None:
    tokenizer = make_tokenizer(core, from_trl("llama3_1"), "<|eot_id|>", "<|start_header_id|> <|end_header_id|>")
    row = {"messages": [TOOL_TURNS[0], {**TOOL_TURNS[1], "content": "I add them."}, *TOOL_TURNS[2:]]}
    assert encode(tokenizer, row).notes == ("text",)
    assert trained(tokenizer, row) == ["Five.<|eot_id|>"]
    assert encode(tokenizer, row, supervise_all=True).notes == ("text supervised",)
    row["messages"][1] = TOOL_TURNS[1]
    assert encode(tokenizer, row).notes == ()
    assert len(trained(tokenizer, row)) == 2


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"messages": TOOL_TURNS, "tools": [TOOL]}, "does not render tools, so add is not in the rendered row"),
        (
            {"messages": [*TOOL_TURNS[:3], {**TOOL_TURNS[3], "reasoning_content": "R."}]},
            "leaves out the reasoning_content of the answer",
        ),
    ],
)
def test_parts_are_checked_where_the_template_wants_arguments_as_text(
    core: Tokenizer, row: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        encode(make_tokenizer(core, from_trl("deepseekv3")), row)


@pytest.mark.parametrize("printed", ["{{ c['function']['arguments'] }}", "{{ c['function']['arguments'] | string }}"])
@pytest.mark.parametrize("arguments", ['{"a": "two"}', {"a": "two"}])
def test_arguments_are_not_printed_as_python_prints_them(core: Tokenizer, printed: str, arguments: Any) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% for c in m.tool_calls or [] %}"
        + "{{ c['function']['name'] }}"
        + printed
        + "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% "
        "endif %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    quoting = {**TOOL_TURNS[2], "content": "{'a': 'two'}"}
    turns = [TOOL_TURNS[0], {**TOOL_TURNS[1], "tool_calls": [call]}, quoting, TOOL_TURNS[3]]
    tokenizer = make_tokenizer(core, template, "<|im_end|>", IM)
    assert trained(tokenizer, {"messages": turns}) == ['add{"a": "two"}<|im_end|>', "Five.<|im_end|>"]


# ---- the tokenizer's own template and TRL's variant ----


def test_the_own_template_is_taken_as_at_inference(core: Tokenizer) -> None:
    tokenizer = qwen3(core)
    encoded = encode(tokenizer, {"messages": TURNS})
    assert tokenizer.decode(encoded.input_ids) == tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert encoded.notes == ("own",)
    assert trained(tokenizer, {"messages": TURNS}) == [
        "Yes, it is.<|im_end|>",
        THINK + TURNS[3]["content"] + "<|im_end|>",
    ]
    single = encode(tokenizer, {"messages": TURNS[:2]})
    assert single.notes == ()


def test_the_training_variant_is_taken_where_it_is_asked_for(core: Tokenizer) -> None:
    tokenizer = qwen3(core)
    found = trained(tokenizer, {"messages": TURNS}, chat_template="training")
    assert found == [THINK + turn["content"] + "<|im_end|>" for turn in (TURNS[1], TURNS[3])]
    assert encode(tokenizer, {"messages": TURNS}, chat_template="training").notes == ()
    with pytest.raises(UserError, match="TRL has no training variant of this tokenizer's template; leave"):
        encode(make_tokenizer(core, PLAIN), {"messages": TURNS}, chat_template="training")


def test_turns_whose_reasoning_is_left_out_as_at_inference_are_not_supervised(core: Tokenizer) -> None:
    tokenizer = qwen3(core)
    assert trained(tokenizer, {"messages": REASONED}) == ["<think>\nR2.\n</think>\n\nA2.<|im_end|>"]
    assert encode(tokenizer, {"messages": REASONED}).notes == ("reasoning", "own")
    assert encode(tokenizer, {"messages": REASONED}, supervise_all=True).notes == ("reasoning supervised",)
    both = trained(tokenizer, {"messages": REASONED}, chat_template="training")
    assert both == [f"<think>\nR{n}.\n</think>\n\nA{n}.<|im_end|>" for n in (1, 2)]


@pytest.mark.parametrize("supervise_all", [False, True])
def test_reasoning_that_only_the_training_variant_keeps_is_kept(core: Tokenizer, supervise_all: bool) -> None:
    tokenizer = make_tokenizer(core, from_trl("deepseek_r1_distill"), "<eos>")
    encoded = encode(tokenizer, {"messages": IN_CONTENT}, supervise_all=supervise_all)
    assert "R1." in tokenizer.decode([label for label in encoded.labels if label >= 0])
    assert encoded.notes == ("training",)


def test_the_variant_may_add_what_ends_the_last_turn(core: Tokenizer) -> None:
    roles = "<|user|> <|assistant|> <|system|> <|observation|>"
    tokenizer = make_tokenizer(core, from_trl("glm4moe"), "<eos>", roles)
    assert trained(tokenizer, {"messages": TURNS})[-1].endswith("stars \u2605.<|user|>")
    assert encode(tokenizer, {"messages": TURNS}).stop_tokens == [tokenizer.convert_tokens_to_ids("<|user|>")]


# ---- named variants ----


def test_rows_with_tools_take_the_variant_that_the_tokenizer_takes_for_them(core: Tokenizer) -> None:
    tokenizer = make_tokenizer(core, None, "<|im_end|>", IM)
    tokenizer.chat_template = {"default": CHATML, "tool_use": from_trl("qwen2_5"), "rag": PLAIN}
    with_tools = encode(tokenizer, {"messages": TOOL_TURNS, "tools": [TOOL]})
    example = to_example({"messages": TOOL_TURNS, "tools": [TOOL]})
    expected = tokenizer.apply_chat_template(example.messages, tools=example.tools, tokenize=False)
    assert tokenizer.decode(with_tools.input_ids) == expected
    assert "<tool_call>" in expected
    without = encode(tokenizer, {"messages": TURNS})
    assert tokenizer.decode(without.input_ids) == tokenizer.apply_chat_template(TURNS, tokenize=False)


def test_variants_without_a_default_are_named(core: Tokenizer) -> None:
    tokenizer = make_tokenizer(core, None)
    tokenizer.chat_template = {"tool_use": CHATML, "rag": PLAIN}
    with pytest.raises(UserError, match=r"only named chat templates \(rag, tool_use\), and none named default"):
        encode(tokenizer, {"messages": TURNS})


# ---- the date ----


@pytest.mark.parametrize("name", ["llama3_2", "gptoss"])
def test_a_template_prints_the_date_of_the_run(core: Tokenizer, name: str) -> None:
    tokenizer = make_tokenizer(core, from_trl(name))
    assert prints_date(tokenizer.chat_template)
    assert prints_date({"default": CHATML, "tool_use": from_trl(name)})
    first, again, later = (
        encode(tokenizer, {"messages": TURNS}, day=date.fromisoformat(day)).input_ids
        for day in ("2025-03-04", "2025-03-04", "2025-03-05")
    )
    assert first == again != later
    printed = "04 Mar 2025" if name == "llama3_2" else "2025-03-04"
    assert printed in tokenizer.decode(first)


def test_a_template_without_a_date_is_known() -> None:
    assert not prints_date(CHATML)
    assert not prints_date(None)
    assert not prints_date({"default": CHATML})


# ---- weights ----


@pytest.mark.parametrize("name", ["qwen2_5", "chatml", "qwen3"])
@pytest.mark.parametrize("supervise_all", [False, True])
def test_a_turn_of_weight_0_is_not_supervised(core: Tokenizer, name: str, supervise_all: bool) -> None:
    tokenizer = make_tokenizer(core, CHATML if name == "chatml" else from_trl(name), "<|im_end|>", IM)
    unweighted = trained(tokenizer, {"messages": TURNS}, supervise_all=supervise_all)
    for index in (1, 3):
        turns = [{**turn, "weight": 0} if number == index else turn for number, turn in enumerate(TURNS)]
        found = trained(tokenizer, {"messages": turns}, supervise_all=supervise_all)
        if supervise_all:
            assert TURNS[index]["content"] + "<|im_end|>" not in "".join(found)
            assert TURNS[4 - index]["content"] + "<|im_end|>" in "".join(found)
            assert TURNS[0]["content"] in "".join(found)
        else:
            assert found == [unweighted[index == 1]]


@pytest.mark.parametrize("supervise_all", [False, True])
def test_a_weight_counts_where_the_template_marks_the_eos_behind_the_last_turn(
    core: Tokenizer, supervise_all: bool
) -> None:
    tokenizer = make_tokenizer(core, from_trl("phi3_5"), "<|endoftext|>", "<|user|> <|assistant|> <|end|>")
    row = {"messages": [TURNS[0], {**TURNS[1], "weight": 0}, *TURNS[2:]]}
    found = "".join(trained(tokenizer, row, supervise_all=supervise_all))
    assert TURNS[1]["content"] not in found
    assert TURNS[3]["content"] + "<|end|>" in found
    two_answers = {"messages": [TURNS[0], {**TURNS[1], "weight": 0}, TURNS[3]]}
    assert "".join(trained(tokenizer, two_answers)) == TURNS[3]["content"] + "<|end|><|endoftext|>"
    as_completion = {"prompt": TURNS[:3], "completion": TURNS[3:]}
    assert "".join(trained(tokenizer, as_completion)) == TURNS[3]["content"] + "<|end|><|endoftext|>"


def test_a_second_answer_in_a_row_does_not_take_in_the_first(core: Tokenizer) -> None:
    turns = [TURNS[0], {**TURNS[1], "weight": 0}, TURNS[3]]
    found = trained(qwen3(core), {"messages": turns})
    assert len(found) == 1
    assert TURNS[1]["content"] not in found[0]
    assert found[0].endswith(TURNS[3]["content"] + "<|im_end|>")


def test_a_turn_of_weight_0_in_the_prompt_is_left_out_of_the_loss_on_all(core: Tokenizer) -> None:
    row = {"prompt": [TURNS[0], {**TURNS[1], "weight": 0}, TURNS[2]], "completion": TURNS[3:]}
    found = "".join(trained(make_tokenizer(core, CHATML, "<|im_end|>", IM), row, supervise_all=True))
    assert TURNS[1]["content"] not in found
    assert TURNS[0]["content"] in found


# ---- spans and stop tokens as plain values ----


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("<end>\n<user>", "<end>\n", "<end>\n"), ("<end>\n\n  <user>", "<end> <user>", "<end>\n\n  <user>"),
            ("\nuser:", "<eos>", "\n"),
        ("<a></think>Yes", "<a><think>\n", "<a>"), ("[a]b", "[a]c", "[a]"), ("a < b", "a < c", "a < "), ("", "a", ""),
    ],
)  # fmt: skip
def test_how_far_two_texts_agree(one: str, other: str, expected: str) -> None:
    assert one[: shared(one, other)[0]] == expected


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("..ab1", [1]), ("..ab1.", [1]), ("..ab1 ", [1]), ("..ab1..ab2", [2]), ("..ab", []), ("..ab ", []),
        ("ab1.2", [2, 1]), ("ab12", [2]), ("ab1ab", []), ("1..", [1]), ("....", []), ("", []),
    ],
)  # fmt: skip
def test_the_tokens_at_which_generation_stops(labels: str, expected: list[int]) -> None:
    """`.` is not supervised, digits are special tokens."""
    ids = [-100 if one == "." else int(one) if one.isdigit() else ord(one) for one in labels]
    assert stop_tokens(ids, lambda place: labels[place] in " .", {1, 2}) == expected
