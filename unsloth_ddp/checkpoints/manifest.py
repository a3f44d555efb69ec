"""Read, write, verify and compare the manifests of checkpoints. Plain values only.

The manifest is the last file of a checkpoint and lists every other one. A folder is whole if its manifest is, and
every file that it lists is there with its size and checksum.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import xxhash

from unsloth_ddp.config.options import options_with
from unsloth_ddp.distributed.wire import sendable
from unsloth_ddp.utils.errors import os_reason
from unsloth_ddp.utils.files.checksums import checksum
from unsloth_ddp.utils.files.json import DECODER
from unsloth_ddp.utils.files.opened import MISSING, UNREAD
from unsloth_ddp.utils.files.safe import read_regular, stays_inside
from unsloth_ddp.utils.redaction import printable
from unsloth_ddp.utils.units import counted

T = TypeVar("T")

FILE_NAME = "manifest.json"
FORMAT = 1
# Hundreds of thousands of files.
MOST_BYTES = 1 << 26

# Options that a resumed run has to share with the checkpoint as given; their declarations say which.
GUARDED = (*options_with(on_resume="refuse", resolved=False), *options_with(on_resume="keep"))
# Of them, and of the fields of trainer_args, those whose first value is in the optimizer's saved state.
KEPT = options_with(on_resume="keep")
KEPT_FIELDS = ("adam_beta1", "adam_beta2", "adam_epsilon", "optim_args", "optim_target_modules")
# The one schedule whose state no other can read.
PLATEAU = "reduce_lr_on_plateau"
# Facts that it has to share: what the run made of options, and what follows from several of them.
GUARDED_FACTS = (
    *options_with(on_resume="refuse", resolved=True), "steps", "rows", "data", "sources", "sources_revision",
    "model_config", "model_tokenizer", "model_weights", "reference_model_config", "reference_model_weights",
)  # fmt: skip
# Options and facts whose change is reported and not refused: the same is computed elsewhere or otherwise.
SAID = ("world_size", "copies", *options_with(on_resume="report"))
# What a run needs beside the weights: the file as one process writes it, and its names with DDP, FSDP and DeepSpeed.
STATE_FILES = {
    "optimizer.pt": ("optimizer.pt", "optimizer.bin", "optimizer_*/*", "*_optim_states.pt"),
    "scheduler.pt": ("scheduler.pt", "*_model_states.pt"),
    "rng_state.pth": ("rng_state.pth", "rng_state_*.pth"),
}
# What a resume reads beside the weights. A file of such a name that the manifest does not list was not written by the
# run.
READ_ON_RESUME = (
    "optimizer.pt", "optimizer_rank_*.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth", "latest",
    "*_states.pt", "shard-*.safetensors", "*.distcp", ".metadata",
)  # fmt: skip
# Files that DeepSpeed, and torch's sharded checkpoints, read by unpickling: whoever wrote them can have run any code.
PICKLED = ("*_optim_states.pt", "*_model_states.pt", ".metadata")
# Shardings whose optimizer files are one a process.
FIXED_WORLD = ("zero2", "zero3")


class Damaged(ValueError):
    """A folder that is not a complete checkpoint; the message says what is wrong with it, and is safe to print."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


