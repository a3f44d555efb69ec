"""Checkpoints that are whole or absent: written aside, flushed to disk, described by a manifest, moved by one rename.

    <run>/checkpoint.partial/checkpoint-20/   while it is written; never offered, removed by the next save
    <run>/checkpoint-20/                      whole: manifest.json lists every file with its size and checksum

All ranks take part in a save and agree after each part of it, so that a failure on one of them (a full disk) is told
by the main process, leaves the last whole checkpoint, and keeps nobody waiting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.checkpoints.manifest import Damaged, Manifest
from unsloth_ddp.config.parse import Settings
from unsloth_ddp.data.batch_plan import BatchPlan
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.identity import model_identity
from unsloth_ddp.utils.checksums import CHUNK
from unsloth_ddp.utils.durable_writes import flush, flush_one, is_write_error, reason
from unsloth_ddp.utils.errors import UserError

ASIDE, FINAL_ASIDE = "checkpoint.partial", "model.partial"
MARGIN = 64 * 1024


# ---- what a run goes on from ----


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run goes on from."""

    folder: Path
    manifest: Manifest
    of_this_run: bool = False

    @property
    def sentence(self) -> str:
        """What to say of a checkpoint that was found without being named."""
        step = self.manifest.step
        return f"Going on from {self.folder}, step {step}; --overwrite, or another --run_name, begins anew."

    def check(self, facts: dict[str, Any], anyway: bool) -> list[str]:
        """What to say about the differences between the checkpoint's run and this one.

        Raises:
            UserError: they change what is learned and `anyway` is not set, or the checkpoint cannot be read here.
        """
        found = manifest.compare(self.manifest.run, facts)
        if found.impossible:
            raise UserError(
                f"{self.folder} cannot be resumed: {found.impossible[0]}, or begin anew with another --run_name."
            )
        if found.refused and not anyway:
            raise UserError(
                f"{self.folder} was made by another run ({', '.join(found.refused)}); {found.instead}, begin "
                "anew with another --run_name, or give --resume_anyway."
            )
        sentences = [f"resume_anyway: {change}." for change in found.refused]
        if found.said:
            sentences.append(
                f"Changed since the checkpoint: {', '.join(found.said)}. A step takes the same rows as before; "
                "numbers are the same up to rounding, and dropout draws anew where the number of processes changed."
            )
        return sentences


def run_facts(settings: Settings, runtime: Runtime) -> dict[str, Any]:
    """What identifies a run before its rows are known; see manifest.compare."""
    facts = {name: getattr(settings, name) for name in manifest.GUARDED}
    model = Path(str(settings.model)).expanduser()
    facts |= {
        "model": str(model.resolve()) if model.exists() else settings.model,
        "gradient_checkpointing": settings.gradient_checkpointing,
        "attn_implementation": settings.attn_implementation,
        "world_size": runtime.ranks.world_size,
        "device": runtime.device_name,
        "nodes": runtime.ranks.nodes,
        "sharding": runtime.sharding,
        "backend": runtime.backend,
        "precision": runtime.precision,
    }
    return facts | runtime.broadcast_from_main(lambda: model_identity(settings))


def batch_facts(plan: BatchPlan) -> dict[str, Any]:
    """What a step holds, which with packing is known only once the rows are."""
    return {
        "per_device_train_batch_size": plan.per_device,
        "gradient_accumulation_steps": plan.accumulation,
        "global_batch_size": plan.global_batch,
    }


def choose(settings: Settings, runtime: Runtime, run_folder: Path, continues: bool) -> Start | None:
    """The checkpoint to go on from, the same on every rank; None begins anew.

    Args:
        continues: whether `run_folder` holds an unfinished run that this one may go on with.

    Raises:
        UserError: the folder named by --resume is not a whole checkpoint.
    """
    return runtime.broadcast_from_main(lambda: _choose(settings.resume, run_folder, continues))


