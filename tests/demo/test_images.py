"""The demo of images learns, and what it leaves answers questions about a drawing."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from tests.conftest import REPO
from unsloth_ddp.chat.__main__ import main as chat


@pytest.mark.slow
def test_the_demo_learns_to_name_drawings_and_answers_about_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "train_ddp.py", "--config", "recipes/demo_images.yaml"]
    done = subprocess.run(
        [*command, "--output_dir", str(tmp_path), "--run_name", "shapes"], cwd=REPO, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "shapes" / "summary.json").read_text())
    assert summary["demo_accuracy_before"] < 0.1 and summary["demo_accuracy_after"] > 0.8
    rows = datasets.load_dataset("parquet", data_files=str(REPO / "demo/shapes_eval.parquet"), split="train")
    right = 0
    for row in rows.select(range(5)):
        written = io.BytesIO()
        row["images"][0].save(written, "PNG")
        (tmp_path / "a.png").write_bytes(written.getvalue())
        question, answer = (turn["content"] for turn in row["messages"])
        capsys.readouterr()
        options = [
            "--image",
            str(tmp_path / "a.png"),
            "--ask",
            question,
            "--temperature",
            "0",
            "--max_new_tokens",
            "12",
        ]
        assert chat([str(tmp_path / "shapes"), *options]) == 0
        right += capsys.readouterr().out.strip() == answer
    assert right >= 3
