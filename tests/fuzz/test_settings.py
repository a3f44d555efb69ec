"""Fuzz settings: any bytes, values and words are settings or are refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz import few, refusal, result_or_sentence
from unsloth_ddp.config.options import OPTIONS, Settings
from unsloth_ddp.config.parse import parse_settings

GIVEN = ["--model", "m", "--dataset", "d"]


@pytest.fixture
def config(config: Callable[[str | bytes], Path]) -> Callable[[str | bytes], Settings]:
    """Writes run.yaml and reads it as the config of a run."""
    return lambda content: parse_settings(["--config", str(config(content)), *GIVEN])


def check(settings: Settings | None, folder: Path) -> None:
    """Settings that were accepted can be saved and read back, written as JSON, and are numbers where they say so."""
    if settings is None:
        return
    settings.save(folder / "settings.yaml")
    assert parse_settings(["--config", str(folder / "settings.yaml")]) == settings
    json.dumps(dataclasses.asdict(settings), allow_nan=False, ensure_ascii=False).encode()
    assert all(math.isfinite(value) for value in vars(settings).values() if isinstance(value, float))


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates() | st.binary()
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@few
@given(st.dictionaries(st.sampled_from(sorted(OPTIONS)), VALUES, max_size=3))
@example({"trainer_args": {"a": [float("nan")]}})
@example({"trainer_args": {"a": {"b": b"bytes"}}})
@example({"trainer_args": {1: 2}})
def test_any_values_of_any_options_are_settings_or_refused(config: Any, tmp_path: Path, options: dict) -> None:
    check(result_or_sentence(lambda: config(yaml.safe_dump(options, allow_unicode=True))), tmp_path)


@few
@given(st.binary(max_size=200) | st.text(alphabet="&*<>[]{}!:-?|,'\"#%@` \n\ta1.", max_size=120).map(str.encode))
@example(b"\x80\x04\x95\x00")
@example("lora_r: 8".encode("utf-16"))
@example(b"\x00" * 100)
@example(b"--- !!python/name:os.system\n")
def test_any_bytes_are_a_config_or_refused(config: Any, tmp_path: Path, content: bytes) -> None:
    check(result_or_sentence(lambda: config(content)), tmp_path)


@few
@given(st.text(max_size=30), st.sampled_from(sorted(OPTIONS)), st.booleans())
@example("\udcff", "run_name", False)
@example("[" * 5000, "trainer_args", True)
@example('{"a": 1, "a": 2}', "trainer_args", True)
@example('{"a": NaN}', "trainer_args", False)
@example('{"a": "\\ud800"}', "trainer_args", False)
def test_any_text_on_the_command_line_is_a_setting_or_refused(
    tmp_path: Path, text: str, name: str, joined: bool
) -> None:
    words = [f"--{name}={text}"] if joined else [f"--{name}", text]
    check(result_or_sentence(lambda: parse_settings([*GIVEN, *words])), tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("seed: 1" + "0" * 2_000_000, "it has over 1,048,576 bytes, too many for a file of settings"),
        ("{" * 1_000_000, "nested too deeply"),
        ("- " * 500_000, "nested too deeply"),
        ("trainer_args: !!python/object/apply:os.system ['touch ran']", "could not determine a constructor"),
        ("trainer_args: !!python/object/new:subprocess.Popen [[touch, ran]]", "could not determine a constructor"),
        ("lora_r: 3\n---\nlora_r: 4\n", "expected a single document"),
        ("lora_r: 3\nlora_r: 4\n", "lora_r is given twice"),
        ("trainer_args: {a: {b: 1, b: 2}}", "b is given twice"),
    ],
)
def test_a_config_that_would_hang_run_code_or_contradict_is_refused_at_once(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.process_time()
    message = refusal(lambda: config(content))
    assert time.process_time() - began < 10
    assert f"run.yaml is not YAML: {reason}" in message
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("value", ["1" + ":59" * 200_000, "0x" + "f" * 500_000, "1" * 4_000])
def test_a_number_of_any_length_is_refused_at_once(config: Any, value: str) -> None:
    began = time.process_time()
    message = refusal(lambda: config(f"max_steps: {value}\n"))
    assert time.process_time() - began < 10
    assert "max_steps is" in message


def test_a_config_cannot_name_itself_or_another(config: Any) -> None:
    assert "config is for the command line only" in refusal(lambda: config("config: run.yaml\n"))


def test_a_config_may_be_a_link_but_no_pipe_device_or_folder(tmp_path: Path) -> None:
    import os

    (tmp_path / "real.yaml").write_text("lora_r: 3\n")
    (tmp_path / "link.yaml").symlink_to("real.yaml")
    assert parse_settings(["--config", str(tmp_path / "link.yaml"), *GIVEN]).lora_r == 3
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert "is a folder; name" in refusal(lambda: parse_settings(["--config", str(tmp_path), *GIVEN]))
    for path in (tmp_path / "pipe.yaml", tmp_path / "loop.yaml", Path("/dev/zero"), Path("a\0b")):
        assert "there is no such file" in refusal(lambda path=path: parse_settings(["--config", str(path), *GIVEN]))


@pytest.mark.parametrize("value", ["{a: 2020-01-01}", "{a: .nan}", "{a: [-.inf]}", "{a: !!binary aGk=}", "{1: a}"])
def test_trainer_args_that_no_checkpoint_could_describe_are_refused(config: Any, value: str) -> None:
    assert "it takes a mapping of plain, finite values" in refusal(lambda: config(f"trainer_args: {value}"))


def test_a_value_that_contains_itself_is_refused(config: Any) -> None:
    assert "stands for a value that it is part of" in refusal(lambda: config("trainer_args: &a {x: *a}"))


@pytest.mark.parametrize("name", [name for name, declared in OPTIONS.items() if declared.at_most])
def test_numbers_that_would_hang_a_run_are_refused(name: str) -> None:
    most = int(OPTIONS[name].at_most or 0)
    given = [*GIVEN, "--streaming", "--max_steps", "1"] if name == "shuffle_buffer" else GIVEN
    assert getattr(parse_settings([*given, f"--{name}", str(most)]), name) == most
    for value in (most + 1, 10**18):
        message = refusal(lambda value=value: parse_settings([*given, f"--{name}", str(value)]))
        assert message.endswith(f"but it has to be {most:,} or below.")
