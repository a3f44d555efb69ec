"""Test what the plan command does before it plans."""

from __future__ import annotations

import logging

from tests.conftest import REPO
from tests.plan.test_plan import plan
from unsloth_ddp.plan import __main__ as command

DEMO_ROWS = REPO / "demo" / "eval.jsonl"


def test_libraries_are_silent_at_import(tmp_path):
    logging.getLogger("bitsandbytes").setLevel(logging.NOTSET)
    assert plan("--model", str(tmp_path), "--dataset", str(DEMO_ROWS)) == 2
    assert logging.getLogger("bitsandbytes").level == logging.ERROR


def test_an_unreachable_hub_is_not_waited_for(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(command, "use_cache_if_hub_is_unreachable", lambda settings: asked.append(settings.model))
    assert plan("--model", str(tmp_path), "--dataset", str(DEMO_ROWS)) == 2
    assert asked == [str(tmp_path)]
