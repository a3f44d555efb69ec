"""Markup that a row and its template both write or that a template takes out, and prompts that rows lack, are told."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.data.chat.test_rows_arrive import LOOP, TURN, ask, encoder_of, result, say, template
from tests.data.test_tokenize import PLAIN, TEXTS, core, from_trl, make_tokenizer, supervised
from unsloth_ddp.data.chat.tokenize import EncodedRow, Encoder
from unsloth_ddp.data.row_report import NOTES

__all__ = ["core"]

# Templates that read a directive in the system message, as SmolLM3's does, one of them only to change the generation
# prompt.
DIRECTIVE = "{% set quiet = messages[0]['role'] == 'system' and '/quiet' in messages[0]['content'] %}"
TAKEN = DIRECTIVE + template("{{ m['content'].replace('/quiet', '') | trim }}")
CLOSED = "{% if quiet %}<think></think>{% endif %}"
QUIET = DIRECTIVE + (LOOP % (TURN % "{{ m['content'] }}")).replace(
    "assistant\n{% endif", f"assistant\n{CLOSED}{{% endif"
)
CLOSED_ALWAYS = QUIET.replace("{% if quiet %}", "{% if true %}")
BLOCKS = template("{% if m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}")
TOOL_ANSWER = {"role": "tool", "content": "<tool_response>\n2\n</tool_response>"}
CALLED = [ask("q1"), say('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'), TOOL_ANSWER, say("Two.")]


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


@pytest.mark.parametrize(
    ("source", "turns", "notes"),
    [
        # Qwen 3's template looks for the tag in questions, Qwen 2.5's only writes it.
        (from_trl("qwen3"), CALLED, {"twice\t<tool_response>", "twice\t</tool_response>"}),
        (from_trl("qwen2_5"), CALLED, {"twice\t<tool_response>", "twice\t</tool_response>"}),
        (from_trl("qwen3"), [*CALLED[:2], {**TOOL_ANSWER, "content": "2"}, CALLED[3]], set()),
        (from_trl("qwen3"), [ask("q1"), say("a", reasoning_content="<think>b</think>")],
            {"twice\t<think>", "twice\t</think>"}),
        (PLAIN, [{"role": "user", "content": "user: Hi"}, say("Yes: user: no.")], {"twice\tuser:"}),
        (PLAIN, [{"role": "user", "content": "user"}, say("assistant")], set()),
        (from_trl("qwen3_6"), [ask("q1"), say("<think>\nfirst I have to")], {"cut\t<think>", "second block"}),
        (from_trl("qwen2_5"), [ask("q1"), say("<think>\nfirst I have to")], {"cut\t<think>"}),
        (from_trl("qwen2_5"), [ask("q1"), say("<think>\nfirst</think> Yes."), ask("q2"), say("No.")], set()),
        (from_trl("qwen2_5"), [ask("q1"), say("<think>\nfirst", weight=0), ask("q2"), say("No.")], set()),
        (BLOCKS, [ask("q1"), say("<think>b</think>a")], {"second block"}),
        (from_trl("qwen3"), [ask("q1"), say("The tag </think> ends a block.")], {"unopened\t</think>"}),
        # This template does not look for the tag, so the answer stays whole.
        (from_trl("qwen2_5"), [ask("q1"), say("The tag </think> ends a block.")], set()),
        (TAKEN, [system("Look in /quiet/a"), ask("q1"), say("Yes.")], {"taken\t/quiet"}),
        (TAKEN, [system("Be /quiet"), ask("q1"), say("Yes.")], {"taken\t/quiet"}),
        (TAKEN, [system("Be quiet"), ask("q1"), say("Yes.")], set()),
        (QUIET, [system("Look in /quiet/a"), ask("q1"), say("Yes.")], {"prompt\t<think></think>"}),
    ],
)  # fmt: skip
def test_markup_of_rows_and_templates_is_told(core: Tokenizer, source: str, turns: list[Any], notes: set[str]) -> None:
    found = result(encoder_of(core, source), {"messages": turns})
    assert isinstance(found, EncodedRow), found
    assert set(found.notes) - {"own"} == notes
    assert all(NOTES[note.partition("\t")[0]].count("{}") == note.count("\t") for note in found.notes)


@pytest.mark.parametrize(
    ("source", "answer", "lacking"),
    [
        # Gemma 4's larger models and DeepSeek V3.2 close a block in the prompt, and the history lacks it.
        (CLOSED_ALWAYS, say("Yes."), "prompt\t<think></think>"),
        (from_trl("qwen3_5_nothink"), say("<think>\nb\n</think>\n\nYes."), "prompt\t</think>"),
        (from_trl("qwen3_5_nothink"), say("Yes."), ""),
        (from_trl("qwen3_5_think"), say("Yes."), ""),
        (from_trl("deepseek_r1_distill"), say("Yes."), "unprompted"),
        (from_trl("qwen3"), say("Yes."), ""),
    ],
)
def test_an_answer_that_does_not_follow_its_generation_prompt_is_told(
    core: Tokenizer, source: str, answer: dict[str, Any], lacking: str
) -> None:
    encoder = encoder_of(core, source)
    found = result(encoder, {"messages": [ask("q1"), answer]})
    assert isinstance(found, EncodedRow), found
    assert [note for note in found.notes if note.startswith(("prompt", "unprompted"))] == [lacking][: bool(lacking)]
    prompt = encoder.tokenizer.apply_chat_template([ask("q1")], tokenize=False, add_generation_prompt=True)
    begin = next(place for place, label in enumerate(found.labels) if label >= 0)
    assert encoder.tokenizer.decode(found.input_ids[:begin]).startswith(prompt.rstrip()) == (not lacking)
    everything = result(encoder_of(core, source, supervise_all=True), {"messages": [ask("q1"), answer]})
    assert isinstance(everything, EncodedRow) and "prompt" not in str(everything.notes)


def test_the_prompt_is_looked_at_again_where_the_template_reads_a_directive(core: Tokenizer) -> None:
    encoder = encoder_of(core, QUIET)
    turns = [ask("q1"), say("Yes.")] * 6
    # Rows of five stand-ins, behind which the places of turns are no longer looked for.
    for number in range(1, 6):
        found = result(encoder, {"messages": [system("Be brief."), *turns[: 2 * number]]})
        assert isinstance(found, EncodedRow) and found.notes == ()
    found = result(encoder, {"messages": [system("Be /quiet now."), *turns]})
    assert isinstance(found, EncodedRow) and found.notes == ("prompt\t<think></think>",)


# ---- characters that a tokenizer cannot write ----


def tokenizer_of(model: Any, trainer: Any, unknown: str | None) -> Any:
    """Return a tokenizer without byte fallback."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.train_from_iterator([*TEXTS, "<|im_start|> <|im_end|> \n"], trainer)
    source = template("{{ m['content'] }}").replace("\n", " ")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unknown, eos_token="<eos>", chat_template=source
    )


