"""Let converted scripts start on a machine without a GPU: most of these tests run on a CPU."""

import pytest


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNSLOTH_ALLOW_CPU", "1")
