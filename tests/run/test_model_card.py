"""The model card: the Hub's metadata, what it names and what it keeps to itself, and code that runs."""

from __future__ import annotations

import ast
import re

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from tests.run.run_folders import FACTS, HOSTILE, PART, SUMMARY, TOKEN, log_entries, make_run
from tests.run.test_report import Page
from unsloth_ddp.run.documents.model_card import code, plain, render_card, write_card
from unsloth_ddp.run.documents.record import read_run
from unsloth_ddp.run.documents.write import base_license


def facts_with(**model):
    return {**FACTS, "model": {**FACTS["model"], **model}}


def card_of(folder, *, adapter=True) -> ModelCard:
    return ModelCard(render_card(read_run(folder), adapter=adapter))


def test_the_metadata_is_what_the_hub_reads(tmp_path):
    data = card_of(make_run(tmp_path / "r")).data
    assert (data.base_model, data.library_name, data.pipeline_tag) == ("owner/base", "peft", "text-generation")
    assert (data.datasets, data.license) == (["me/chats"], "apache-2.0")
    assert {"lora", "sft", "unsloth", "trl"} <= set(data.tags)
    whole = card_of(make_run(tmp_path / "full", settings={"method": "full"}), adapter=False).data
    assert whole.library_name == "transformers" and "lora" not in whole.tags


def test_only_what_is_on_the_hub_is_in_the_metadata(tmp_path):
    facts = {**facts_with(local=True, license=None), "data": {**FACTS["data"], "hub": []}}
    settings = {"model": "/home/somebody/models/base", "dataset": ["/home/somebody/rows.jsonl"]}
    card = card_of(make_run(tmp_path / "r", facts=facts, settings=settings))
    assert card.data.base_model is None and card.data.datasets is None and card.data.license is None
    assert "This adapter is `base`," in card.text and "`rows.jsonl`" in card.text
    assert "The licence of the base model is not known here" in card.text
    assert "somebody" not in card.content


def test_the_card_says_what_the_model_is(tmp_path):
    text = card_of(make_run(tmp_path / "r", settings={"model_revision": "abc123", "learning_rate": 0.5})).text
    assert "This adapter is `owner/base` (revision `abc123`), fine-tuned with LoRA, on 60 rows." in text
    for line in (
        "| evaluation loss | 0.7500 |", "| exact answers | 100.0% |", "| exact answers before training | 0.0% |",
        "| trained on | 2 x NVIDIA H100, bf16 |", "| `learning_rate` | `0.5` |", "| `lora_r` | `16` |",
    ):  # fmt: skip
        assert line in text
    assert "Trained on `me/chats`, `rows.jsonl`." in text and "| training rows | 60 |" in text
    assert "torch 2.14.0" in text and "names the licence `apache-2.0`" in text and "full_weights" not in text


def test_the_card_of_a_preference_run_names_its_task(tmp_path):
    settings = {"task": "orpo"}
    history = [*log_entries(20), {"step": 20, "eval_loss": 0.5, "eval_rewards/accuracies": 0.625}]
    card = card_of(make_run(tmp_path / "r", settings=settings, history=history))
    assert "orpo" in card.data.tags and "sft" not in card.data.tags
    assert "fine-tuned with ORPO and LoRA, on 60 rows." in card.text
    for line in (
        "| reward accuracy | 62.5% |",
        "| `task` | `orpo` |",
        "| `beta` | `0.1` |",
        "| `sft_weight` | `1.0` |",
    ):
        assert line in card.text
    assert "label_smoothing" not in card.text and "desirable_weight" not in card.text
    assert "`task`" not in card_of(make_run(tmp_path / "sft")).text


def test_a_run_without_evaluation_has_a_card_too(tmp_path):
    facts = {**FACTS, "data": {**FACTS["data"], "evaluation": None}}
    summary = {**SUMMARY, "eval_loss": None, "demo_accuracy_before": None}
    text = card_of(make_run(tmp_path / "r", facts=facts, summary=summary)).text
    assert "| evaluation rows | none |" in text and "before training" not in text


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_the_code_is_python_that_names_the_run(tmp_path, method):
    text = card_of(make_run(tmp_path / "r", settings={"method": method}), adapter=method != "full").text
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        assert "r" in {node.value for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Constant)}
    assert ("load_in_4bit=True" in text) == (method == "qlora")
    assert ("PeftModel.from_pretrained(model, name)" in text) == (method != "full")


