"""Test that what the pages say of packages beside the kit resolves today. Asks the package registry."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from tests.conftest import REPO

pytestmark = pytest.mark.slow


def resolve(*requirements: str, folder: Path) -> dict[str, Version]:
    """Return the versions that these requirements and the kit's own get together on Linux."""
    (folder / "added.txt").write_text("\n".join(requirements))
    command = ["uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--python-version", "3.12"]
    command += ["--python-platform", "x86_64-manylinux_2_28", "pyproject.toml", str(folder / "added.txt")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: Version(version) for name, version in re.findall(r"^([\w-]+)==(\S+)", done.stdout, re.M)}


def test_vllm_resolves_beside_the_kit_with_the_versions_of_the_page(tmp_path: Path) -> None:
    page = (REPO / "docs" / "after-training.md").read_text(encoding="utf-8")
    [line] = [line for line in page.splitlines() if line.startswith("| vLLM ")]
    on_page = {name: Version(version) for name, version in re.findall(r"(\w+) ([\d.]+\d)", line.lower())}
    beside = resolve(f"vllm=={on_page['vllm']}", folder=tmp_path)
    assert {name: version for name, version in on_page.items() if beside[name] < version} == {}
    # A bound that vLLM cannot meet is no error: without a version it resolves to an old release.
    assert resolve("vllm", folder=tmp_path)["vllm"] >= on_page["vllm"]
