"""Chat templates in Ollama's language, read off from what they render."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer

from tests.conftest import DEMO_MODEL
from unsloth_ddp.data.chat.template import read_chat_template
from unsloth_ddp.export.gguf import ollama_template, render_modelfile

LOOP = "{% for m in messages %}"
END = "{% endfor %}{% if add_generation_prompt %}"
GEMMA = (
    LOOP + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n"
    + END + "<start_of_turn>model\n{% endif %}"
)  # fmt: skip
NO_SYSTEM = (
    LOOP + "{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}{{ m.content }}" + END + "{% endif %}"
)
OTHER_SYSTEM = "{% if messages[0].role != 'system' %}[SYS]Be kind.{% endif %}" + GEMMA
DEFAULT_SYSTEM = OTHER_SYSTEM.replace("[SYS]Be kind.", "<start_of_turn>system\n@default@<end_of_turn>\n")
EMPTY_SYSTEM = DEFAULT_SYSTEM.replace("@default@", "")
SYSTEM_IN_USER = (
    "{% set s = messages[0].content if messages[0].role == 'system' else '' %}" + LOOP
    + "{% if m.role == 'user' %}[INST]{{ s }} {{ m.content }}[/INST]{% elif m.role == 'assistant' %}{{ m.content "
        "}}</s>{% endif %}"
    + END + "{% endif %}"
)  # fmt: skip
LAST_ONLY = (
    LOOP + "{% if m.role == 'assistant' and not loop.last %}<past>{{ m.content }}</past>{% else %}<{{ m.role }}>{{ "
        "m.content }}</>{% endif %}"
    + END + "<assistant>{% endif %}"
)  # fmt: skip


def derived(source: str) -> tuple[str, str | None] | None:
    template = jinja2.Environment(keep_trailing_newline=True).from_string(source)  # noqa: S701  # no HTML

    def render(messages: list[Any], prompt: bool) -> str:
        def refuse(reason: str) -> None:
            raise ValueError(reason)

        return template.render(messages=messages, add_generation_prompt=prompt, raise_exception=refuse)

    return ollama_template(render)


def test_a_template_of_one_part_a_message_is_derived() -> None:
    assert derived(GEMMA) == (
        "{{ if .System }}<start_of_turn>system\n{{ .System }}<end_of_turn>\n{{ end }}"
        "{{ if .Prompt }}<start_of_turn>user\n{{ .Prompt }}<end_of_turn>\n{{ end }}"
        "<start_of_turn>model\n{{ .Response }}<end_of_turn>\n",
        None,
    )


def test_a_system_prompt_that_the_template_adds_is_one_of_the_modelfile() -> None:
    """SmolLM2's template does so; in the TEMPLATE it would be repeated before every question."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    # As SmolLM2's, the tokenizer adds no BOS, and BOS is what begins a turn.
    tokenizer.bos_token = "<start_of_turn>"
    tokenizer.chat_template = DEFAULT_SYSTEM.replace("@default@", "Be kind.")
    text, missing = render_modelfile(tokenizer, "m.gguf", [3], plain=False)
    assert missing is None and text.startswith('FROM ./m.gguf\nTEMPLATE """{{ if .System }}<start_of_turn>system\n')
    assert '<end_of_turn>\n"""\nSYSTEM """Be kind."""\nPARAMETER stop "<|end|>"\n' in text


@pytest.mark.parametrize("source", [NO_SYSTEM, OTHER_SYSTEM, EMPTY_SYSTEM, SYSTEM_IN_USER, LAST_ONLY])
def test_what_the_language_cannot_say_is_not_derived(source: str) -> None:
    assert derived(source) is None


def test_text_in_double_braces_is_not_derived() -> None:
    assert derived(GEMMA.replace("<end_of_turn>", "{{ '{{' }}")) is None


def test_the_kits_own_chatml_is_derived() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.chat_template = read_chat_template("chatml")
    text, missing = render_modelfile(tokenizer, "m.gguf", [3], plain=False)
    assert missing is None
    assert "{{ end }}<|im_start|>assistant\n{{ .Response }}<|im_end|>\n" in text
    assert text.endswith('PARAMETER stop "<|end|>"\nPARAMETER stop "<|eos|>"\n')


def test_a_modelfile_without_a_template_says_so() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.chat_template = NO_SYSTEM
    text, missing = render_modelfile(tokenizer, "m.gguf", [3], plain=False)
    assert "TEMPLATE" not in text and missing is not None and missing.startswith("The Modelfile has no TEMPLATE")
    assert 'TEMPLATE """{{ .Prompt }}"""' in render_modelfile(tokenizer, "m.gguf", [3], plain=True)[0]