@sendable
@dataclass(frozen=True)
class Manifest:
    """Step of a checkpoint, identity of its run, package versions, and files as {path: (bytes, checksum)}."""

    step: int
    run: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, tuple[int, str]] = field(default_factory=dict)

    def to_text(self) -> str:
        """JSON with a checksum of itself."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "step": self.step,
            "run": self.run,
            "versions": self.versions,
            "files": {name: {"bytes": size, "xxh3_128": digest} for name, (size, digest) in self.files.items()},
        }
        return json.dumps({**content, "checksum": _checksum_of(content)}, indent=1) + "\n"


def from_text(text: str) -> Manifest:
    """Parse the text that `to_text` wrote.

    Raises:
        Damaged: it is anything else.
    """
    try:
        content = DECODER.decode(text)
    except (json.JSONDecodeError, RecursionError):
        raise Damaged(f"{FILE_NAME} is not JSON") from None
    except ValueError as error:
        raise Damaged(f"{FILE_NAME} is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise Damaged(f"{FILE_NAME} holds no mapping")
    checksum = content.pop("checksum", None)
    if content.get("format") != FORMAT:
        raise Damaged(f"{FILE_NAME} is of format {str(content.get('format'))[:20]}, which this release does not read")
    if checksum != _checksum_of(content):
        raise Damaged(f"{FILE_NAME} does not match its own checksum")
    try:
        step, run, versions = content["step"], content["run"], content["versions"]
        files = {name: (entry["bytes"], entry["xxh3_128"]) for name, entry in content["files"].items()}
    except (KeyError, TypeError, AttributeError):
        raise Damaged(f"{FILE_NAME} lacks a part") from None
    plain = all(type(size) is int and size >= 0 and isinstance(digest, str) for size, digest in files.values())
    if not (type(step) is int and step >= 0 and isinstance(run, dict) and isinstance(versions, dict) and plain):
        raise Damaged(f"{FILE_NAME} holds a value of the wrong type")
    for name in files:
        if not stays_inside(name):
            raise Damaged(f"{FILE_NAME} lists {name[:100]!r}, which is not a file of this folder")
    return Manifest(step, run, versions, files)


def _checksum_of(content: Mapping[str, Any]) -> str:
    return str(xxhash.xxh3_128(json.dumps(content, sort_keys=True).encode()).hexdigest())


# ---- files ----


def list_files(folder: Path) -> list[Path]:
    """Return every file below `folder` but the manifest at its top, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / FILE_NAME)


def describe_files(folder: Path, digests_by_path: Mapping[str, str] | None = None) -> dict[str, tuple[int, str]]:
    """Return size and checksum of every file below `folder`, the manifest left out.

    Args:
        digests_by_path: checksums by path below `folder`, of files that their writers have read.
    """
    paths = {path.relative_to(folder).as_posix(): path for path in list_files(folder)}
    digests = dict(digests_by_path or {})
    unknown = [name for name in paths if name not in digests]
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests |= zip(unknown, pool.map(lambda name: checksum(paths[name]), unknown), strict=True)
    return {name: (path.stat().st_size, digests[name]) for name, path in paths.items()}


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint folder; the files it lists are not read.

    Raises:
        Damaged: there is none, or it is not readable.
    """
    try:
        return from_text(read_regular(folder / FILE_NAME, MOST_BYTES).decode("utf-8"))
    except FileNotFoundError:
        raise Damaged(f"it has no {FILE_NAME}, so it was not written to its end") from None
    except OSError as error:
        raise Damaged(f"{FILE_NAME} cannot be read: {os_reason(error)}") from None
    except UnicodeDecodeError as error:
        raise Damaged(f"{FILE_NAME} cannot be read: {error}") from None


def verify(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint after checking that every file has its size and checksum.

    Raises:
        Damaged: naming the first file that is not.
    """
    manifest = read_manifest(folder)
    if "trainer_state.json" not in manifest.files:
        raise Damaged("it lists no trainer_state.json")
    for name, (size, _) in manifest.files.items():
        path = folder / name
        try:
            if not path.is_file() or not path.resolve().is_relative_to(folder.resolve()):
                raise Damaged(f"{name} is missing")
            if path.stat().st_size != size:
                raise Damaged(f"{name} has {path.stat().st_size:,} bytes instead of {size:,}")
        except OSError as error:
            raise Damaged(f"{name[:100]} cannot be read: {os_reason(error)}") from None

    for path in list_files(folder):
        name = path.relative_to(folder).as_posix()
        if name not in manifest.files and _is_named(path.name, READ_ON_RESUME):
            raise Damaged(f"it holds {name[:100]}, which its manifest does not list; remove that file")

    def matches(name: str) -> bool:
        try:
            return checksum(folder / name) == manifest.files[name][1]
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error}") from None

    with ThreadPoolExecutor(max_workers=4) as pool:
        for name, good in zip(manifest.files, pool.map(matches, manifest.files), strict=True):
            if not good:
                raise Damaged(f"the content of {name} does not match its checksum")
    return manifest