def named_folder(wanted: str) -> Path | None:
    """The checkpoint folder that --resume names; None for auto and no.

    Raises:
        UserError: there is no such folder.
    """
    if wanted in ("auto", "no"):
        return None
    folder = Path(wanted).expanduser().resolve()
    if not folder.is_dir():
        raise UserError(f"resume {wanted}: there is no such folder; give a checkpoint folder, auto or no.")
    return folder


def _choose(wanted: str, run_folder: Path, continues: bool) -> Start | None:
    if folder := named_folder(wanted):
        try:
            start = Start(folder, manifest.verify(folder), folder.parent == run_folder)
        except Damaged as error:
            raise UserError(f"resume {wanted} is not a whole checkpoint: {error}; give another, auto or no.") from None
        return _with_state(start)
    if wanted == "no" or not continues:
        return None
    whole: dict[Path, Manifest] = {}
    newest, skipped = manifest.newest(
        step_folders(run_folder), lambda path: whole.setdefault(path, manifest.verify(path))
    )
    for damaged, problem in skipped:
        print(f"{damaged.name} is skipped: {problem}.")
    if newest is None:
        print(f"{run_folder} holds an unfinished run without a whole checkpoint; it begins anew.")
        return None
    return _with_state(Start(newest, whole[newest], of_this_run=True))


def _with_state(start: Start) -> Start:
    """`start`, unless the Trainer would go on from it with a new optimizer, schedule or dropout, and say nothing."""
    if missing := manifest.missing_state(start.manifest.files):
        raise UserError(
            f"{start.folder} holds no {missing}, so a run cannot go on from it (save_only_model leaves that out); give "
            "--resume another checkpoint, or begin anew with another --run_name."
        )
    return start


def check(start: Start, facts: dict[str, Any], settings: Settings, runtime: Runtime) -> list[str]:
    """`start.check` by the main process, whose refusal every rank raises alike."""
    return runtime.broadcast_from_main(lambda: start.check(facts, settings.resume_anyway))


def bring(start: Start, runtime: Runtime) -> Start:
    """The checkpoint as this process sees it: where a node has no such folder, the main process sends it its files.

    The copy lies in a temporary folder of the node and goes at the end of the run.

    Raises:
        UserError: a node did not receive the files whole.
    """
    ranks = runtime.ranks
    try:
        here = manifest.read_manifest(start.folder) == start.manifest
    except Damaged:
        here = False
    seen = runtime.gather(here)
    node_sees = seen[ranks.rank - ranks.local_rank]
    if all(seen):
        return start
    copy: Path | None = None
    if not node_sees and ranks.is_local_main:
        copy = Path(tempfile.mkdtemp(prefix="unsloth_ddp_checkpoint_"))
        runtime.cleanup.callback(shutil.rmtree, copy, ignore_errors=True)
    for name, (size, _) in start.manifest.files.items():
        _send_file(start.folder / name, copy / name if copy else None, size, runtime)
    problem = None
    if copy:
        (copy / manifest.FILE_NAME).write_text(start.manifest.to_text(), encoding="utf-8")
        try:
            manifest.verify(copy)
        except (Damaged, OSError) as error:
            problem = f"node {ranks.node_rank}: {error}"
    problems = [text for text in runtime.gather(problem) if text]
    if problems:
        raise UserError(
            f"{start.folder} did not reach every node whole ({problems[0]}); check their temporary folders."
        )
    copies = runtime.gather(copy)
    own = copies[ranks.rank - ranks.local_rank]
    return start if own is None else dataclasses.replace(start, folder=own)


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


def is_shared(runtime: Runtime, run_folder: Path) -> bool:
    """Whether every node sees the main process's run folder; each node's own has to exist by now."""
    if runtime.ranks.nodes == 1:
        return True
    mark = runtime.broadcast_from_main(lambda: f".shared-{secrets.token_hex(8)}")
    runtime.on_main((run_folder / mark).touch)
    deadline = time.monotonic() + 5
    while not (run_folder / mark).exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    everywhere = all(runtime.gather((run_folder / mark).exists()))
    runtime.on_main(lambda: (run_folder / mark).unlink(missing_ok=True))
    return everywhere


