"""The pages of docs/ against the code: tables of errors, options and variables."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.conftest import REPO
from unsloth_ddp.config.command_line import make_parser
from unsloth_ddp.parity import __main__ as parity
from unsloth_ddp.plan import __main__ as plan
from unsloth_ddp.preflight import __main__ as preflight
from unsloth_ddp.utils.error_table import KNOWN_ERRORS

PAGES = sorted((REPO / "docs").glob("*.md"))
OF_OTHERS = {
    "accelerate and torchrun": {"--config_file", "--rdzv_conf", "--main_process_port", "--master_port"},
    "Slurm": {"--nodes", "--gpus-per-node", "--cpus-per-task", "--time", "--signal"},
    "uv": {"--locked", "--extra", "--group"},
    "docker": {"--shm-size", "--ipc", "--gpus"},
    "hf": {"--force-download"},
}
# Set by the system, the scheduler, or as torch and NCCL document them.
NOT_THE_KITS = re.compile(
    r"SLURM_|SRUN_|PBS_|GLOO_|NCCL_|CUDA_|PET_|TORCH_|BASH_|PIPESTATUS|SECONDS|HOME$|TMPDIR$|PWD$|PATH$"
)


def usage() -> str:
    """What node.sh -h prints."""
    command = ["bash", str(REPO / "cluster" / "node.sh"), "-h"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_exist(page):
    parsers = [make_parser(""), plan.make_parser(), parity.make_parser(), preflight.make_parser()]
    known = {name for parser in parsers for action in parser._actions for name in action.option_strings}
    known |= set(re.findall(r"--\w+", usage())) | set().union(*OF_OTHERS.values())
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", page.read_text()))
    assert named - known == set()


def test_every_error_is_in_the_table_as_it_is_printed():
    lines = [line for line in (REPO / "docs" / "errors.md").read_text().splitlines() if line.startswith("| ")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[1:]]
    assert cells == [(known.name, known.cause, known.fix) for known in KNOWN_ERRORS]


def test_every_option_and_variable_of_the_cluster_files_is_explained():
    page = (REPO / "docs" / "nodes.md").read_text()
    options = set(re.findall(r"^  (?:-\w, )?(--\w+)", usage(), re.MULTILINE)) - {"--help"}
    assert len(options) >= 7 and {name for name in options if f"`{name}" not in page} == set()
    scripts = "".join(path.read_text() for path in sorted((REPO / "cluster").iterdir()))
    read = {name for name in re.findall(r"\$\{?([A-Z][A-Z_]{2,})\b", scripts) if not NOT_THE_KITS.match(name)}
    assert len(read) >= 10 and {name for name in read if f"`{name}`" not in page} == set()
