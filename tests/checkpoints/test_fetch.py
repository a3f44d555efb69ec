"""Nodes with disks of their own resume from the files that the main process verified, whatever their folders hold."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from tests.ranks import run_ranks
from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.checkpoints.manifest import Manifest
from unsloth_ddp.checkpoints.resume_point import ResumePoint, fetch
from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.ranks import ranks_from_environment
from unsloth_ddp.distributed.runtime import started

FILES = {"trainer_state.json": b"{}", "optimizer.pt": b"of step 3", "weights/shard": bytes(range(256)) * 20_000}
NAME = "checkpoint-3"


def write_checkpoint(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    described = Manifest(3, {}, {}, manifest.describe_files(folder))
    (folder / manifest.FILE_NAME).write_text(described.to_text())


# What has happened to the copy of each node.
DAMAGE = {
    0: lambda folder: None,
    1: lambda folder: None,
    2: lambda folder: (folder / "optimizer.pt").unlink(),
    3: lambda folder: (folder / "optimizer.pt").write_bytes(b"of step 2"),
    4: shutil.rmtree,
    5: lambda folder: write_checkpoint(folder, {**FILES, "optimizer.pt": b"of another save"}),
}


def fetch_on_a_node_of_its_own(place: str) -> None:
    """Fetch as if each rank were alone on a node; two calls, the second with the folder of node 0 on a shared disk."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    ranks = ranks_from_environment()
    own = Path(place, f"node-{ranks.rank}")
    write_checkpoint(own / NAME, FILES)
    DAMAGE[ranks.rank](own / NAME)
    os.chdir(own)
    with started(Settings(use_cpu=True), ranks) as runtime:
        runtime.barrier()
        point = ResumePoint(Path(NAME), manifest.read_manifest(Path(place, "node-0", NAME)))
        found = fetch(point, runtime)
        assert (found.folder == Path(NAME)) is (ranks.rank in (0, 1)), found.folder
        assert {name: (found.folder / name).read_bytes() for name in FILES} == FILES
        shared = dataclasses.replace(point, folder=Path(place, "node-0", NAME))
        assert fetch(shared, runtime) == shared
    assert found.folder.exists() is (ranks.rank in (0, 1)), "the copy is removed at the end"


def test_every_node_resumes_from_what_the_main_process_verified(tmp_path):
    printed = run_ranks(len(DAMAGE), fetch_on_a_node_of_its_own, str(tmp_path), folder=tmp_path / "out").check().outputs
    said = [line for line in printed[0].splitlines() if "is sent" in line]
    assert said == [
        f"Node 2 is sent {NAME} by node 0: of its own copy, optimizer.pt is missing.",
        f"Node 3 is sent {NAME} by node 0: of its own copy, the content of optimizer.pt does not match its checksum.",
        f"Node 4 is sent {NAME} by node 0: it does not hold that folder.",
        f"Node 5 is sent {NAME} by node 0: its own copy is of another save.",
    ]
    assert not list(tmp_path.rglob(".shared-*"))
