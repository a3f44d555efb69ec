"""A trainer that a helper makes of the class that the notebook gives it."""

import pytest
from making import LOAD, body, convert_cells, kinds

DATA = "from datasets import load_dataset\ndataset = load_dataset('d', split = 'train')"
CONFIG = "SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4)"
EDITED = (
    "SFTConfig(**ddp_settings(SFTConfig), per_device_train_batch_size=1, "
    "gradient_accumulation_steps=accumulation_steps(2 * 4, 1))"
)
IMPORTS = "from trl import SFTConfig, SFTTrainer\n"
PARSED = "args = HfArgumentParser(SFTConfig).parse_args()\n"


@pytest.mark.parametrize("call", ["build(SFTTrainer, ", "build(cls=SFTTrainer, "])
def test_a_helper_that_is_given_the_trainers_class_makes_a_trainer(call: str) -> None:
    helper = "def build(cls, **kw):\n    return cls(model=model, **kw)\n"
    done = convert_cells(LOAD, DATA, IMPORTS + helper + f"t = {call}args={CONFIG}, train_dataset=dataset)", "t.train()")
    text = body(done)
    assert f"\nt = {call}args={EDITED}, train_dataset=dataset)\n" in text and "\nt.train()\n" in text
    assert "\n    dataset = load_dataset('d', split = 'train')\n" in text and kinds(done) == []


def test_a_helper_that_is_given_classes_trains_and_saves_once() -> None:
    helper = (
        "def run(cls, config):\n    t = cls(model=model, args=config(max_steps=1), train_dataset=dataset)\n"
        "    t.train()\n    model.save_pretrained('x')\n"
    )
    done = convert_cells(LOAD, DATA, IMPORTS + helper + "run(SFTTrainer, SFTConfig)")
    text = body(done)
    assert "\nrun(SFTTrainer, SFTConfig)\n" in text and "    if IS_MAIN:\n        model.save_pretrained('x')\n" in text
    assert "args=ddp_configured(config(max_steps=1), 1)" in text


@pytest.mark.parametrize("made", ["cls", "SFTTrainer"])
def test_arguments_from_a_parser_are_set_where_a_helper_hands_them_on(made: str) -> None:
    helper = f"def build(cls, **kw):\n    return {made}(model=model, **kw)\n"
    done = convert_cells(LOAD, DATA, IMPORTS + PARSED + helper + "t = build(SFTTrainer, args=args)", "t.train()")
    assert "\nt = build(SFTTrainer, args=ddp_configured(args, 1))\nt.train()\n" in body(done).replace("\n\n# %%", "")
