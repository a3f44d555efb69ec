"""The files around the code: the Makefile, pre-commit, GitHub's workflow and templates."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from tests.conftest import REPO

FILES = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout.splitlines()
TEMPLATES = sorted((REPO / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def test_every_make_command_of_the_docs_is_a_target():
    targets = set(re.findall(r"^(\w+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    texts = [REPO / "CONTRIBUTING.md", REPO / ".github/pull_request_template.md"]
    named = set(re.findall(r"(?:^|`)make (\w+)", "\n".join(path.read_text() for path in texts), re.MULTILINE))
    assert named and named <= targets


def test_every_hook_finds_its_files():
    config = yaml.safe_load((REPO / ".pre-commit-config.yaml").read_text())
    for hook in config["repos"][0]["hooks"]:
        if "files" in hook:
            assert [name for name in FILES if re.search(hook["files"], name)], hook["id"]


def test_the_workflow_runs_what_contributors_run():
    workflow = yaml.safe_load((REPO / ".github/workflows/ci.yml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["test"]["steps"]]
    assert "bash .ci/run" in steps
    assert workflow["permissions"] == {"contents": "read"}
    assert "bash .ci/run" in (REPO / "Makefile").read_text()


@pytest.mark.parametrize("path", [path for path in TEMPLATES if path.stem != "config"], ids=lambda path: path.stem)
def test_issue_templates_have_what_github_wants(path):
    template = yaml.safe_load(path.read_text())
    assert template["name"] and template["description"]
    ids = [element["id"] for element in template["body"]]
    assert len(ids) == len(set(ids)) and all(element["attributes"]["label"] for element in template["body"])