def check_sharing(runtime: Runtime, run_folder: Path, shared: bool) -> None:
    """Refuse what needs a shared folder and has none.

    Raises:
        UserError: every rank would write a part of each checkpoint to a disk of its own.
    """
    if not shared and runtime.sharding != "none":
        raise UserError(
            f"sharding {runtime.sharding} over {runtime.ranks.nodes} nodes needs an output_dir that all of them share, "
            f"because every node holds a part of each checkpoint, but {run_folder} is not the same folder everywhere; "
            "put --output_dir on a shared disk, or use multi_node.yaml (DDP)."
        )


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint was written to its end; its files are not read."""
    try:
        manifest.read_manifest(folder)
    except Damaged:
        return False
    return True


def step_folders(run_folder: Path) -> dict[int, Path]:
    """Every folder that is named like a checkpoint, whole or not, by its step."""
    if not run_folder.is_dir():
        return {}
    named = ((re.fullmatch(r"checkpoint-(\d{1,18})", path.name), path) for path in run_folder.iterdir())
    return {int(match[1]): path for match, path in named if match and path.is_dir()}


# ---- what a run writes ----


def to_remove(steps: list[int], written: int, best: int | None, limit: int | None) -> list[int]:
    """The whole checkpoints that go now that `written` is whole, given all whole ones.

    Later steps are of a future that this run left by going back; among the rest the oldest go first, and what was
    just written and the best one stay.
    """
    left = [step for step in steps if step > written]
    rest = sorted(step for step in steps if step <= written)
    if limit is None:
        return left
    kept = {written, best} & set(rest)
    spare = [step for step in rest if step not in kept]
    return left + spare[: max(0, len(rest) - max(limit, len(kept)))]


class Checkpoints:
    """Writes the checkpoints of one run.

    Args:
        facts: what the manifest says of the run (see run_facts).
        versions: package versions.
        limit: how many to keep; None keeps all.
    """

    def __init__(
        self, runtime: Runtime, run_folder: Path, facts: dict[str, Any], versions: dict[str, str], limit: int | None
    ) -> None:
        self.runtime = runtime
        self.folder = run_folder
        self.facts = facts
        self.versions = versions
        self.limit = limit
        # Whether all nodes see the run's folder (see is_shared).
        self.shared = True
        # Bytes of the weights that are trained, which are written first.
        self.weights_bytes = 0
        self.last: Path | None = None
        self.failed: str | None = None
        self.written = 0
        self._failure: Exception | None = None

    def save(self, step: int, write: Callable[[Path], None], best: Callable[[], int | None] = lambda: None) -> bool:
        """Make the checkpoint of `step` on all ranks; whether it is whole.

        Args:
            write: writes checkpoint-<step>/ into the folder that it is given; runs on every rank.
            best: afterwards, the step of the best checkpoint, which stays.
        """
        ranks, aside = self.runtime.ranks, self.folder / ASIDE
        target = aside / f"checkpoint-{step}"
        self._failure = None
        parts: list[tuple[bool, Callable[[], None]]] = [
            (ranks.is_main, lambda: self._prepare(aside)),
            (True, lambda: write(aside)),
            (ranks.is_local_main, lambda: flush(target) if target.exists() else None),
            (ranks.is_main, lambda: self._publish(step, target)),
        ]
        for mine, part in parts:
            if mine:
                self.attempt(part)
            if problem := self._problem():
                self._give_up(step, aside, problem)
                return False
        self.last, self.failed, self.written = self.folder / target.name, None, self.written + 1
        if ranks.is_main:
            self._tidy(step, best())
        return True

    def save_final(self, write: Callable[[Path], None]) -> str | None:
        """Write the trained adapter or model, aside, and move its files into the run's folder; why not, if it failed.

        Args:
            write: writes the files into the folder that it is given; runs on every rank.
        """
        aside = self.folder / FINAL_ASIDE
        self._failure = None
        main = self.runtime.ranks.is_main
        for mine, part in (
            (main, lambda: self._prepare(aside)),
            (True, lambda: write(aside)),
            (main, lambda: self._move_out(aside)),
        ):
            if mine:
                self.attempt(part)
            if problem := self._problem():
                if main:
                    shutil.rmtree(aside, ignore_errors=True)
                return problem
        return None

    def _move_out(self, aside: Path) -> None:
        flush(aside)
        for path in sorted(aside.iterdir()):
            path.replace(self.folder / path.name)
        flush_one(self.folder)
        aside.rmdir()

    def save_folder(self, name: str, write: Callable[[Path], None]) -> str | None:
        """Write the folder `name` of the run in the main process, whole or not at all; why not, if it failed.

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
        """Run `work` in the main process; why it could not write, on every rank."""

        def tried() -> str | None:
            try:
                work()
            except Exception as error:
                if not is_write_error(error):
                    raise
                return reason(error, self.folder)
            return None

        return self.runtime.broadcast_from_main(tried)

    @contextlib.contextmanager
    def every_write_attempted(self) -> Iterator[None]:
        """Let a failed torch.save inside a library's own sharded save be remembered instead of raised.

        Such a save has collectives between its files, in which the other ranks would wait for the one that failed.
        """
        import torch

        save = torch.save
        torch.save = lambda *args, **kwargs: self.attempt(lambda: save(*args, **kwargs))
        try:
            yield
        finally:
            torch.save = save

    def attempt(self, work: Callable[[], Any]) -> None:
        """Run `work`; if it fails to write, remember that and go on, since the other ranks are counting on this one."""
        try:
            work()
        except Exception as error:
            if not is_write_error(error):
                raise
            self._failure = self._failure or error

    def _problem(self) -> str | None:
        mine = None if self._failure is None else reason(self._failure, self.folder)
        for rank, problem in enumerate(self.runtime.gather(mine)):
            if problem is not None:
                return problem if rank == 0 else f"rank {rank}: {problem}"
        return None

    def _prepare(self, aside: Path) -> None:
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir(parents=True)
        # What cannot be written to its end is not begun.
        if shutil.disk_usage(aside).free < self.weights_bytes + MARGIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(aside))

    def _publish(self, step: int, target: Path) -> None:
        described = Manifest(step, self.facts, self.versions, manifest.describe_files(target))
        path = target / manifest.FILE_NAME
        path.write_text(described.to_text(), encoding="utf-8")
        for written in (path, target):
            flush_one(written)
        final = self.folder / target.name
        if final.exists():
            final.rename(target.parent / f"replaced-{step}")
        target.rename(final)
        flush_one(self.folder)

    def _tidy(self, step: int, best: int | None) -> None:
        """Remove what is over the limit, unfinished or left behind; first out of sight, since removing takes a while."""
        folders = step_folders(self.folder)
        whole = [number for number, path in folders.items() if is_whole(path)]
        damaged = [number for number in folders if number not in whole]
        aside = self.folder / ASIDE
        try:
            for number in [*damaged, *to_remove(whole, step, best, self.limit)]:
                folders[number].rename(aside / f"removed-{number}")
        except OSError as error:
            print(f"An older checkpoint could not be removed: {reason(error, self.folder)}.")
        shutil.rmtree(aside, ignore_errors=True)

    def _give_up(self, step: int, aside: Path, problem: str) -> None:
        self.failed = f"checkpoint-{step} could not be written: {problem}"
        if self.runtime.ranks.is_main:
            shutil.rmtree(aside, ignore_errors=True)
            kept = f"{self.last.name} stays the last whole one" if self.last else "there is no earlier one"
            print(f"{self.failed}; {kept}. The next save tries again.", flush=True)


def make_cpu_checkpoints_readable() -> None:
    """Teach torch.load the location tag "cpu:0" that CPU processes write and no release of torch reads back."""
    import torch

    torch.serialization.register_package(
        100,
        lambda storage: None,
        lambda storage, location: storage if location.startswith("cpu:") else None,
    )