def test_an_image_text_model_is_loaded_in_its_class(tmp_path):
    folder = make_run(tmp_path / "r", facts=facts_with(auto_class="AutoModelForImageTextToText"))
    for adapter in (True, False):
        card = card_of(folder, adapter=adapter)
        assert "AutoModelForImageTextToText.from_pretrained" in card.text and "ForCausalLM" not in card.text
        assert card.data.pipeline_tag == "image-text-to-text"


def test_the_code_leaves_the_towers_of_a_4_bit_model_in_16_bit(tmp_path):
    facts = facts_with(auto_class="AutoModelForImageTextToText", unquantized=["lm_head", "model.visual"])
    text = card_of(make_run(tmp_path / "r", facts=facts, settings={"method": "qlora"})).text
    assert "    llm_int8_skip_modules=['lm_head', 'model.visual'],\n)" in text


def test_the_code_names_the_place_of_the_upload(tmp_path):
    assert 'name = "me/mine"' in card_of(make_run(tmp_path / "r", settings={"hub_model_id": "me/mine"})).text


def test_nothing_of_the_user_becomes_markup_and_no_secret_is_shown(tmp_path):
    facts = {**facts_with(license={"license": "other", "license_name": HOSTILE}), "data": {**FACTS["data"], "hub": []}}
    settings = {
        "model": HOSTILE,
        "dataset": [f"{TOKEN}.jsonl", f"{HOSTILE}.jsonl"],
        "hub_model_id": HOSTILE,
        "optim": HOSTILE,
    }
    part = {**PART, "versions": {HOSTILE: HOSTILE}}
    folder = make_run(
        tmp_path / "<b>r",
        facts=facts,
        settings=settings,
        part=part,
        summary={**SUMMARY, "device": HOSTILE, "versions": {HOSTILE: HOSTILE}},
    )
    content = render_card(read_run(folder), adapter=True)
    assert TOKEN not in content and "[hidden]" in content
    page = Page(MarkdownIt("commonmark").enable("table").render(content.split("\n---\n", 1)[1]))
    assert not page.tags() & {"script", "b", "iframe", "img"}
    assert all(str(attrs["href"]).startswith("https://github.com/") for tag, attrs in page.elements if tag == "a")
    assert sum(tag == "pre" for tag, _ in page.elements) == 2 and HOSTILE.split("`")[0] in page.text
    assert ModelCard(content).data.license == "other"


@pytest.mark.parametrize("text, shown", [("a`b|c\nd", "`a'b\\|c d`"), ("", "none"), (5, "`5`")])
def test_code_spans_hold_any_text(text, shown):
    assert code(text) == shown


def test_prose_is_escaped():
    assert plain("<b>[x](y)_z") == r"\<b\>\[x\]\(y\)\_z"


def test_the_merged_model_has_a_card_too(tmp_path):
    folder = make_run(tmp_path / "r", settings={"merge": True})
    (folder / "merged").mkdir()
    assert write_card(read_run(folder)) == [folder / "README.md", folder / "merged" / "README.md"]
    for where, library in ((folder, "peft"), (folder / "merged", "transformers")):
        assert ModelCard.load(where / "README.md").data.library_name == library
    assert "merged into 16-bit weights" in (folder / "merged" / "README.md").read_text()


@pytest.mark.parametrize(
    "card, found",
    [
        ("---\nlicense: mit\n---\n# A model", {"license": "mit"}),
        ("---\nlicense: other\nlicense_name: mine\n---\n", {"license": "other", "license_name": "mine"}),
        ("---\nlicense: [\n---\n", None),
        ("# No metadata", None),
        (None, None),
    ],
)
def test_the_licence_is_that_of_a_local_models_card(tmp_path, card, found):
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert base_license(str(tmp_path), None) == found


def test_the_licence_of_a_hub_model_is_looked_up_in_the_cache_only(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    asked = []

    def cached(*given, **more):
        asked.append((given, more))
        return str(tmp_path / "README.md")

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    assert base_license("owner/base", "abc") == {"license": "mit"}
    assert asked == [(("owner/base", "README.md"), {"revision": "abc"})]
