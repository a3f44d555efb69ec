"""Run a script, or a notebook as it is, in a child process with every third-party module stubbed.

`run_script` and `run_notebook` return an `Outcome`: the events of the run in order (see events.py) and how it ended.
Nothing the program asks for happens outside a temporary folder: no package, no network, no process, no GPU.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

CHILD = Path(__file__).with_name("child.py")
PYTHON_CELL_MAGICS = ("capture", "time", "timeit", "prun")  # their body is Python that runs


@dataclass
class Outcome:
    """The record of one run."""

    events: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] | None = None
    dropped: int = 0
    seconds: float = 0.0
    made: dict[str, int] = field(default_factory=dict)  # paths it made, and how many collectives came before each
    broadcasts: list[str] = field(default_factory=list)  # what it sent to the other ranks

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of these kinds."""
        return [event for event in self.events if event["kind"] in kinds]

    def counts(self, *kinds: str) -> Counter[str]:
        """Count the events of these kinds, by kind and name."""
        return Counter(f"{event['kind']} {event['name']}" for event in self.of(*kinds))

    @property
    def trains(self) -> list[dict[str, Any]]:
        """The calls of a trainer's train()."""
        return self.of("train")

    @property
    def ended_well(self) -> bool:
        return self.error is None


@dataclass
class Cell:
    """A code cell as Python that calls get_ipython()."""

    number: int  # among all the notebook's cells, from 0
    source: str
    capture: bool  # under %%capture: prints are not seen


def read_cells(notebook: Path) -> list[Cell]:
    """The code cells of a notebook, transformed as IPython does; a Colab form's title may precede a cell magic."""
    data = json.loads(notebook.read_text(encoding="utf-8"))
    cells = []
    for number, cell in enumerate(data["cells"]):
        if cell["cell_type"] != "code":
            continue
        source = cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
        found = re.match(r"\A(?:\s*#[^\n]*\n|\s*\n)*%%(\w+)[^\n]*\n?", source)
        capture = bool(found and found[1] == "capture")
        if found and found[1] in PYTHON_CELL_MAGICS:
            source = source[found.end() :]
        elif found:
            source = source[source.index("%%") :]
        cells.append(Cell(number, TransformerManager().transform_cell(source), capture))
    return cells


def pins(source: str) -> dict[str, str]:
    """The versions a program installs (`name==1.2.3`): what its modules then say they are."""
    return dict(re.findall(r"\b([A-Za-z][\w-]*)==(\d[\w.]*)", source))


@dataclass(frozen=True)
class Settings:
    """Settings of a run: rank, world size, Python and time limit."""

    rank: int = 0
    world: int = 1  # 1: no ranks in the environment, as under plain `python`
    python: str = sys.executable
    limit: float = 60.0
    local_rank: int | None = None  # the rank where it is not given
    ipython: bool = False  # a script run by `ipython`, which has get_ipython()
    versions: dict[str, str] = field(default_factory=dict)
    after: Outcome | None = None  # rank 0's run: another rank sees what it made and sent, once it has waited for it
    keep: Path | None = None  # copy the run's folder here
    shared: Path | None = None  # such a copy of rank 0's


def run_script(source: str, settings: Settings = Settings()) -> Outcome:
    """Run a script as one rank."""
    return _run([("script.py", source)], None, settings)


def run_notebook(notebook: Path, settings: Settings = Settings()) -> Outcome:
    """Run a notebook's cells one after the other, as one process, stopping at the first error."""
    cells = read_cells(notebook)
    files = [(f"cell_{cell.number}.py", cell.source) for cell in cells]
    return _run(files, [{"capture": cell.capture} for cell in cells], settings)


def run_ranks(source: str, settings: Settings = Settings(), world: int = 2) -> list[Outcome]:
    """Run a script as every rank of a node, one after the other: rank 0 first, so that the others can see its files."""
    with tempfile.TemporaryDirectory(prefix="shared") as name:
        first = run_script(source, replace(settings, world=world, keep=Path(name)))
        others = [
            run_script(source, replace(settings, rank=rank, world=world, after=first, shared=Path(name)))
            for rank in range(1, world)
        ]
    return [first, *others]


def run_other_node(source: str, settings: Settings = Settings()) -> Outcome:
    """Run a script as the first process of a second node of two, each with one process."""
    with tempfile.TemporaryDirectory(prefix="shared") as name:
        first = run_script(source, replace(settings, world=2, keep=Path(name)))
        return run_script(source, replace(settings, rank=1, local_rank=0, world=2, after=first, shared=Path(name)))


def _environment(settings: Settings, home: Path) -> dict[str, str]:
    environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(home), "LC_ALL": "C.UTF-8"}
    if settings.world > 1:
        local = settings.rank if settings.local_rank is None else settings.local_rank
        ranks = {"RANK": settings.rank, "LOCAL_RANK": local}
        ranks |= {"WORLD_SIZE": settings.world, "LOCAL_WORLD_SIZE": settings.world}
        environment |= {key: str(value) for key, value in ranks.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        environment |= {"PYTHONHASHSEED": "0"}  # with it a script does not start itself again to set it
    return environment


def _run(files: list[tuple[str, str]], cells: list[dict[str, Any]] | None, settings: Settings) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="stubrun") as name:
        top = Path(name).resolve()
        folder, out = top / "cwd", top / "out.json"
        for made in (folder, top / "code"):
            made.mkdir()
        job: dict[str, Any] = {"files": [], "cells": cells, "folder": str(folder), "result": str(out)}
        before = settings.after or Outcome()
        job |= {"limit": settings.limit, "versions": settings.versions, "ipython": settings.ipython}
        job |= {"made": before.made, "broadcasts": before.broadcasts, "shared": str(settings.shared or "")}
        for file, source in files:
            (top / "code" / file).write_text(source, encoding="utf-8")
            job["files"].append(str(top / "code" / file))
        (top / "job.json").write_text(json.dumps(job))
        # -s, -P and -S: neither the user's site nor site-packages; what is not standard library is stubbed.
        command = [settings.python, "-s", "-P", "-S", "-X", "utf8", str(CHILD), str(top / "job.json")]
        try:
            done = subprocess.run(
                command,
                env=_environment(settings, folder),
                cwd=top,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=settings.limit + 20,
            )
        except subprocess.TimeoutExpired:
            return Outcome(error={"type": "TimeLimit", "text": "the child did not answer", "at": ""})
        if settings.keep:
            shutil.copytree(folder, settings.keep, dirs_exist_ok=True)
        if not out.exists():
            return Outcome(error={"type": "Child", "text": done.stderr[-300:], "at": ""})
        return Outcome(**json.loads(out.read_text()))
