"""Find the checkpoint that a run resumes from, compare its run with this one, and bring it to every node."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.checkpoints.manifest import Damaged, Manifest, step_folders
from unsloth_ddp.checkpoints.trainer_state import check_trainer_state
from unsloth_ddp.checkpoints.writer import is_shared
from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.wire import sendable
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.versions import versions

# A file is sent to other nodes in parts of this many bytes.
CHUNK = 1 << 22


@sendable
@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from."""

    folder: Path
    manifest: Manifest
    of_this_run: bool = False

    def compare(self, identity: dict[str, Any], anyway: bool) -> list[str]:
        """Return a sentence for each difference between the checkpoint's run and this one.

        Raises:
            UserError: a difference changes what is learned without `anyway`, or this run cannot read the checkpoint.
        """
        shards = manifest.holds_shards(self.manifest.files)
        comparison = manifest.compare_runs(self.manifest.run, identity, shards=shards)
        if comparison.impossible:
            raise UserError(
                f"{self.folder} cannot be resumed: {comparison.impossible[0]}, or start again with another --run_name."
            )
        if comparison.refused and not anyway:
            raise UserError(
                f"{self.folder} was written by another run ({', '.join(comparison.refused)}); {comparison.instead}, "
                "start again with another --run_name, or give --resume_anyway."
            )
        sentences = [f"resume_anyway: {change}." for change in comparison.refused]
        if comparison.reported:
            sentences.append(
                f"Changed since the checkpoint: {', '.join(comparison.reported)}. A step takes the same rows as "
                "before; numbers are the same up to rounding, and dropout draws anew where processes or rows a device "
                "changed."
            )
        if packages := manifest.differing(self.manifest.versions, versions()):
            sentences.append(
                f"Packages changed since the checkpoint: {', '.join(packages)}. Numbers may differ from those of an "
                "uninterrupted run."
            )
        return sentences


def find_resume_point(settings: Settings, runtime: Runtime, run_folder: Path, continues: bool) -> ResumePoint | None:
    """Return the checkpoint to resume from, the same on every rank; None starts the run at step 0.

    Args:
        continues: `run_folder` holds an unfinished run that this one may continue.

    Raises:
        UserError: the folder named by --resume is not a complete checkpoint.
    """
    return runtime.broadcast_from_main(lambda: _find(settings, run_folder, continues))


def named_folder(resume: str) -> Path | None:
    """Return the checkpoint folder that --resume names; None for auto and no.

    Raises:
        UserError: there is no such folder, or it is a run's folder, which holds checkpoints, or no checkpoint.
    """
    if resume in ("auto", "no"):
        return None
    folder = Path(resume).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"resume {resume}: there is no such folder; give a checkpoint folder, auto or no.")
    if steps := step_folders(folder):
        newest = Path(resume) / steps[max(steps)].name
        raise UserError(
            f"resume {resume} is the folder of a run; give one of its checkpoints, such as --resume {newest}, or leave "
            f"--resume out and give --run_name {folder.name} to resume that run."
        )
    if not (folder / manifest.FILE_NAME).is_file():
        raise UserError(
            f"resume {resume} is not a complete checkpoint: it has no {manifest.FILE_NAME}; give another folder, auto "
            "or no."
        )
    return folder


def _find(settings: Settings, run_folder: Path, continues: bool) -> ResumePoint | None:
    resume = settings.resume
    if folder := named_folder(resume):
        try:
            point = ResumePoint(folder, _verify(folder), folder.parent == run_folder)
        except Damaged as error:
            raise UserError(
                f"resume {resume} is not a complete checkpoint: {error}; give another, auto or no."
            ) from None
        # The run's own folder is this user's; one from elsewhere may hold files that run what they hold.
        if (
            not settings.trust_checkpoint
            and not point.of_this_run
            and (name := manifest.pickled_file(point.manifest.files))
        ):
            raise UserError(
                f"{folder} lies outside this run's folder, and reading {name} can run code; if you trust its source "
                "add --trust_checkpoint, or give --run_name (and --output_dir) of the run that wrote it."
            )
        return _with_state(point)
    if resume == "no" or not continues:
        return None
    newest, skipped = manifest.newest(step_folders(run_folder), _verify)
    for damaged, problem in skipped:
        print(f"{damaged.name} is skipped: {problem}.")
    if newest is None:
        print(f"{run_folder} holds an unfinished run without a complete checkpoint; it starts again at step 0.")
        return None
    return _with_state(ResumePoint(*newest, of_this_run=True))