def _is_named(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def pickled_file(files: Iterable[str]) -> str | None:
    """Return the first of a checkpoint's files whose reading runs what it holds; None if there is none."""
    return next((name for name in files if _is_named(PurePosixPath(name).name, PICKLED)), None)


def holds_shards(files: Iterable[str]) -> bool:
    """Return whether a checkpoint's weights stand in shards (see shards.py)."""
    return any(fnmatch(name, "weights/shard-*.safetensors") for name in files)


def missing_state(files: Iterable[str]) -> str | None:
    """Return the first of STATE_FILES that a checkpoint lacks under every one of its names."""
    names = list(files)
    return next((file for file, globs in STATE_FILES.items() if not any(_is_named(n, globs) for n in names)), None)


# ---- resuming ----


@dataclass
class Comparison:
    """Differences between the run of a checkpoint and the run that would resume from it, as parts of sentences.

    `impossible` cannot be resumed at all, `refused` only with --resume_anyway, `reported` changes nothing that is
    learned; `instead` says how to resolve what is refused.
    """

    impossible: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)
    instead: str = "go back to the first value"


def compare_runs(saved: Mapping[str, Any], now: Mapping[str, Any], *, shards: bool = False) -> Comparison:
    """Compare the identities of two runs; a name that only one of them holds is not compared.

    Args:
        shards: the checkpoint holds shards that any number of processes can read, one without sharding too.
    """

    def changes(names: tuple[str, ...]) -> list[str]:
        both = [name for name in names if name in saved and name in now]
        # Earlier releases did not keep the commit of a Hub model.
        both = [name for name in both if not name.endswith("model_revision") or saved[name] is not None]
        return _changes(saved, now, both)

    files = _changed_files(saved.get("files"), now.get("files"))
    result = Comparison(refused=changes(GUARDED + GUARDED_FACTS) + files, reported=changes(SAID))
    packs, processes = saved.get("global_batch_size"), now.get("world_size")
    packed = "off" not in (saved.get("packing", "off"), now.get("packing", "off"))
    if packed and packs and processes and packs % processes:
        result.instead = (
            f"its steps hold {counted(packs, 'pack')}, which {counted(processes, 'process')} cannot share: start as "
            f"many as divide {packs}"
        )
    moved = ("model_revision", "reference_model_revision", "sources_revision")
    revisions = [name for name in moved if saved.get(name) and any(c.startswith(f"{name} ") for c in result.refused)]
    if revisions:
        option = {"sources_revision": "dataset_revision"}.get(revisions[0], revisions[0])
        values = saved[revisions[0]] if isinstance(saved[revisions[0]], list) else [saved[revisions[0]]]
        result.instead = f"give --{option} {' '.join(map(printable, map(str, values)))} to read the same commit again"
    elif files or any(
        change.removeprefix("reference_").startswith(("model_weights", "model_config", "model_tokenizer"))
        for change in result.refused
    ):
        result.instead = "put the earlier files of the model back"
    in_optimizer = [*changes(KEPT), *_changed_fields(saved.get("trainer_args"), now.get("trainer_args"))]
    schedules = [run.get("lr_scheduler_type") for run in (saved, now)]
    if PLATEAU in schedules and None not in schedules:
        in_optimizer += changes(("lr_scheduler_type",))
    if in_optimizer:
        result.impossible.append(
            f"{', '.join(in_optimizer)}: the saved state of the optimizer and its schedule holds the first value, and "
            "another would do nothing; go back to the first value"
        )
    if "trained" in saved and "trained" in now and saved["trained"] != now["trained"]:
        # A LoRA adapter's tensors that do not fit would partly be left out without an error.
        changed = ", ".join(result.refused) or f"{saved['trained']} -> {now['trained']}"
        result.impossible.append(
            f"other weights are trained than before ({changed}), and those of the checkpoint do not fit; go back to "
            "the first value"
        )
    old, new = saved.get("sharding", "none"), now.get("sharding", "none")
    if shards and new == "none":
        result.reported += [f"sharding {old} -> {new}"]
    elif old != new:
        result.impossible.append(
            f"sharding {old} -> {new}: the optimizer's files of one cannot be read by the other; start with {old}"
        )
    elif (offload := saved.get("offload", "none")) != now.get("offload", "none"):
        result.impossible.append(
            f"offload {offload} -> {now.get('offload', 'none')}: reading the optimizer's files elsewhere than they "
            "were written has not been tried; start with "
            f"accelerate_configs/{old}{'' if offload == 'none' else '_offload'}.yaml"
        )
    elif old in FIXED_WORLD and saved.get("world_size") != now.get("world_size"):
        result.impossible.append(
            f"world_size {saved.get('world_size')} -> {now.get('world_size')}: DeepSpeed's optimizer files are one a "
            f"process; start {counted(saved.get('world_size') or 1, 'process')}"
        )
    return result


