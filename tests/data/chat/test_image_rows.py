"""Rows with images as tokens: what is supervised, what is cut, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import DEMO_MODEL
from tests.tiny_vision import KINDS, draw, save_vision
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.data.chat.tokenize import Encoder, encode_row
from unsloth_ddp.data.images.processing import load_processing
from unsloth_ddp.data.sources.formats import to_example
from unsloth_ddp.utils.errors import UserError

TEXT = {"type": "text", "text": "What is this?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_vl")
    save_vision("qwen3_vl", folder)
    return folder


def encoder_of(model: Path, *, supervise_all: bool = False, template: str | None = None) -> Encoder:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template or tokenizer.chat_template
    return Encoder(tokenizer, supervise_all=supervise_all, processing=load_processing(Settings(model=str(model))))


def row(folder: Path, *, answer: Any = "a red circle", text: str = "What is this?") -> Any:
    image = str(draw(folder / "a.png", "red", "circle", (84, 56)))
    asked = [{"type": "text", "text": text}, {"type": "image", "image": image}, {"type": "text", "text": "Tell me."}]
    return to_example(
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], "tools": None}
    )


def supervised(encoder: Encoder, encoded: Any) -> str:
    return str(encoder.tokenizer.decode([label for label in encoded.labels if label != IGNORED]))


def test_the_answer_is_supervised_and_no_token_of_an_image(model: Path, tmp_path: Path) -> None:
    encoder = encoder_of(model)
    encoded = encoder.encode(row(tmp_path))
    assert supervised(encoder, encoded) == "a red circle<|end|>"
    pad, start, end = encoder.tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"])
    # 84 x 56 pixels in patches of 14, of which four are one token.
    assert encoded.input_ids.count(pad) == 6
    everything = encoder_of(model, supervise_all=True).encode(row(tmp_path))
    ignored = [token for token, label in zip(everything.input_ids, everything.labels, strict=True) if label == IGNORED]
    assert ignored == [start, *[pad] * 6, end]


def test_an_image_in_an_answer_is_not_supervised(model: Path, tmp_path: Path) -> None:
    image = str(draw(tmp_path / "b.png", "blue", "square"))
    answer = [{"type": "text", "text": "like "}, {"type": "image", "image": image}, {"type": "text", "text": " it"}]
    encoder = encoder_of(model)
    assert supervised(encoder, encoder.encode(row(tmp_path, answer=answer))).split() == ["like", "it<|end|>"]


def test_a_row_is_cut_behind_its_last_image_only(model: Path, tmp_path: Path) -> None:
    encoder, example = encoder_of(model), row(tmp_path, answer="a red circle " * 20)
    whole = encoder.encode(example)
    cut = encode_row(encoder, example, whole.image_end)
    assert (len(cut.input_ids), cut.overlong, cut.cuts_image) == (whole.image_end, True, False)
    assert encode_row(encoder, example, whole.image_end - 1).cuts_image
    assert not encode_row(encoder, example, len(whole.input_ids)).overlong


def test_an_image_that_changes_after_it_was_read_is_refused(model: Path, tmp_path: Path) -> None:
    encoder = encoder_of(model)
    encoded = encoder.encode(row(tmp_path))
    unit = {"input_ids": np.array(encoded.input_ids), "images": encoded.images, "rendered": encoded.rendered}
    assert encoder.processing is not None
    assert encoder.processing.tensors(unit)["image_grid_thw"].tolist() == [[1, 4, 6]]
    draw(tmp_path / "a.png", "red", "circle", (56, 56))
    with pytest.raises(UserError, match=r"the images of a row \(.*a.png\) have changed since it was read"):
        encoder.processing.tensors(unit)


def test_larger_images_are_scaled_down_to_fewer_tokens(model: Path, tmp_path: Path) -> None:
    encoder = encoder_of(model)
    many = encoder.encode(row(tmp_path)).input_ids
    encoder.processing = load_processing(Settings(model=str(model), image_max_pixels=28 * 28 * 2))
    assert len(encoder.encode(row(tmp_path)).input_ids) < len(many)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% for p in m.content %}{% if p.type == 'text' %}{{ "
            "p.text }}{% endif %}{% endfor %}{{ '<|end|>' }}{% endfor %}",
         r"the rendered row has 0 image token\(s\) \(<\|image_pad\|>\) for 1 image\(s\); take the token out"),
        ("{{ raise_exception('no lists') }}", r"cannot render the row \(no lists\)"),
    ],
)  # fmt: skip
def test_a_template_that_leaves_out_an_image_is_refused(model: Path, tmp_path: Path, template: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        encoder_of(model, template=template).encode(row(tmp_path))


def test_a_template_that_takes_texts_gets_the_image_token_in_them(model: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    encoder = encoder_of(model, template=template)
    encoded = encoder.encode(row(tmp_path))
    assert encoded.rendered == "<|user|>What is this?<|image_pad|>Tell me.<|end|><|assistant|>a red circle<|end|>"
    assert supervised(encoder, encoded) == "a red circle<|end|>"


def test_an_image_token_that_is_written_in_a_text_is_refused(model: Path, tmp_path: Path) -> None:
    encoder = encoder_of(model)
    with pytest.raises(UserError, match=r"has 2 image token\(s\) .* for 1 image\(s\)"):
        encoder.encode(row(tmp_path, text="<|image_pad|>"))
    with pytest.raises(UserError, match=r"has 1 image token\(s\) .* for 0 image\(s\)"):
        encoder.encode(
            to_example(
                {"messages": [{"role": "user", "content": "<|image_pad|>"}, {"role": "assistant", "content": "b"}]}
            )
        )
    with pytest.raises(UserError, match=r"the text has the model's image token \(<\|image_pad\|>\) and no image"):
        encoder.encode(to_example({"text": "a <|image_pad|> b"}))


def test_a_model_without_a_processor_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there are images, and (model .* takes text only|no processor of model)"):
        load_processing(Settings(model=str(DEMO_MODEL)))


def test_what_the_processor_refuses_is_refused_in_one_sentence(model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("unsloth_ddp.data.images.files.LONGEST_SIDE", 1000)
    image = str(draw(tmp_path / "long.png", "red", "square", (2000, 8)))
    example = to_example(
        {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "b"}], "image": image}
    )
    with pytest.raises(
        UserError, match=r"the model's processor refuses the row: .*ratio.*; change its images or text, or remove"
    ):
        encoder_of(model).encode(example)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "smolvlm"])
def test_what_belongs_to_tokens_is_found(kind: str, tmp_path: Path) -> None:
    save_vision(kind, tmp_path)
    expected = {"qwen3_vl": ["mm_token_type_ids"], "qwen3_5": ["mm_token_type_ids"], "gemma3": ["token_type_ids"]}
    expected["gemma4"] = ["mm_token_type_ids"]
    assert list(load_processing(Settings(model=str(tmp_path))).of_tokens) == expected.get(kind, [])


def test_a_processor_whose_call_unsloth_replaced_is_the_one_of_transformers(tmp_path: Path, monkeypatch) -> None:
    import dill
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    save_vision("gemma3", tmp_path)
    example = row(tmp_path)
    expected = encoder_of(tmp_path).encode(example)

    def without_places(self: Any, images: Any = None, text: Any = None, **options: Any) -> Any:
        raise AssertionError("called")

    monkeypatch.setattr(Gemma3Processor, "__call__", without_places)
    encoder = encoder_of(tmp_path)
    assert encoder.encode(example) == expected
    # As a process that tokenizes receives it.
    assert dill.loads(dill.dumps(encoder)).encode(example) == expected
    assert Gemma3Processor.__call__ is without_places
