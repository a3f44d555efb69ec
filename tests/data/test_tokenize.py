"""Decodes what is supervised and compares it with what the assistant said and the token that ends its turn."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from unsloth_ddp.data.chat.template import check_chat_template, read_chat_template
from unsloth_ddp.data.chat.tokenize import Encoder
from unsloth_ddp.data.sources.formats import to_example
from unsloth_ddp.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TRL_TEMPLATES = Path(trl.__file__).parent / "chat_templates"
TEXTS = ["Is the sky blue? Yes, it is blue today.", "user assistant system\n\n", "Add 2 and 3: five.\n  indented"] * 4

TURNS = [
    {"role": "user", "content": "Is the sky blue?"},
    {"role": "assistant", "content": "Yes, it is."},
    {"role": "user", "content": "And at\nnight?"},
    {"role": "assistant", "content": "Black,\n\n  with stars \u2605."},
]
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
TOOL_TURNS = [
    {"role": "user", "content": "Add 2 and 3."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "5"},
    {"role": "assistant", "content": "Five."},
]

PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'assistant: ' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# EOS ends the chat, not each turn, as in Phi-3.
EOS_LAST = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>\n' }}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}{% if add_generation_prompt %}{{ "
    "'<|assistant|>' }}{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}{% else "
    "%}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
# The end of the turn stands outside the marks, behind a line break.
MARKED_CONTENT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] == 'assistant' %}{% generation %}{{ "
    "m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ '\n<|end|>' }}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
NUMBERED = (
    "{{ messages | length ~ ' turns\n' }}"
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
)

GROUPED = (
    "{% for role in ('user', 'assistant') %}"
    "{% for m in messages if m['role'] == role %}{{ m['content'] + '\n' }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="session")
def core() -> Tokenizer:
    """A byte-level BPE that merges across words and spaces as real ones do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def make_tokenizer(
    core: Tokenizer, template: str | None, eos: str = "<eos>", special: str = "", trim_offsets: bool = False
) -> Any:
    """The tokenizer with a template and its special tokens (names separated by spaces)."""
    mine = Tokenizer.from_str(core.to_str())
    if trim_offsets:
        mine.post_processor = processors.ByteLevel(trim_offsets=True)
    names = [name for name in special.split() if name != eos]
    return PreTrainedTokenizerFast(
        tokenizer_object=mine,
        bos_token="<bos>",
        eos_token=eos,
        pad_token="<pad>",
        additional_special_tokens=names,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def from_trl(name: str) -> str:
    return (TRL_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def supervised(tokenizer: Any, encoded: dict[str, list[int]]) -> list[str]:
    """The text of each unbroken run of supervised tokens."""
    runs: list[list[int]] = []
    previous = False
    for token, label in zip(encoded["input_ids"], encoded["labels"], strict=True):
        assert label in (-100, token)
        if label != -100:
            runs = runs if previous else [*runs, []]
            runs[-1].append(token)
        previous = label != -100
    return [tokenizer.decode(run) for run in runs]


def encode(tokenizer: Any, row: dict[str, Any], *, supervise_all: bool = False) -> dict[str, list[int]]:
    # Rows are kept as JSON between reading and tokenizing.
    example = to_example(json.loads(json.dumps(row)))
    row = Encoder(tokenizer, supervise_all=supervise_all).encode(example)
    return {"input_ids": row.input_ids, "labels": row.labels}


ANSWERS = [TURNS[1]["content"], TURNS[3]["content"]]
THINK = "<think>\n\n</think>\n\n"
IM = "<|im_start|> <|im_end|>"
LLAMA = "<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|>"
ROLES = "<|system|> <|user|> <|assistant|> <|end|>"
# template, EOS, special tokens, what is supervised of TURNS
CASES = {
    "qwen2_5": (from_trl("qwen2_5"), "<|im_end|>", IM, [a + "<|im_end|>" for a in ANSWERS]),
    # Only the last turn has the block of reasoning, as at inference.
    "qwen3": (from_trl("qwen3"), "<|im_end|>", IM, [ANSWERS[0] + "<|im_end|>", THINK + ANSWERS[1] + "<|im_end|>"]),
    "llama3": (from_trl("llama3"), "<|eot_id|>", LLAMA, [a + "<|eot_id|>" for a in ANSWERS]),
    "gemma": (from_trl("gemma"), "<eos>", "<start_of_turn> <end_of_turn>", [a + "<end_of_turn>" for a in ANSWERS]),
    "phi3": (from_trl("phi3"), "<eos>", ROLES, [ANSWERS[0] + "<|end|>", ANSWERS[1] + "<|end|>", "<eos>"]),
    "the kit's chatml": (read_chat_template("chatml"), "<eos>", IM, [a + "<|im_end|>" for a in ANSWERS]),
    "chatml, no special tokens": (
        read_chat_template("chatml"), "<eos>", "", [ANSWERS[0] + "<|im_end|>", ANSWERS[1] + "<|im_end|>\n<eos>"],
    ),
    "marks without the end of turn": (MARKED_CONTENT, "<eos>", ROLES, [a + "\n<|end|>" for a in ANSWERS]),
    "no marks: chatml": (CHATML, "<eos>", IM, [a + "<|im_end|>" for a in ANSWERS]),
    "no marks: EOS last": (EOS_LAST, "<eos>", ROLES, [ANSWERS[0] + "<|end|>", ANSWERS[1] + "<|end|>\n<eos>"]),
    "no marks: [INST]": (INST, "<eos>", "", [" " + a + "<eos>" for a in ANSWERS]),
    "no marks, roles end turns": (NO_END, "<eos>", ROLES, [ANSWERS[0] + "<|user|>", ANSWERS[1] + "<eos>"]),
    # The space behind the first colon is one token with the word behind it.
    "no marks: plain text": (PLAIN, "<eos>", "", [" " + ANSWERS[0], ANSWERS[1] + "\n<eos>"]),
}  # fmt: skip


@pytest.mark.parametrize("trim_offsets", [False, True], ids=["offsets", "trimmed offsets"])
@pytest.mark.parametrize("name", CASES)
def test_exactly_the_assistant_is_supervised(core: Tokenizer, name: str, trim_offsets: bool) -> None:
    template, eos, special, expected = CASES[name]
    tokenizer = make_tokenizer(core, template, eos, special, trim_offsets)
    assert supervised(tokenizer, encode(tokenizer, {"messages": TURNS})) == expected


@pytest.mark.parametrize("name", CASES)
def test_loss_on_all_supervises_the_whole_rendered_chat(core: Tokenizer, name: str) -> None:
    template, eos, special, _ = CASES[name]
    tokenizer = make_tokenizer(core, template, eos, special)
    encoded = encode(tokenizer, {"messages": TURNS}, supervise_all=True)
    rendered = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert encoded["labels"] == encoded["input_ids"]
    assert supervised(tokenizer, encoded) in ([rendered], [rendered + eos])
    assert tokenizer.decode(encoded["input_ids"]).rstrip().endswith((eos, "<|im_end|>", "<end_of_turn>", "<|end|>"))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
@pytest.mark.parametrize("as_text", [False, True], ids=["objects", "JSON text"])
def test_tool_calls_are_supervised_and_tool_results_are_not(core: Tokenizer, name: str, as_text: bool) -> None:
    template, eos, special, _ = CASES[name]
    tokenizer = make_tokenizer(core, template, eos, special)
    tools: Any = json.dumps([TOOL]) if as_text else [TOOL]
    encoded = encode(tokenizer, {"messages": TOOL_TURNS, "tools": tools})
    last = "" if name == "qwen2_5" else THINK
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
    assert supervised(tokenizer, encoded) == [call, last + "Five.<|im_end|>"]
    assert "Add." in tokenizer.decode(encoded["input_ids"])


@pytest.mark.parametrize("name", ["qwen2_5", "the kit's chatml", "no marks: chatml", "no marks: [INST]"])
def test_a_prompt_of_messages_is_not_supervised(core: Tokenizer, name: str) -> None:
    template, eos, special, expected = CASES[name]
    tokenizer = make_tokenizer(core, template, eos, special)
    row = {"prompt": TURNS[:3], "completion": TURNS[3:]}
    assert supervised(tokenizer, encode(tokenizer, row)) == expected[1:]
    row = {"prompt": TURNS[:1], "completion": TURNS[1:]}
    assert supervised(tokenizer, encode(tokenizer, row)) == expected
    everything = encode(tokenizer, row, supervise_all=True)
    assert everything["labels"] == everything["input_ids"]


@pytest.mark.parametrize("name", ["the kit's chatml", "no marks: chatml", "llama3"])
def test_an_empty_answer_still_ends(core: Tokenizer, name: str) -> None:
    template, eos, special, _ = CASES[name]
    tokenizer = make_tokenizer(core, template, eos, special)
    end = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    row = {"messages": [TURNS[0], {"role": "assistant", "content": ""}]}
    assert supervised(tokenizer, encode(tokenizer, row)) == [end]


def test_a_chat_that_ends_with_the_user_gets_no_end_of_its_own(core: Tokenizer) -> None:
    tokenizer = make_tokenizer(core, PLAIN)
    encoded = encode(tokenizer, {"messages": TURNS[:3]})
    assert supervised(tokenizer, encoded) == [" " + ANSWERS[0]]
    assert tokenizer.eos_token_id not in encoded["input_ids"]


@pytest.mark.parametrize("supervise_all", [False, True])
def test_plain_text_is_supervised_as_a_whole_with_eos(core: Tokenizer, supervise_all: bool) -> None:
    tokenizer = make_tokenizer(core, None)
    encoded = encode(tokenizer, {"text": "Is the sky blue?"}, supervise_all=supervise_all)
    assert supervised(tokenizer, encoded) == ["Is the sky blue?<eos>"]


@pytest.mark.parametrize("text", ["Blue.<eos>", "Blue.<eos>\n"])
def test_a_text_that_ends_with_eos_gets_no_second(core: Tokenizer, text: str) -> None:
    tokenizer = make_tokenizer(core, None)
    assert tokenizer.decode(encode(tokenizer, {"text": text})["input_ids"]) == text


def test_tokens_that_the_tokenizer_adds_itself_appear_once(core: Tokenizer) -> None:
    tokenizer = make_tokenizer(core, None)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", bos), ("<eos>", eos)]
    )
    for text in ("Blue.", "<bos>Blue."):
        encoded = encode(tokenizer, {"text": text})
        assert tokenizer.decode(encoded["input_ids"]) == "<bos>Blue.<eos>"
        assert supervised(tokenizer, encoded)[0].endswith("Blue.<eos>")
    assert supervised(tokenizer, encode(tokenizer, {"prompt": "Blue.", "completion": ""})) == ["<eos>"]


@pytest.mark.parametrize("trim_offsets", [False, True], ids=["offsets", "trimmed offsets"])
@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("Is the sky blue? ", "Yes.", " Yes.<eos>"),  # " Y" is one token over the border
        ("Is the sky blue?", " Yes.", " Yes.<eos>"),
        ("Is it \u2605?", "\u2605\u2606 yes", "\u2605\u2606 yes<eos>"),
        ("indented:", "\n      Yes.", "\n      Yes.<eos>"),
        ("Is the sky blue?", "", "<eos>"),
    ],
)
def test_a_completion_is_supervised_from_its_first_character(
    core: Tokenizer, prompt: str, completion: str, expected: str, trim_offsets: bool
) -> None:
    tokenizer = make_tokenizer(core, None, trim_offsets=trim_offsets)
    row = {"prompt": prompt, "completion": completion}
    assert supervised(tokenizer, encode(tokenizer, row)) == [expected]
    assert supervised(tokenizer, encode(tokenizer, row, supervise_all=True)) == [prompt + completion + "<eos>"]


