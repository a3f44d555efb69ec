"""The files around the code: the Makefile, pre-commit, GitHub's workflow and templates."""

from __future__ import annotations

import re
import shlex
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


def test_modules_that_comments_name_are_there():
    modules = {name.removeprefix("unsloth_ddp/") for name in FILES if name.startswith("unsloth_ddp/")}
    rooms = "|".join({name.split("/")[0] for name in modules if "/" in name})
    missing = [
        (name, found)
        for name in FILES
        if name.startswith("unsloth_ddp/") and name.endswith(".py")
        for found in re.findall(rf"(?<![\w/.])((?:{rooms})/[\w/]+\.py)", (REPO / name).read_text())
        if found not in modules
    ]
    assert modules and not missing


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


def test_the_audit_can_read_what_it_exports_and_fails_if_it_audits_nothing(tmp_path):
    workflow = yaml.safe_load((REPO / ".github/workflows/ci.yml").read_text())
    script = next(step["run"] for step in workflow["jobs"]["audit"]["steps"] if "pip-audit" in step.get("run", ""))
    export, audit = (shlex.split(line) for line in script.splitlines() if line.startswith("uv"))
    export[export.index("-o") + 1] = str(tmp_path / "requirements.txt")
    subprocess.run([*export, "--offline", "--quiet"], cwd=REPO, check=True)
    requirements = (tmp_path / "requirements.txt").read_text().replace("\\\n", " ").splitlines()
    pinned = [line for line in requirements if line.strip() and not line.lstrip().startswith("#")]
    assert len(pinned) > 100 and all(re.match(r"[\w.-]+==", line) for line in pinned)
    # pip-audit refuses to guess versions: with --require-hashes every line needs one, and otherwise --no-deps.
    if "--require-hashes" in audit:
        assert [line for line in pinned if "--hash" not in line] == []
    else:
        assert "--no-deps" in audit
    # Packages that it cannot look up are otherwise left out with exit code 0.
    assert "--strict" in audit


@pytest.mark.parametrize("path", [path for path in TEMPLATES if path.stem != "config"], ids=lambda path: path.stem)
def test_issue_templates_have_what_github_wants(path):
    template = yaml.safe_load(path.read_text())
    assert template["name"] and template["description"]
    ids = [element["id"] for element in template["body"]]
    assert len(ids) == len(set(ids)) and all(element["attributes"]["label"] for element in template["body"])
