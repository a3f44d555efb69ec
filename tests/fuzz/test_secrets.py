"""Tokens and passwords in settings or the environment reach no file and no line that a run leaves."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

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
    names = ("settings.yaml", "summary.json", "trainer_state.json", "checkpoint-2/manifest.json", "tensorboard")
    for name in (*names, "record.json", "report.html", "README.md"):
        assert (run / name).exists(), name
    for rank in (0, 1):
        assert f"GET https://{HIDDEN}@hub/x, Bearer {HIDDEN}" in (run / "logs" / f"rank_{rank}.log").read_text()
    secrets = {*ENVIRONMENT.values(), KEY[:20]}
    assert files_with(tmp_path, secrets) == []
    assert not any(secret in done.output for secret in secrets)


def fail_with_a_secret(argv: list[str], cwd: str) -> None:
    """train_ddp.py, where a library of rank 1 prints, logs and raises an address with a password and a token."""
    from unsloth_ddp.training.trainer import DDPTrainer

    loss = DDPTrainer.compute_loss

    def compute_loss(self: DDPTrainer, *args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == "1" and self.state.global_step == 1:
            text = f"GET https://me:{KEY[:20]}@hub/x failed, Authorization: Bearer {KEY} with {os.environ['HF_TOKEN']}"
            print(text, file=sys.stderr, flush=True)
            logging.getLogger("huggingface_hub.utils._http").warning("Retrying: %s", text)
            raise RuntimeError(text)
        return loss(self, *args, **kwargs)

    DDPTrainer.compute_loss = compute_loss  # type: ignore[method-assign]
    train(argv, cwd)


def test_a_failure_of_one_process_is_told_to_all_without_its_secrets(
    tmp_path: Path, tiny_model: Path, uneven_rows: Path
) -> None:
    words = f"--model {tiny_model} --dataset {uneven_rows} --run_name r --max_steps 3 --max_length 64 --report_to none"
    words += " --gradient_checkpointing none --save_strategy no"
    done = run_ranks(
        2, fail_with_a_secret, words.split(), str(tmp_path), folder=tmp_path / "out", environ=ENVIRONMENT, end=False
    )
    assert done.codes == [1, 1]
    hidden = f"GET https://{HIDDEN}@hub/x failed, Authorization: Bearer {HIDDEN} with {HIDDEN}"
    assert f"RuntimeError: {hidden}" in done.outputs[0] and hidden in done.outputs[1]
    for rank in (0, 1):
        assert hidden in (tmp_path / "outputs" / "r" / "logs" / f"rank_{rank}.log").read_text()
    assert files_with(tmp_path, {*ENVIRONMENT.values(), KEY[:20]}) == []


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
        '--trainer_args={"include_num_input_tokens_seen": "all"}',
        "--dataset=https://host/rows.jsonl",
        "--model=owner/token-classifier",
        "--run_name=password_reset_bot",
    ],
)
def test_what_only_sounds_like_a_secret_is_accepted(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("MY_TOKEN", "r")
    parse_settings([*GIVEN, words])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"Authorization: Bearer {KEY}", f"Authorization: Bearer {HIDDEN}"),
        ("{'authorization': 'Basic dXNlcjpwYXNz1'}", f"{{'authorization': 'Basic {HIDDEN}'}}"),
        ("postgres connect password=hunter2 host=x", f"postgres connect password={HIDDEN} host=x"),
        (f"curl ?token={KEY[:5]}&x=1", f"curl ?token={HIDDEN}&x=1"),
        ("git clone https://oauth2:p@ss@host/x", f"git clone https://{HIDDEN}@host/x"),
        (f"https://{KEY}@sentry.io/1", f"https://{HIDDEN}@sentry.io/1"),
        *(
            (f"key {one}.", f"key {HIDDEN}.")
            for one in (
                "AKIA" + "IOSFODNN7EXAMPLE", "glpat-" + KEY[:20], "xoxb-" + "12345-67890-abc", "ghu_" + KEY[:30],
                "sk-" + KEY, HUB, "npm_" + KEY[:36], "github_pat_" + KEY, "AIza" + KEY[:35],
            )
        ),
    ],
)  # fmt: skip
def test_secrets_are_known_by_their_form_or_name(text: str, expected: str) -> None:
    assert hide(text, {}) == expected


@pytest.mark.parametrize(
    "text",
    [
        "api.create_repo(token=self.token, private=True)", "eos_token='</s>'", "a basic understanding of the matter",
        "bearer of the documentation", "http://127.0.0.1:8080/a@b", "authorization is required", "tokens=4096",
        "'tokens_per_second': 10.73", "git@github.com:owner/name",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str) -> None:
    assert hide(text, {}) == text


def test_of_two_secrets_the_longer_one_goes_first() -> None:
    assert (
        hide("x correct-horse-battery y", {"A_TOKEN": "correct-horse", "B_TOKEN": "correct-horse-battery"})
        == f"x {HIDDEN} y"
    )
    assert (
        hide("https://host/correct%2Fhorse%2Fbattery", {"A_TOKEN": "correct/horse/battery"}) == f"https://host/{HIDDEN}"
    )


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
