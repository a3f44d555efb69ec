"""The pages of docs/ against the code: tables of errors, options and variables, links, and files that are named."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.conftest import REPO
from unsloth_ddp.chat import __main__ as chat
from unsloth_ddp.config.command_line import make_parser
from unsloth_ddp.export import __main__ as export
from unsloth_ddp.notebook import cli as notebook
from unsloth_ddp.parity import __main__ as parity
from unsloth_ddp.plan import __main__ as plan
from unsloth_ddp.port import __main__ as port
from unsloth_ddp.preflight import __main__ as preflight
from unsloth_ddp.runs import __main__ as runs
from unsloth_ddp.utils.error_table import KNOWN_ERRORS

DOCS = REPO / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [
    REPO / "README.md",
    REPO / "CONTRIBUTING.md",
    REPO / "CHANGELOG.md",
    *sorted((REPO / "benchmarks").glob("*.md")),
    *PAGES,
]
OF_OTHERS = {
    "accelerate and torchrun": {
        "--config_file",
        "--rdzv_conf",
        "--main_process_port",
        "--num_processes",
        "--master_port",
        "--num_cpu_threads_per_process",
        "--nproc_per_node",
    },
    "Slurm": {
        "--nodes",
        "--gpus-per-node",
        "--cpus-per-task",
        "--time",
        "--signal",
        "--partition",
        "--account",
        "--export",
        "--ntasks-per-node",
    },
    "apptainer": {"--nv", "--pwd", "--bind"},
    "uv": {"--locked", "--extra", "--group", "--python", "--clear", "--no-sync", "--torch-backend"},
    "sky": {"--secret"},
    "docker": {
        "--shm-size",
        "--ipc",
        "--gpus",
        "--rm",
        "--init",
        "--build-arg",
        "--tag",
        "--output",
        "--time",
        "--network",
    },
    "hf": {"--force-download", "--repo-type", "--local-dir"},
    "tensorboard": {"--logdir"},
    "accelerate": {"--quiet", "--parallelism_config_dp_replicate_size"},
    "torchrun": {"--standalone", "--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port"},
    "rsync": {"--exclude"},
    "nbconvert": {"--to"},
    "lm_eval": {"--with", "--model_args", "--apply_chat_template", "--include_path", "--tasks", "--limit", "--device"},
    "vLLM": {"--enable-lora", "--lora-modules", "--max-lora-rank", "--chat-template", "--generation-config"},
    "llama.cpp": {"--depth", "--build", "--target"},
    "firewall-cmd": {"--permanent", "--zone", "--add-source", "--reload"},
}
# Set by the system, the scheduler, or as torch and NCCL document them.
NOT_THE_KITS = re.compile(
    r"SLURM_|SRUN_|PBS_|SKYPILOT_|DSTACK_|GLOO_|NCCL_|CUDA_|PET_|TORCH_|BASH_|PIPESTATUS|SECONDS|HOME$|TMPDIR$|PWD$|PATH$"
)


def usage() -> str:
    """Return what node.sh -h prints."""
    command = ["bash", str(REPO / "cluster" / "node.sh"), "-h"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def without_foreign_words(text: str) -> str:
    """Return a page without the first cell of its tables, where two pages have the words of other tools."""
    return re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_exist(page):
    parsers = [
        make_parser(""),
        *(module.make_parser() for module in (plan, parity, preflight, chat, export, runs, port, notebook)),
    ]
    known = {name for parser in parsers for action in parser._actions for name in action.option_strings}
    known |= set(re.findall(r"--\w+", usage())) | set().union(*OF_OTHERS.values())
    text = page.read_text()
    if page.stem in ("from-elsewhere", "keys"):
        text = without_foreign_words(text)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", text))
    assert named - known == set()


def test_every_error_is_in_the_table_as_it_is_printed():
    table = (DOCS / "errors.md").read_text().partition("## Several nodes")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[1:]]
    assert cells == [(known.name, known.cause, known.fix) for known in KNOWN_ERRORS]


def test_every_option_and_variable_of_the_cluster_files_is_explained():
    page = (DOCS / "nodes.md").read_text()
    options = set(re.findall(r"^  (?:-\w, )?(--\w+)", usage(), re.MULTILINE)) - {"--help"}
    assert len(options) >= 7 and {name for name in options if f"`{name}" not in page} == set()
    scripts = "".join(path.read_text() for path in sorted((REPO / "cluster").iterdir()))
    read = {name for name in re.findall(r"\$\{?([A-Z][A-Z_]{2,})\b", scripts) if not NOT_THE_KITS.match(name)}
    assert len(read) >= 10 and {name for name in read if f"`{name}`" not in page} == set()


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(REPO).as_posix())
def test_links_lead_somewhere(path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("http"):
            continue
        file, _, anchor = target.partition("#")
        page = (path.parent / file) if file else path
        if not page.exists() or (anchor and anchor not in anchors(page.read_text())):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(REPO).as_posix())
def test_files_of_the_kit_that_are_named_exist(path):
    named = set(
        re.findall(
            r"`((?:unsloth_ddp|tests|benchmarks|recipes|cluster|accelerate_configs)/[\w./-]*)`", path.read_text()
        )
    )
    assert {name for name in named if not (REPO / name).exists()} == set()


def test_every_page_is_reached_from_the_readme():
    reached, waiting = set(), [REPO / "README.md"]
    while waiting:
        page = waiting.pop()
        for target in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text()):
            other = (page.parent / target).resolve()
            if not target.startswith("http") and other.exists() and other not in reached:
                reached.add(other)
                waiting.append(other)
    assert {page.name for page in PAGES} - {page.name for page in reached} == set()


def test_every_raw_result_is_in_the_map_of_benchmarks():
    text = (REPO / "benchmarks/README.md").read_text()
    results = [path.relative_to(REPO / "benchmarks").as_posix() for path in (REPO / "benchmarks/results").rglob("*.*")]
    assert [path for path in results if f"({path})" not in text] == []


def test_names_of_the_architecture_exist():
    code = [REPO / "train_ddp.py", *(REPO / "unsloth_ddp").rglob("*.py")]
    defined = set(re.findall(r"^\s*(?:class|def) (\w+)", "\n".join(path.read_text() for path in code), re.MULTILINE))
    named = set(re.findall(r"`([A-Z][a-z]\w+|[a-z]+_[a-z_]+)`", (DOCS / "architecture.md").read_text()))
    assert len(named) > 15 and named - defined == set()


def test_the_index_names_every_page():
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "README.md").read_text()))
    assert linked == {page.name for page in DOCS.glob("*.md")} - {"README.md"}
