"""One small training, started the same way by every test of this group, and what it leaves."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tests.cluster.hosts import Host, wait_for_all
from tests.conftest import REPO

NODE_SH = str(REPO / "cluster" / "node.sh")
# 13 rows in steps of 6, ten epochs: whole steps on one, two and three processes, an incomplete one at each epoch's end.
OPTIONS = shlex.split(
    "--max_length 64 --learning_rate 0.001 --gradient_checkpointing none --logging_steps 1 --global_batch_size 6 "
    "--max_steps 30 --save_steps 5 --lora_dropout 0 --report_to none"
)
# A launch imports torch twice; beside other tests on two cores that takes a minute.
RUN_SECONDS = 600


@dataclass
class Job:
    """Model and rows to train with."""

    model: Path
    rows: Path

    @property
    def words(self) -> list[str]:
        """node.sh's options for this job."""
        return ["--cpu", "-m", str(self.model), "-d", str(self.rows), *OPTIONS]

    def copy_to(self, folder: Path) -> None:
        """Put ./model and ./rows.jsonl into a node's own folder, as on its own disk."""
        folder.mkdir(parents=True)
        shutil.copytree(self.model, folder / "model")
        shutil.copy(self.rows, folder / "rows.jsonl")


def variables(hosts: list[Host], rank: int, **others: str) -> dict[str, str]:
    """What node.sh is told on a host."""
    return {"NNODES": str(len(hosts)), "NODE_RANK": str(rank), "MASTER_ADDR": hosts[0].name, **others}


def start_nodes(
    hosts: list[Host], words: list[str], folder: Path, *, cwd: Path | None = None, **others: str
) -> list[subprocess.Popen[bytes]]:
    """node.sh on every host, with its output in <folder>/<host>.txt."""
    return [
        host.start(
            ["bash", NODE_SH, *words], folder / f"{host.name}.txt", variables(hosts, rank, **others), cwd or folder
        )
        for rank, host in enumerate(hosts)
    ]


def run_nodes(hosts: list[Host], words: list[str], folder: Path, **others: str) -> tuple[list[int], list[str]]:
    """node.sh on every host to its end: exit codes and outputs."""
    codes = wait_for_all(start_nodes(hosts, words, folder, **others), RUN_SECONDS)
    return codes, outputs(hosts, folder)


def outputs(hosts: list[Host], folder: Path) -> list[str]:
    """What node.sh printed on each host."""
    return [(folder / f"{host.name}.txt").read_text(errors="replace") for host in hosts]


def losses(text: str) -> list[float]:
    """The losses of all steps, as they were printed in lines of step, epoch, loss and more."""
    return [float(loss) for loss in re.findall(r"\d+/\d+ +[0-9.]+ +([0-9.e+-]+) ", text)]


def train_loss(run: Path) -> float:
    """The mean loss of a finished run."""
    return float(json.loads((run / "summary.json").read_text())["train_loss"])


def difference(run: Path, reference: Path) -> float:
    """Largest difference of two runs' adapters, relative to the largest weight."""
    found, expected = (load_file(folder / "adapter_model.safetensors") for folder in (run, reference))
    assert found.keys() == expected.keys()
    scale = max(float(np.abs(value).max()) for value in expected.values())
    return max(float(np.abs(found[name] - expected[name]).max()) for name in expected) / scale