def _changed_files(saved: Any, now: Any) -> list[str]:
    """Return the changes of the files that loading opened (see model/files/identity.py).

    A file that only this start opens has changed if it was not there. Another release of a library may open more files.
    """
    if not isinstance(saved, dict) or not isinstance(now, dict):
        return []
    parts = {name.partition("/")[0] for name in saved} - {"hub"}
    first = {name: MISSING for name in now if name.partition("/")[0] in parts} | saved
    opened = [name for name in now if now[name] != UNREAD and first.get(name, UNREAD) not in (UNREAD, now[name])]
    return [f"{_shown(name)} {_shown(first[name])} -> {now[name]}" for name in sorted(opened)]


def _changed_fields(saved: Any, now: Any) -> list[str]:
    """Return the changes of those fields of trainer_args that the optimizer's saved state holds."""
    if not isinstance(saved, dict) or not isinstance(now, dict):
        return []
    return _changes(saved, now, KEPT_FIELDS, absent="default")


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str], absent: str = "none") -> list[str]:
    """Return "NAME OLD -> NEW" for each of these names whose value changed."""
    return [
        f"{_shown(name)} {_shown(saved.get(name, absent))} -> {_shown(now.get(name, absent))}"
        for name in names
        if saved.get(name) != now.get(name)
    ]


def _shown(value: Any) -> str:
    text = printable(str(value))
    return text if len(text) <= 80 else text[:77] + "..."


def differing(saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the packages whose version changed, as "torch 2.13.0 -> 2.14.0"."""
    return _changes(saved, now, saved)


def newest(
    folders: Mapping[int, Path], read: Callable[[Path], T]
) -> tuple[tuple[Path, T] | None, list[tuple[Path, str]]]:
    """Return the newest checkpoint for which `read` does not raise Damaged, with its result, and those skipped."""
    skipped: list[tuple[Path, str]] = []
    for step in sorted(folders, reverse=True):
        try:
            return (folders[step], read(folders[step])), skipped
        except Damaged as error:
            skipped.append((folders[step], str(error)))
    return None, skipped


STEP_FOLDER = re.compile(r"checkpoint-(\d{1,18})")


def is_whole(folder: Path) -> bool:
    """Return whether a checkpoint was written to its end; only its manifest is read."""
    try:
        read_manifest(folder)
    except Damaged:
        return False
    return True


def step_folders(run_folder: Path) -> dict[int, Path]:
    """Return every folder that is named like a checkpoint, whole or not, by its step."""
    if not run_folder.is_dir():
        return {}
    named = ((STEP_FOLDER.fullmatch(path.name), path) for path in run_folder.iterdir())
    return {int(match[1]): path for match, path in named if match and path.is_dir()}
