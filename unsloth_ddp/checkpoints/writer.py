"""Write checkpoints that are whole or absent: aside, flushed to disk, described by a manifest, moved by one rename.

    <run>/checkpoint.partial/checkpoint-20/   while it is written; never offered, removed by the next start or save
    <run>/checkpoint-20/                      whole: manifest.json lists every file with its size and checksum

All ranks take part in a save and agree after each part of it, so that a failure on one of them (a full disk) is told
by the main process, leaves the last complete checkpoint, and keeps nobody waiting. A thread of the main process writes
what a save left to it (`later`), flushes, computes the checksums and moves the folder, while training continues. The
ranks learn how that ended when they `settle` it: before the next save, and wherever a complete checkpoint is needed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.checkpoints.manifest import Damaged, Manifest, is_whole, step_folders
from unsloth_ddp.distributed.exit_codes import note_saved_step
from unsloth_ddp.distributed.ranks import node_range
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.checksums import checksum
from unsloth_ddp.utils.files.durable import flush, flush_one, is_write_error, write_problem
from unsloth_ddp.utils.threads import in_thread

ASIDE, FINAL_ASIDE = "checkpoint.partial", "model.partial"
# Seconds that the end of a failed process waits for a checkpoint that is being written.
LAST_WAIT = 5.0
MARGIN = 64 * 1024
# Part of a save: whether this rank runs it, and its work.
Part = tuple[bool, Callable[[], None]]


def is_shared(runtime: Runtime, folder: Path) -> bool:
    """Return whether every node sees this folder of the main process; of one that cannot be written it is not known."""
    if runtime.ranks.nodes == 1:
        return True

    def mark() -> str | None:
        name = f".shared-{secrets.token_hex(8)}"
        try:
            (folder / name).touch()
        except OSError:
            return None
        return name

    name = runtime.broadcast_from_main(mark)
    if name is None:
        return False
    deadline = time.monotonic() + 5
    while not (folder / name).exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    everywhere = all(runtime.gather((folder / name).exists()))
    runtime.on_main(lambda: (folder / name).unlink(missing_ok=True))
    return everywhere


def check_shared(runtime: Runtime, run_folder: Path, shared: bool) -> None:
    """Refuse checkpoints on several nodes without a shared folder where every rank writes a part, or nodes may be lost.

    Raises:
        UserError: saying why the folder has to be shared.
    """
    if shared:
        return
    what, nodes = f"{run_folder} is not the same folder everywhere", runtime.ranks.nodes
    if runtime.sharding != "none":
        raise UserError(
            f"sharding {runtime.sharding} over {nodes} nodes needs an output_dir that all of them share, because every "
            f"node writes shards of each checkpoint, but {what}; put --output_dir on a shared disk, or use "
            "multi_node.yaml (DDP)."
        )
    if node_range():
        raise UserError(
            f"--min_nodes needs an output_dir that all {nodes} nodes share, because any of them may have to go on from "
            f"the checkpoint, but {what}; put --output_dir on a shared disk, or leave --min_nodes out."
        )


def to_remove(steps: list[int], written: int, best: int | None, limit: int | None) -> list[int]:
    """Return which complete checkpoints to remove now that `written` is whole.

    Later steps belong to a course that this run left by resuming at an earlier one. Among the rest the oldest go
    first; the one just written and the best one stay.
    """
    later = [step for step in steps if step > written]
    rest = sorted(step for step in steps if step <= written)
    if limit is None:
        return later
    protected = {written, best} & set(rest)
    spare = [step for step in rest if step not in protected]
    return later + spare[: max(0, len(rest) - max(limit, len(protected)))]


@dataclass(frozen=True)
class Completion:
    """A checkpoint that is being completed.

    Args:
        problem: why it could not be written, or None, once that is known; only the main process completes it.
        undo: is called on every rank if it could not be written.
    """

    step: int
    problem: Future[str | None] | None
    undo: Callable[[], None]


@dataclass(eq=False)
class Checkpoints:
    """Writes the checkpoints of one run.

    Args:
        folder: of the run.
        identity: what identifies the run (see identity.run_identity); written into every manifest.
        versions: package versions.
        limit: how many to keep; None keeps all.
        least_bytes: what the first checkpoint has at least; a save is not begun without room for that, or for another
            one as large as the last.
    """

    runtime: Runtime
    folder: Path
    identity: dict[str, Any]
    versions: dict[str, str]
    limit: int | None
    least_bytes: int = 0
    # All nodes see the run's folder (see open).
    shared: bool = field(default=True, init=False)
    last: Path | None = field(default=None, init=False)
    failed: str | None = field(default=None, init=False)
    written: int = field(default=0, init=False)
    _failure: str | None = field(default=None, init=False)
    _digests: dict[str, str] = field(default_factory=dict, init=False)
    _later: list[Callable[[], None]] = field(default_factory=list, init=False)
    _completion: Completion | None = field(default=None, init=False)

    def open(self) -> None:
        """Find out whether all nodes see the run's folder, which exists, and remove what a killed save left there.

        Raises:
            UserError: the sharding needs a shared folder, and there is none.
        """
        self.shared = is_shared(self.runtime, self.folder)
        check_shared(self.runtime, self.folder, self.shared)
        for name in (ASIDE, FINAL_ASIDE):
            self.runtime.on_main(functools.partial(shutil.rmtree, self.folder / name, ignore_errors=True))
        self.runtime.cleanup.callback(self._wait_at_the_end)

    def _wait_at_the_end(self) -> None:
        if self._completion is not None and self._completion.problem is not None:
            wait([self._completion.problem], LAST_WAIT)

    def resumed_from(self, folder: Path, step: int) -> None:
        """Record the run's own checkpoint that it resumes from as its last complete one."""
        self.last = folder
        note_saved_step(step)

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        best: Callable[[], int | None] = lambda: None,
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin the checkpoint of `step` on all ranks; `settle` waits for its end.

        Args:
            write: writes checkpoint-<step>/ into its folder, or leaves that to `later`; runs on every rank.
            best: returns the step of the best checkpoint, which is kept; called after the write.
            undo: is called on every rank if the checkpoint could not be written.
        """
        self.settle()
        ranks, aside = self.runtime.ranks, self.folder / ASIDE
        target = aside / f"checkpoint-{step}"
        self._digests, self._later = {}, []
        everyones: dict[str, str] = {}
        parts: list[Part] = [(ranks.is_main, lambda: self._prepare(aside)), (True, lambda: write(aside))]
        if self.runtime.sharding != "none":
            parts += [
                (ranks.is_local_main, lambda: flush(target) if target.exists() else None),
                (True, lambda: everyones.update(self._gather_digests(target))),
            ]
        if problem := self._write_together(parts):
            if ranks.is_main:
                self._give_up(step, aside, problem)
            self._failed(step, problem, undo)
            return
        identity = dict(self.identity)
        complete = functools.partial(
            self._complete, step, target, identity, everyones, best() if ranks.is_main else None
        )
        self._completion = Completion(step, _begin(complete) if ranks.is_main else None, undo)

    def later(self, work: Callable[[], None]) -> None:
        """Leave a part of a write, in the main process, to the thread that completes the checkpoint."""
        self._later.append(work)

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, if there is one; every rank calls this at the same point."""
        completion = self._completion
        if completion is None:
            return
        try:
            with self.runtime.progress.doing("saving"):
                problem = self.runtime.broadcast_from_main(lambda: completion.problem and completion.problem.result())
        finally:
            # Not earlier: if another rank dies meanwhile, the end of this process waits for the checkpoint too.
            self._completion = None
        if problem:
            self._failed(completion.step, problem, completion.undo)
            return
        self.last, self.failed, self.written = self.folder / f"checkpoint-{completion.step}", None, self.written + 1
        note_saved_step(completion.step)

    def _complete(
        self, step: int, target: Path, identity: dict[str, Any], digests: dict[str, str], best: int | None
    ) -> str | None:
        """Write what was left for later, publish the checkpoint, and return why that failed, or None."""

        def write() -> None:
            for work in self._later:
                work()
            if self.runtime.sharding == "none":
                flush(target)
            self._publish(Manifest(step, identity, self.versions, manifest.describe_files(target, digests)), target)

        if problem := self._try(write):
            self._give_up(step, target.parent, problem)
            return problem
        self.last = self.folder / target.name
        self._tidy(step, best)
        return None

    def _failed(self, step: int, problem: str, undo: Callable[[], None]) -> None:
        self.failed = _not_written(step, problem)
        undo()

    def save_final(self, write: Callable[[Path], None]) -> str | None:
        """Write the trained adapter or model and move its files into the run's folder; return why, if it failed.

        Args:
            write: writes the files into the folder that it is given; runs on every rank.
        """
        aside, main = self.folder / FINAL_ASIDE, self.runtime.ranks.is_main
        parts: list[Part] = [
            (main, lambda: self._prepare(aside)),
            (True, lambda: write(aside)),
            (main, lambda: self._move_out(aside)),
        ]
        problem = self._write_together(parts)
        if problem and main:
            shutil.rmtree(aside, ignore_errors=True)
        return problem

    def _move_out(self, aside: Path) -> None:
        flush(aside)
        for path in sorted(aside.iterdir()):
            path.replace(self.folder / path.name)
        flush_one(self.folder)
        aside.rmdir()

    def save_folder(self, name: str, write: Callable[[Path], None]) -> str | None:
        """Write the folder `name` of the run in the main process, whole or not at all; return why, if it failed.

        Args:
            write: writes its files into the folder that it is given, which does not exist yet.
        """
        aside, target = self.folder / f"{name}.partial", self.folder / name

        def write_and_move() -> None:
            try:
                shutil.rmtree(aside, ignore_errors=True)
                write(aside)
                flush(aside)
                shutil.rmtree(target, ignore_errors=True)
                aside.rename(target)
            finally:
                shutil.rmtree(aside, ignore_errors=True)

        return self.in_main(write_and_move)

    def in_main(self, work: Callable[[], Any]) -> str | None:
        """Run `work` in the main process; return on every rank why it could not write, or None."""

        return self.runtime.broadcast_from_main(lambda: self._try(work))

    def _try(self, work: Callable[[], Any]) -> str | None:
        """Run `work`, and return why it could not write, or None."""
        try:
            work()
        except Exception as error:
            if not is_write_error(error):
                raise
            return write_problem(error, self.folder)
        return None

    def every_write_attempted(self) -> contextlib.AbstractContextManager[None]:
        """Record a failed torch.save inside a library's sharded save instead of raising it.

        Such a save has collectives between its files, in which the other ranks would wait for the one that failed.
        """
        import torch

        from unsloth_ddp.model.modules import replaced

        save = torch.save
        return replaced(torch, "save", lambda *args, **kwargs: self.attempt(lambda: save(*args, **kwargs)))

    def attempt(self, work: Callable[[], Any]) -> bool:
        """Return whether `work` worked; a failed write is recorded, because the other ranks wait for this one."""
        problem = self._try(work)
        self._failure = self._failure or problem
        return problem is None

    def _write_together(self, parts: Sequence[Part]) -> str | None:
        """Run the parts of a save one after the other up to the first that fails on a rank; return why it failed."""
        self._failure = None
        for mine, part in parts:
            if mine:
                self.attempt(part)
            for rank, problem in enumerate(self.runtime.gather(self._failure)):
                if problem is not None:
                    return problem if rank == 0 else f"rank {rank}: {problem}"
        return None

    def _prepare(self, aside: Path) -> None:
        if aside.exists():
            shutil.rmtree(aside)
        if not self.folder.is_dir():
            print(f"{self.folder} was removed during training; it is created again.", flush=True)
        aside.mkdir(parents=True)
        if shutil.disk_usage(aside).free < max(self.least_bytes, self._bytes_of_last()) + MARGIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(aside))

    def _bytes_of_last(self) -> int:
        try:
            return sum(size for size, _ in manifest.read_manifest(self.last).files.values()) if self.last else 0
        except Damaged:  # somebody removed it
            return 0

    def wrote(self, paths: Iterable[Path]) -> None:
        """Record checksums of files that this rank wrote, so that the main process need not read them."""
        for path in paths:
            self._digests[str(path)] = checksum(path)

    def _gather_digests(self, target: Path) -> dict[str, str]:
        mine = {Path(path).relative_to(target).as_posix(): digest for path, digest in self._digests.items()}
        return {name: digest for part in self.runtime.gather(mine) for name, digest in part.items()}

    def _publish(self, described: Manifest, target: Path) -> None:
        path = target / manifest.FILE_NAME
        path.write_text(described.to_text(), encoding="utf-8")
        for written in (path, target):
            flush_one(written)
        final = self.folder / target.name
        if final.exists():
            final.rename(target.parent / f"replaced-{described.step}")
        target.rename(final)
        flush_one(self.folder)

    def _tidy(self, step: int, best: int | None) -> None:
        """Remove checkpoints over the limit, damaged or left behind; rename them first, as removing is slow."""
        folders = step_folders(self.folder)
        whole = [number for number, path in folders.items() if is_whole(path)]
        damaged = [number for number in folders if number not in whole]
        aside = self.folder / ASIDE
        try:
            for number in [*damaged, *to_remove(whole, step, best, self.limit)]:
                folders[number].rename(aside / f"removed-{number}")
        except OSError as error:
            print(f"An older checkpoint could not be removed: {write_problem(error, self.folder)}.")
        shutil.rmtree(aside, ignore_errors=True)

    def _give_up(self, step: int, aside: Path, problem: str) -> None:
        shutil.rmtree(aside, ignore_errors=True)
        remains = f"{self.last.name} stays the last complete one" if self.last else "there is no earlier one"
        print(f"{_not_written(step, problem)}; {remains}. The next save tries again.", flush=True)


def _begin(complete: Callable[[], str | None]) -> Future[str | None]:
    """Complete a checkpoint in a thread, or here if the system has none left, and return the problem to come."""
    try:
        return in_thread(complete, "checkpoint")
    except RuntimeError:
        completed: Future[str | None] = Future()
        completed.set_result(complete())
        return completed


def _not_written(step: int, problem: str) -> str:
    return f"checkpoint-{step} could not be written: {problem}"
