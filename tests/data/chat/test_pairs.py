"""The tokens before both answers of a pair are the same, or the row is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.data.chat.test_rows_arrive import LISTS_ONLY, NAMES, ask, call, encoder_of, encoder_of_trl, say, template
from tests.data.test_tokenize import core, make_tokenizer
from unsloth_ddp.data.chat.labels import first_supervised
from unsloth_ddp.data.chat.tokenize import EncodedRow, Encoder, encode_row
from unsloth_ddp.data.sources.formats import Example
from unsloth_ddp.data.sources.preference import to_pair
from unsloth_ddp.utils.errors import UserError

__all__ = ["core"]

THOUGHT = "<think>\nbecause\n</think>\n\n"
REASONED = [ask("q1"), say(f"{THOUGHT}Earlier."), ask("q2")]
PARTS = {"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]}
# Rows whose answers a template may render in different forms, with their prompts.
PAIRS: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any]]] = {
    "reasoning in one": ([ask("q1")], say(f"{THOUGHT}Good."), say("Bad.")),
    "reasoning in one, and before": (REASONED, say(f"{THOUGHT}Good."), say("Bad.")),
    "reasoning before": (REASONED, say("Good."), say("Bad.")),
    "a key of reasoning in one": ([ask("q1")], say("Good.", reasoning_content="because"), say("Bad.")),
    "parts in one": ([PARTS], say([{"type": "text", "text": "Go"}, {"type": "text", "text": "od."}]), say("Bad.")),
    "a call in one": (REASONED, say("", tool_calls=[call(1, {"a": 1})]), say("Bad.")),
}  # fmt: skip
ALWAYS = ("reasoning before", "parts in one")


def encode(encoder: Encoder, row: dict[str, Any]) -> EncodedRow | str:
    try:
        return encode_row(encoder, Example.from_json(to_pair(json.loads(json.dumps(row))).to_json()), 4096)
    except UserError as error:
        return str(error)


def prompts(found: EncodedRow) -> list[list[int]]:
    """Return the tokens before each answer."""
    middle = found.parts[0]
    halves = [(found.input_ids[:middle], found.labels[:middle]), (found.input_ids[middle:], found.labels[middle:])]
    return [ids[: first_supervised(labels)] for ids, labels in halves]


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_training") and name not in LISTS_ONLY])
def test_both_answers_follow_the_same_tokens(core: Tokenizer, name: str) -> None:
    encoder = encoder_of_trl(core, name)
    for kind, (prompt, chosen, rejected) in PAIRS.items():
        for row in ({"chosen": [chosen], "rejected": [rejected]}, {"chosen": [rejected], "rejected": [chosen]}):
            found = encode(encoder, {"prompt": prompt, **row})
            if isinstance(found, str):
                assert kind not in ALWAYS, (kind, found)
                continue
            one, other = prompts(found)
            assert one == other, kind
            asked = prompt[-1]["content"] if isinstance(prompt[-1]["content"], str) else "Two."
            assert asked.split()[-1] in encoder.tokenizer.decode(one), kind


def test_a_pair_is_rendered_in_one_form_where_each_answer_alone_would_take_another(core: Tokenizer) -> None:
    prompt, chosen, rejected = PAIRS["reasoning in one, and before"]
    encoder = encoder_of_trl(core, "deepseek_r1_distill")
    found = encode(encoder, {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]})
    assert isinstance(found, EncodedRow), found
    assert found.notes == ("training", "unprompted")
    decoded = [encoder.tokenizer.decode(ids) for ids in prompts(found)]
    # The generation prompt opens a block that one of the answers lacks; it belongs to the other answer then.
    assert decoded[0] == decoded[1] and decoded[0].count("because") == 1 and decoded[0].endswith("Assistant\uff5c>")


def test_answers_that_change_their_prompt_are_refused(core: Tokenizer) -> None:
    # Reasoning before is shown if the last message has some.
    source = template(
        "{% if messages[-1].thinking %}{{ m.thinking }}{% endif %}{{ m['content'] }}{% if m.thinking and not "
        "messages[-1].thinking %} {% endif %}"
    )
    turns = [ask("q1"), say("Earlier.", thinking="because"), ask("q2")]
    row = {"prompt": turns, "chosen": [say("Good.", thinking="so")], "rejected": [say("Bad.")]}
    found = encode(encoder_of(core, source), row)
    assert isinstance(found, str) and "renders the prompt differently before the two answers" in found
    row["rejected"] = [say("Bad.", thinking="no")]
    assert isinstance(encode(encoder_of(core, source), row), EncodedRow)


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [("Is it? ", "Yes", "No"), ("Is the sky blue? ", "Yes, it is", "\u2605"), ("Add 2 and 3: ", " indented", "\n")],
)
def test_a_token_across_the_end_of_a_prompt_belongs_to_both_answers(
    core: Tokenizer, prompt: str, chosen: str, rejected: str
) -> None:
    encoder = Encoder(make_tokenizer(core, None), supervise_all=False)
    for one, other in ((chosen, rejected), (rejected, chosen)):
        found = encode(encoder, {"prompt": prompt, "chosen": one, "rejected": other})
        assert isinstance(found, EncodedRow), found
        before, behind = prompts(found)
        assert before == behind
        assert len(prompt) - len(encoder.tokenizer.decode(before)) in (0, 1)
        halves = found.labels[: found.parts[0]], found.labels[found.parts[0] :]
        answers = [encoder.tokenizer.decode([label for label in half if label >= 0]) for half in halves]
        assert all(answer.endswith(f"{text}<eos>") for answer, text in zip(answers, (one, other), strict=True))