def _verify(folder: Path) -> Manifest:
    verified = manifest.verify(folder)
    check_trainer_state(folder, verified)
    return verified


def _with_state(point: ResumePoint) -> ResumePoint:
    """Return `point` if it holds all that a resume needs.

    The Trainer would otherwise resume with a new optimizer, schedule or random state, without a message.
    """
    if missing := manifest.missing_state(point.manifest.files):
        raise UserError(
            f"{point.folder} holds no {missing}, so a run cannot resume from it (save_only_model leaves that out); "
            "give --resume another checkpoint, or start again with another --run_name."
        )
    return point


def check_resume(point: ResumePoint, identity: dict[str, Any], settings: Settings, runtime: Runtime) -> list[str]:
    """Run `point.compare` in the main process; every rank gets its sentences, or raises its refusal."""
    return runtime.broadcast_from_main(lambda: point.compare(identity, settings.resume_anyway))


def fetch(point: ResumePoint, runtime: Runtime) -> ResumePoint:
    """Return the checkpoint as this node sees it; the main process sends its files to nodes that lack some.

    The main process has verified its own folder. A node that sees another one verifies that too: with an optimizer of
    another step, or without one, its ranks would train other weights. A copy lies in a temporary folder of the node and
    is removed at the end of the run.

    Raises:
        UserError: a node did not receive every file whole.
    """
    ranks = runtime.ranks
    if is_shared(runtime, point.folder):
        return point
    problem_here = runtime.on_main(lambda: None if ranks.is_main else _why_not_here(point), per_node=True)
    problems = runtime.gather(problem_here)
    if not any(problems):
        return point
    if ranks.is_main:
        for node, why in enumerate(problems[:: ranks.local_world_size]):
            if why:
                print(f"Node {node} is sent {point.folder.name} by node 0: {why}.", flush=True)
    copy: Path | None = None
    if problem_here:
        copy = Path(tempfile.mkdtemp(prefix="unsloth_ddp_checkpoint_"))
        runtime.cleanup.callback(shutil.rmtree, copy, ignore_errors=True)
    for name, (size, _) in point.manifest.files.items():
        _send_file(point.folder / name, copy / name if copy else None, size, runtime)
    problem = None
    if copy:
        (copy / manifest.FILE_NAME).write_text(point.manifest.to_text(), encoding="utf-8")
        try:
            manifest.verify(copy)
        except (Damaged, OSError) as error:
            problem = f"node {ranks.node_rank}: {error}"
    failed = [text for text in runtime.gather(problem) if text]
    if failed:
        raise UserError(
            f"{point.folder} did not reach every node complete ({failed[0]}); check their temporary folders."
        )
    node_copy = runtime.broadcast_from_node_main(lambda: copy and str(copy))
    return point if node_copy is None else dataclasses.replace(point, folder=Path(node_copy))


def _why_not_here(point: ResumePoint) -> str | None:
    """Return why this node cannot resume from its own copy of a checkpoint; None if that is the same and whole."""
    if not point.folder.exists():
        return "it does not hold that folder"
    try:
        same = manifest.verify(point.folder) == point.manifest
    except Damaged as damage:
        return f"of its own copy, {damage}"
    return None if same else "its own copy is of another save"


def _send_file(source: Path, target: Path | None, size: int, runtime: Runtime) -> None:
    """Broadcast one file from the main process; a part that cannot be read or written shows in its checksum."""
    import torch
    import torch.distributed as dist

    with contextlib.ExitStack() as files:
        reading = writing = None
        with contextlib.suppress(OSError):
            if runtime.ranks.is_main:
                reading = files.enter_context(source.open("rb"))
            if target:
                target.parent.mkdir(parents=True, exist_ok=True)
                writing = files.enter_context(target.open("wb"))
        for offset in range(0, size, CHUNK):
            part = torch.zeros(min(CHUNK, size - offset), dtype=torch.uint8)
            with contextlib.suppress(OSError):
                if reading:
                    reading.readinto(part.numpy().data)
            dist.broadcast(part, src=0, group=runtime.control_group)
            with contextlib.suppress(OSError):
                if writing:
                    writing.write(part.numpy().data)


def make_cpu_checkpoints_readable() -> None:
    """Teach torch.load the location tag "cpu:0" that CPU processes write and no release of torch reads back."""
    import torch

    torch.serialization.register_package(
        100, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
    )
