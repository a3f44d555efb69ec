"""The corpus check's own tests: each kind of bad script is caught, and a good one is not."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "notebooks"))

import judge
import run_corpus
from harness import Cell, Outcome, Settings, read_cells, run_notebook, run_ranks, run_script

NOTEBOOK = [
    "%%capture\nimport os\n!pip install unsloth==1.2.3\nprint('hidden')\nos.environ['MINE'] = '2'",
    "from unsloth import FastLanguageModel\nimport torch\n"
    "model, tokenizer = FastLanguageModel.from_pretrained('m', load_in_4bit = True)\n"
    "model = FastLanguageModel.get_peft_model(model, r = 8)",
    "from datasets import load_dataset\ndataset = load_dataset('d', split = 'train')\n"
    "dataset = dataset.map(lambda x: {'text': x['a'] + tokenizer.eos_token})\nprint(len(dataset))",
    "from trl import SFTConfig, SFTTrainer\n"
    "trainer = SFTTrainer(model = model, train_dataset = dataset, args = SFTConfig(\n"
    "    per_device_train_batch_size = 2, gradient_accumulation_steps = 4))\nstats = trainer.train()",
    "!ls outputs\n_ = model.generate(**tokenizer('x').to('cuda'))\nmodel.save_pretrained('lora')",
]
SCRIPT = """
import contextlib, os
rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))
main = rank == 0
os.environ["UNSLOTH_DISABLE_TRAINER_PATCHING"] = os.environ["UNSLOTH_NO_CUDA_EXTENSIONS"] = "1"
os.environ["MINE"] = "2"
import torch
torch.cuda.set_device(local_rank)
if world > 1: torch.distributed.init_process_group()
def wait():
    if world > 1: torch.distributed.barrier()
@contextlib.contextmanager
def main_first():
    if not main: wait()
    yield
    if main: wait()
from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("m", load_in_4bit = True, device_map = {"": local_rank})
model = FastLanguageModel.get_peft_model(model, r = 8)
from datasets import load_dataset
with main_first():
    dataset = load_dataset("d", split = "train")
    dataset = dataset.map(lambda x: {"text": x["a"] + tokenizer.eos_token}).shuffle(seed = 3407)
if main: print(len(dataset))
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(model = model, train_dataset = dataset, args = SFTConfig(
    per_device_train_batch_size = 1, gradient_accumulation_steps = 8 // world,
    ddp_find_unused_parameters = False, average_tokens_across_devices = True))
stats = trainer.train()
if main:
    os.system("ls outputs")
    _ = model.generate(**tokenizer("x").to("cuda"))
    model.save_pretrained("lora")
wait()
if world > 1: torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    cells = [{"cell_type": "code", "source": source, "metadata": {}, "outputs": []} for source in NOTEBOOK]
    path = tmp_path_factory.mktemp("notebook") / "input.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    assert [cell.capture for cell in read_cells(path)] == [True, False, False, False, False]
    return run_notebook(path)


def findings(plain: Outcome, script: str) -> dict[str, list[str]]:
    """All that is wrong with a script, by check."""
    alone, ranks = run_script(script, Settings(limit=10)), run_ranks(script, Settings(limit=10))
    found = {
        "compiles": judge.compiles(script, sys.executable),
        "leftovers": judge.leftovers(script),
        "installs": judge.installs(script) + judge.installs_run(ranks),
        "settings": judge.settings(plain, ranks, script),
        "trains": judge.reaches_training(plain, ranks),
        "rank_1": judge.main_only(ranks[1]),
        "rank_0": judge.kept(plain, ranks[0]),
        "read_back": judge.read_back(*ranks),
        "in_step": judge.in_step(ranks),
        "start_and_end": judge.start_and_end(plain, ranks),
        "data": judge.data(ranks),
        "same_training": judge.same_training(plain, ranks[1]),
        "single": judge.single(plain, alone),
    }
    return {name: value for name, value in found.items() if value}


def test_plain_notebook_is_followed_to_its_end(plain: Outcome) -> None:
    assert plain.ended_well and [event["name"] for event in plain.trains] == ["SFTTrainer"]
    assert plain.counts("install", "shell", "print", "generate", "save") == {
        "install !": 1,
        "print stdout": 1,
        "shell !": 1,
        "generate generate": 1,
        "save save_pretrained": 1,
    }
    assert plain.trains[0]["settings"]["gradient_accumulation_steps"] == 4


def test_good_script_has_no_finding(plain: Outcome) -> None:
    assert findings(plain, SCRIPT) == {}