SPECIAL = {"special_tokens": ["<unk>"], "show_progress": False}
WITHOUT_BYTES = {
    "left out": (models.BPE(), trainers.BpeTrainer(vocab_size=200, show_progress=False), None),
    "<unk>": (models.BPE(unk_token="<unk>"), trainers.BpeTrainer(vocab_size=200, **SPECIAL), "<unk>"),
    "<unk> of Unigram": (
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", **SPECIAL),
        "<unk>",
    ),
}


@pytest.mark.parametrize("kind", WITHOUT_BYTES)
@pytest.mark.parametrize("row", [{"messages": [ask("q1"), say("Is it \U0001f600?")]}, {"text": "Is it \U0001f600?"}])
def test_characters_that_do_not_reach_the_tokens_are_named(kind: str, row: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(*WITHOUT_BYTES[kind])
    encoder = Encoder(tokenizer, supervise_all=False)
    for _ in range(2):
        found = result(encoder, row)
        assert isinstance(found, EncodedRow), found
        assert 'unwritten\t"\U0001f600"' in found.notes
        assert "\U0001f600" not in tokenizer.decode(found.input_ids)
    found = result(encoder, {"text": "Is it blue?"})
    assert isinstance(found, EncodedRow) and found.notes == ()


def test_a_tokenizer_with_bytes_writes_every_character(core: Tokenizer) -> None:
    encoder = Encoder(make_tokenizer(core, None), supervise_all=False)
    text = "Caf\u00e9 e\u0301 \u212b \u2605 \U0001f600 \u00a0\t\r\n x"
    found = result(encoder, {"text": text})
    assert isinstance(found, EncodedRow) and found.notes == ()
    assert supervised(encoder.tokenizer, vars(found)) == [text + "<eos>"]
