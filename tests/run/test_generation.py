"""Check how an answer is generated, and which part of it is written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.conftest import DEMO_MODEL
from unsloth_ddp.data.chat import render_limits
from unsloth_ddp.run.generation import GenerationOptions, PieceStreamer, render_prompt
from unsloth_ddp.utils.errors import UserError

ASK = {"role": "user", "content": "Hi"}


def streamed(pieces: list[str], end: str = "<|im_end|>\n") -> list[str]:
    """Return what is written of the text that arrives in these pieces."""
    written: list[str] = []
    streamer = PieceStreamer(SimpleNamespace(), written.append, end.strip())
    for number, piece in enumerate(pieces):
        streamer.on_finalized_text(piece, stream_end=number == len(pieces) - 1)
    assert streamer.text == "".join(written)
    return written


def test_pieces_are_written_as_they_come() -> None:
    assert streamed(["One ", "two ", "three"]) == ["One", " two", " three"]


def test_an_end_of_turn_in_plain_text_is_not_written_even_in_pieces() -> None:
    assert "".join(streamed(["Yes", ".<|", "im_", "end|>\n<|im_start|>user", " And?"])) == "Yes."
    assert "".join(streamed(["1 <", "| 2"])) == "1 <| 2"


def test_white_space_around_an_answer_is_not_written() -> None:
    assert "".join(streamed(["\n\n", "a\n\n", " b", " \n"])) == "a\n\n b"


def model(positions: int | None = 100, **generation: Any) -> Any:
    text_config = SimpleNamespace(max_position_embeddings=positions)
    config = SimpleNamespace(get_text_config=lambda: text_config)
    return SimpleNamespace(config=config, generation_config=SimpleNamespace(**{"max_new_tokens": None} | generation))


def test_the_generation_config_decides_what_is_not_given() -> None:
    assert GenerationOptions().arguments(model(None), 10) == {"max_new_tokens": 512}
    assert GenerationOptions().arguments(model(max_new_tokens=20), 10) == {"max_new_tokens": 20}
    assert GenerationOptions(30, 0.5).arguments(model(max_new_tokens=20), 10) == {
        "max_new_tokens": 30, "do_sample": True, "temperature": 0.5,
    }  # fmt: skip
    assert GenerationOptions(temperature=0).arguments(model(), 10)["do_sample"] is False


def test_an_answer_ends_with_the_positions_of_the_model() -> None:
    assert GenerationOptions(64).arguments(model(), 90)["max_new_tokens"] == 10
    with pytest.raises(UserError, match=r"has 100 tokens, and the model reads at most 100; .* /reset"):
        GenerationOptions().arguments(model(), 100)


def test_a_prompt_is_rendered_by_the_template_or_is_the_text_itself() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    assert render_prompt(tokenizer, [ASK], GenerationOptions()) == ("<|bos|><|user|>Hi<|end|><|assistant|>", "<|end|>")
    assert render_prompt(tokenizer, [ASK], GenerationOptions(plain=True)) == ("Hi", "")
    with pytest.raises(UserError, match=r"The chat template refuses the conversation: .*roles system, user"):
        render_prompt(tokenizer, [{"role": "tool", "content": "5"}], GenerationOptions())
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template, so it trained on plain text; add --plain"):
        render_prompt(tokenizer, [ASK], GenerationOptions())


def test_a_template_without_an_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The template comes with the run's folder, which may be another's."""
    monkeypatch.setattr(render_limits, "SECONDS", 0.2)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match=r"the chat template cannot render a row .*does not end within"):
        render_prompt(tokenizer, [ASK], GenerationOptions())