def test_no_template_is_refused_with_the_fix(core: Tokenizer) -> None:
    with pytest.raises(UserError, match="no chat template; give one with --chat_template"):
        encode(make_tokenizer(core, None), {"messages": TURNS})


def test_a_template_that_takes_the_turns_apart_is_refused_with_the_fix(core: Tokenizer) -> None:
    tokenizer = make_tokenizer(core, GROUPED)
    with pytest.raises(UserError, match=r"rewrites earlier turns.*{% generation %}.*--loss_on all"):
        encode(tokenizer, {"messages": TURNS})
    encoded = encode(tokenizer, {"messages": TURNS}, supervise_all=True)
    assert encoded["labels"] == encoded["input_ids"]


def test_a_text_that_changes_with_the_length_of_the_chat_hides_no_turn(core: Tokenizer) -> None:
    tokenizer = make_tokenizer(core, NUMBERED)
    found = supervised(tokenizer, encode(tokenizer, {"messages": TURNS}))
    assert [text.strip() for text in found] == [
        f"assistant: {TURNS[1]['content']}",
        f"assistant: {TURNS[3]['content']}\n<eos>",
    ]


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{% generation %}{{ messages"])
def test_a_template_that_is_not_jinja_is_refused(core: Tokenizer, template: str) -> None:
    with pytest.raises(UserError, match=r"chat template (is not valid Jinja|cannot render the row)"):
        encode(make_tokenizer(core, template), {"messages": TURNS})


def test_what_a_template_raises_is_told(core: Tokenizer) -> None:
    system = {"role": "system", "content": "Be brief."}
    with pytest.raises(UserError, match=r"cannot render the row .*System role not supported.*; change the row, or"):
        encode(make_tokenizer(core, from_trl("gemma")), {"messages": [system, *TURNS]})


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(UserError, match="slow one"):
        Encoder(Slow(), supervise_all=False)


def test_templates_are_read_by_name_or_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(PLAIN, encoding="utf-8")
    assert read_chat_template(str(path)) == PLAIN
    assert "<|im_start|>" in read_chat_template("chatml")
    path.write_bytes(b"\xff\xfe")
    for wanted in (str(path), str(tmp_path), str(tmp_path / "none"), "x" * 5000, "~nobody_here/x", "chat\0ml"):
        with pytest.raises(UserError, match=r"chat_template .*(give a Jinja file, chatml|cannot be read)"):
            read_chat_template(wanted)


def test_a_file_that_is_not_jinja_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{% for m in messages %}\n{{ m.content }", encoding="utf-8")
    with pytest.raises(
        UserError, match=r"chat_template .*mine.jinja is not valid Jinja: unexpected '}' \(line 2\); fix the"
    ):
        check_chat_template(str(path))


ENDED = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (json.dumps({"chat_template": ENDED, "other": 1}), None),
        (json.dumps({"chat_template": [{"name": "default", "template": ENDED}]}), None),
        (json.dumps(ENDED), None),
        (json.dumps(ENDED)[1:-1], "is escaped as in JSON"),
        ('{"a": 1}', "is JSON without a chat_template"),
        (f"Mine:\n```\n{ENDED}\n```\n", "writes '```' behind the generation prompt"),
        (f"<x>{ENDED}</x>", "writes '</x>' behind the generation prompt"),
        ("chat_template: |\n  " + ENDED, "begins with 'chat_template:'"),
        ("# Notes\nof the {{ date }}", "does not read messages"),
    ],
)
def test_a_template_in_another_file_is_read_or_refused(tmp_path: Path, text: str, sentence: str | None) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(text, encoding="utf-8")
    if sentence:
        with pytest.raises(UserError, match=re.escape(f"mine.jinja {sentence}")):
            check_chat_template(str(path))
        return
    check_chat_template(str(path))
    assert read_chat_template(str(path)) in (ENDED, {"default": ENDED})


def test_templates_of_models_are_taken() -> None:
    for path in sorted(TRL_TEMPLATES.glob("*.jinja")):
        check_chat_template(str(path))


@pytest.mark.parametrize(
    "extra", ["{%- generation -%}{{ x }}{%- endgeneration -%}", "{% for m in x %}{% break %}{% endfor %}"]
)
def test_tags_of_transformers_are_jinja(tmp_path: Path, extra: str) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text(PLAIN + extra, encoding="utf-8")
    check_chat_template(str(path))


def test_the_demo_rows_are_supervised_from_the_answer_to_the_end_of_turn() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(ROOT / "demo" / "model")
    for line in (ROOT / "demo" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:50]:
        row = json.loads(line)
        answers = [m["content"] + "<|end|>" for m in row["messages"] if m["role"] == "assistant"]
        assert supervised(tokenizer, encode(tokenizer, row)) == answers