BAD = {
    "saves on rank 1": ("if main:\n    os.system", "if True:\n    os.system", {"rank_1"}),
    "prints on rank 1": ("if main: print(len(dataset))", "print(len(dataset))", {"rank_1"}),
    "loses a print": ("if main: print(len(dataset))", "", {"rank_0", "single"}),
    "loses a save": ('    model.save_pretrained("lora")\n', "", {"rank_0", "single"}),
    "reads back on rank 1": ("\nwait()", "\nwait()\ntorch.load('lora/x')", {"read_back"}),
    "barrier on one rank": ("\nwait()", "\nif main: wait()", {"in_step"}),
    "never trains": ("stats = trainer.train()", "stats = trainer", {"trains", "settings", "single"}),
    "trains on one rank": ("stats = trainer.train()", "if main: trainer.train()", {"trains", "settings", "in_step"}),
    "stops half-way": ("if main:\n    os", "undefined\nif main:\n    os", {"trains", "rank_0", "single"}),
    "no device map": (', device_map = {"": local_rank}', "", {"settings"}),
    "wrong device": ('{"": local_rank}', '{"": 0}', {"settings"}),
    "no DDP argument": ("ddp_find_unused_parameters = False, ", "", {"settings"}),
    "another global batch": ("8 // world", "8", {"settings"}),
    "not the notebook's batch": ("8 // world", "8 // world if world > 1 else 4", {"single"}),
    "keeps the group": ("if world > 1: torch.distributed.destroy_process_group()", "", {"start_and_end"}),
    "no device": ("torch.cuda.set_device(local_rank)", "", {"start_and_end"}),
    "loses a variable": ('os.environ["MINE"] = "2"', "", {"start_and_end"}),
    "data on all ranks at once": ("with main_first():", "if True:", {"data"}),
    "another order on each rank": ("seed = 3407", "", {"data"}),
    "loses an argument": ("load_in_4bit = True, ", "", {"same_training"}),
    "loses a call": ("model = FastLanguageModel.get_peft_model(model, r = 8)\n", "", {"same_training"}),
    "another dataset": ('x["a"] + tokenizer.eos_token', 'x["a"] + str(rank)', {"same_training"}),
    "installs": ('os.system("ls outputs")', 'os.system("ls; pip install x")', {"installs", "rank_0", "single"}),
    "is not Python": ("import contextlib", "!ls\nimport contextlib", None),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_script_is_caught(plain: Outcome, name: str) -> None:
    old, new, expected = BAD[name]
    assert old in SCRIPT
    found = findings(plain, SCRIPT.replace(old, new, 1))
    if expected is None:
        assert {"compiles", "leftovers", "trains"} <= set(found)
    else:
        assert set(found) == expected


def test_nothing_real_happens(tmp_path: Path) -> None:
    """Writes outside the run's folder, processes and the network are recorded only; a loop is ended."""
    target = tmp_path / "escaped"
    outcome = run_script(
        f"import subprocess, urllib.request, pathlib, numpy\n"
        f"open({str(target)!r}, 'w').write('x')\npathlib.Path({str(target)!r}).mkdir()\n"
        f"subprocess.run(['touch', {str(target)!r}])\nurllib.request.urlopen('http://example.invalid')\n"
        "while True: pass",
        Settings(limit=1),
    )
    assert outcome.error is not None and outcome.error["type"] == "TimeLimit" and outcome.error["at"] == "script.py:6"
    assert not target.exists()
    assert {"write", "fileop", "shell", "download"} <= {event["kind"] for event in outcome.events}


def test_lost_text_is_named() -> None:
    cells = [
        Cell(3, 'x = """a\n  b"""  # why\n', False),
        Cell(4, "get_ipython().system('pip install x')  # gone\n", False),
        Cell(5, "if a:  # gone\n    get_ipython().run_line_magic('pip', 'install x')\n", False),
    ]
    assert judge.text_kept(cells, 'if main:\n    x = """a\n  b"""\n    # why\n') == []
    assert judge.text_kept([Cell(6, 'os.chdir("/content")', False)], '# ddp: os.chdir("/content"): Colab\n') == []
    assert judge.text_kept(cells, 'x = """a\n b"""\n') == ['cell 3 loses \'"""a\\n  b"""\'', "cell 3 loses '# why'"]


def test_the_readme_has_the_figures_of_the_results() -> None:
    folder = Path(run_corpus.__file__).parent
    tables = []
    for section in (folder / "README.md").read_text().split("### Notebooks from other repositories"):
        rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")]
        tables.append(
            {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in rows if len(cells) in (5, 8)}
        )
    results = json.loads((folder / "results.json").read_text())
    for name, column in (("without prefix", 0), ("all", 1)):
        totals = results["runs"][name]["totals"]
        figures = {
            "convert": totals["convert"],
            "seconds to convert, one core": round(totals["convert_seconds"], 1),
            "without any warning": totals["without_warning"],
            "compile": totals["pass"]["compiles"],
            "no `get_ipython`, magic left": totals["pass"]["leftovers"],
            "plain notebook reaches train under the stubs": totals["plain_reaches_train"],
            "of those, rank 0 and rank 1 of 2 reach it": totals["rank_1_reaches_train"],
            "device_map bound, DDP arguments set, global batch kept": totals["pass"]["settings"],
            "side effects on rank 1": totals["rank_1_side_effects"],
            "all side effects of the notebook on rank 0": totals["pass"]["rank_0"],
            "same collectives on both ranks": totals["pass"]["in_step"],
            "every check passes": totals["all_checks_pass"],
        }
        assert {name: tables[0][name][column] for name in figures} == {k: str(v) for k, v in figures.items()}
    lists = {"elsewhere": 1, "elsewhere_more": 3, "elsewhere_first_sight": 4, "elsewhere_loops": 5, "elsewhere_read": 6}
    for name, column in lists.items():
        totals = json.loads((folder / f"{name}.json").read_text())["totals"]
        figures = {
            "convert and compile": totals["convert"],
            "refused": sum(totals["refused"].values()),
            "without any warning": totals["without_warning"],
            "plain notebook reaches train": totals["plain_reaches_train"],
            "both ranks of 2 reach it": totals["both_ranks_reach_it"],
            "no side effect on rank 1": totals["no_side_effect_on_rank_1"],
            "same collectives": totals["same_collectives"],
            "all checks pass": totals["all_checks_pass"],
        }
        assert {name: tables[1][name][column] for name in figures} == {k: str(v) for k, v in figures.items()}
