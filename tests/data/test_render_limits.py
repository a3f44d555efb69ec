"""A chat template that never ends, or that makes more than a machine can hold, ends in one sentence."""

from __future__ import annotations

import resource
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer
from trl import chat_template_utils

from tests.conftest import DEMO_MODEL
from unsloth_ddp.data.chat import render_limits
from unsloth_ddp.data.chat.tokenize import Encoder
from unsloth_ddp.data.sources.formats import to_example
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.units import MIB

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
# 2 ** 40 characters, were they made.
DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"
AT_ONCE = "{{ 'a' * 10 ** 11 }}"
LONG = "{{ 'a' * 3000000 }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def encode(monkeypatch):
    """Encode a chat with a template, under small limits."""
    assert chat_template_utils, "imported before any time counts"
    monkeypatch.setattr(render_limits, "MEMORY_BYTES", 256 * MIB)
    monkeypatch.setattr(render_limits, "CHARACTERS", 2_000_000)

    def run(template: str, seconds: float = 60.0):
        monkeypatch.setattr(render_limits, "SECONDS", seconds)
        tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
        tokenizer.chat_template = template
        return Encoder(tokenizer, supervise_all=True).encode(to_example(CHAT))

    return run


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOP, "it does not end within 1 s"),
        (DOUBLING, "it needs more than 0 GiB of memory"),
        (AT_ONCE, "it needs more than 0 GiB of memory"),
        (LONG, r"it renders 3,000,\d+ characters"),
    ],
    ids=["endless", "doubling", "at once", "long"],
)
def test_a_template_beyond_a_limit_is_refused(encode, template, reason):
    limits, began = resource.getrlimit(resource.RLIMIT_AS), time.monotonic()
    with pytest.raises(UserError, match=rf"the chat template cannot render a row \({reason}\); fix the template"):
        # Of the others, how long they take does not matter.
        encode(template, 1.0 if template == LOOP else 60.0)
    assert time.monotonic() - began < 50
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def test_an_ordinary_template_is_rendered(encode):
    assert encode("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}").input_ids


def test_another_timer_goes_on_with_what_is_left_of_it(monkeypatch):
    fired = threading.Event()
    handler = signal.signal(signal.SIGALRM, lambda *_: fired.set())
    before, interval = signal.setitimer(signal.ITIMER_REAL, 100)
    clock = SimpleNamespace(monotonic=iter([1000.0, 1070.0]).__next__)
    monkeypatch.setattr(render_limits, "time", clock)
    try:
        with render_limits.limited_rendering():
            assert signal.getsignal(signal.SIGALRM).__name__ == "stop"
        # The block took 70 of its 100 seconds.
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 30
        signal.raise_signal(signal.SIGALRM)
        assert fired.wait(5)
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, before, interval)


def test_threads_render_without_a_limit_on_time():
    found = []

    def run() -> None:
        with render_limits.limited_rendering():
            found.append(signal.getitimer(signal.ITIMER_REAL)[0])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(found) == 1
