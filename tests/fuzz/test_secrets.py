"""Tokens and passwords in settings or the environment reach no file and no line that a run leaves."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import few, refusal
from tests.ranks import run_ranks, train
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.known_errors import report
from unsloth_ddp.utils.redaction import HIDDEN, find_secret, hide

# Taken apart, so that no scanner takes them for real ones.
HUB = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"
KEY = "0123456789abcdef0123456789abcdef01234567"
ENVIRONMENT = {
    "HF_TOKEN": HUB,
    "HUGGING_FACE_HUB_TOKEN": HUB,
    "WANDB_API_KEY": KEY,
    "AWS_SECRET_ACCESS_KEY": "aws-" + KEY,
    "MLFLOW_TRACKING_PASSWORD": "correct horse battery",
}
GIVEN = ["--model=m", "--dataset=d"]


def files_with(folder: Path, secrets: set[str]) -> list[str]:
    """The files below a folder whose content or name holds one of the secrets."""
    found = []
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if any(secret.encode() in content or secret in str(path) for secret in secrets):
            found.append(str(path))
    return found


def train_with_a_talkative_library(argv: list[str], cwd: str) -> None:
    """train_ddp.py, where a library logs the request that it sends."""
    from unsloth_ddp.run import stages

    start = stages.start_logging

    def started(folder: Path, runtime: object) -> None:
        start(folder, runtime)  # type: ignore[arg-type]
        logging.getLogger("library").warning("GET https://me:%s@hub/x, Bearer %s", KEY[:20], os.environ["HF_TOKEN"])

    stages.start_logging = started
    train(argv, cwd)


def test_a_run_leaves_no_secret_in_any_file_or_line(tmp_path: Path, tiny_model: Path, uneven_rows: Path) -> None:
    words = f"--model {tiny_model} --dataset {uneven_rows} --run_name r --max_steps 2 --save_steps 1 --max_length 64"
    words += " --eval_fraction 0.2 --logging_steps 1 --gradient_checkpointing none --method full"
    done = run_ranks(
        2, train_with_a_talkative_library, words.split(), str(tmp_path), folder=tmp_path / "out", environ=ENVIRONMENT
    )
    run = tmp_path / "outputs" / "r"
    done.check()
    for name in ("settings.yaml", "summary.json", "trainer_state.json", "checkpoint-2/manifest.json", "tensorboard"):
        assert (run / name).exists(), name
    for rank in (0, 1):
        assert f"GET https://{HIDDEN}@hub/x, Bearer {HIDDEN}" in (run / "logs" / f"rank_{rank}.log").read_text()
    secrets = {*ENVIRONMENT.values(), KEY[:20]}
    assert files_with(tmp_path, secrets) == []
    assert not any(secret in done.output for secret in secrets)


def test_a_run_that_is_given_a_secret_ends_before_it_writes_it(
    tmp_path: Path, tiny_model: Path, uneven_rows: Path
) -> None:
    given = json.dumps({"model_init_kwargs": {"token": HUB}})
    words = ["--model", str(tiny_model), "--dataset", str(uneven_rows), "--trainer_args", given]
    done = run_ranks(2, train, words, str(tmp_path), folder=tmp_path / "out")
    assert done.codes[0] == 2
    assert (
        "error: trainer_args.model_init_kwargs.token holds a secret, and settings are written to files" in done.output
    )
    assert not (tmp_path / "outputs").exists()
    assert HUB not in done.output


@pytest.mark.parametrize(
    ("word", "place"),
    [
        (f'--trainer_args={{"hub_token": "{HUB}"}}', "trainer_args.hub_token"),
        ('--trainer_args={"a": {"b": [{"password": "hunter2"}]}}', "trainer_args.a.b.password"),
        (f"--run_name={HUB}", "run_name"),
        (f"--dataset=https://me:{KEY}@host/rows.jsonl", "dataset"),
        (f"--model=https://host/m?token={KEY}", "model"),
        (f"--hub_model_id=me/{KEY}", "hub_model_id"),
    ],
)
def test_a_secret_in_a_setting_is_refused_without_being_said(
    monkeypatch: pytest.MonkeyPatch, word: str, place: str
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    message = refusal(lambda: parse_settings([*GIVEN, word]))
    assert message.startswith(f"{place} holds a secret")
    assert not any(secret in message for secret in (HUB, KEY, "hunter2"))


@pytest.mark.parametrize(
    "words",
    [
        [f"--hub_token={HUB}"],
        ["--hub_token", HUB],
        [HUB],
        ["--lora_r", HUB],
        ["--trainer_args", f'{{"hub_token": "{KEY}'],
        ["--config", f"/nowhere/{HUB}.yaml"],
        ["--resume", f"/nowhere/{HUB}" + "x" * 300],
    ],
)
def test_a_refused_command_line_does_not_repeat_a_secret(words: list[str]) -> None:
    message = refusal(lambda: parse_settings([*GIVEN, *words]))
    assert HUB not in message and KEY not in message


@pytest.mark.parametrize(
    "words",
    [
        '--trainer_args={"eos_token": "<|im_end|>", "pad_token": "<pad>", "include_num_input_tokens_seen": "all"}',
        "--dataset=https://host/rows.jsonl",
        "--model=owner/token-classifier",
        "--run_name=password_reset_bot",
    ],
)
def test_what_only_sounds_like_a_secret_is_accepted(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("MY_TOKEN", "r")
    parse_settings([*GIVEN, words])


@few
@given(
    st.text(max_size=20),
    st.text(max_size=20),
    st.text(min_size=8, max_size=40).filter(lambda text: len(text.strip()) >= 8),
    st.sampled_from(["HF_TOKEN", "WANDB_API_KEY", "my_password", "AWS_SECRET_ACCESS_KEY", "CLIENT_SECRET"]),
)
def test_the_value_of_a_secret_variable_is_hidden_wherever_it_stands(
    before: str, after: str, secret: str, name: str
) -> None:
    environ = {name: secret, "HOME": before, "PATH": after}
    assert secret.strip() not in hide(before + secret + after, environ).replace(HIDDEN, "")
    assert find_secret("x", {"a": [before + secret + after]}, environ) == "x.a"


def test_errors_say_no_secret(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert str(UserError(f"a\n{KEY} b")) == f"a {HIDDEN} b"
    try:
        raise RuntimeError(f"401 for {HUB} and {KEY}")
    except RuntimeError as error:
        report(error)
    assert f"RuntimeError: 401 for {HIDDEN} and {HIDDEN}" in capsys.readouterr().err
