"""Refuse ranks that were started with other code, packages, options or devices than the main process."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from unsloth_ddp.config.options import OPTIONS, Settings
from unsloth_ddp.distributed.ranks import RankLocation
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.versions import kit_checksum, versions

# The main process decides it for all ranks.
DECIDED_BY_MAIN = ("run_name",)


def code_facts() -> dict[str, str]:
    """Return what identifies the code that this process runs: the kit's files, Python and the packages."""
    packages = versions()
    return {"the kit's files": kit_checksum()[:12], **packages, "python": packages["python"].rpartition(".")[0]}


def option_facts(settings: Settings) -> dict[str, str]:
    """Return a checksum of each option that has to be the same everywhere, so that no secret is sent.

    Folders and files may have another name on each node; what is read from them is compared where it is read.
    """
    options = {
        f"--{name}": [_same_path(item) for item in value] if isinstance(value, list) else _same_path(value)
        for name, value in dataclasses.asdict(settings).items()
        if name not in DECIDED_BY_MAIN and OPTIONS[name].path != "written"
    }
    texts = {name: json.dumps(value, sort_keys=True, default=str) for name, value in options.items()}
    return {name: xxhash.xxh3_64(text.encode()).hexdigest() for name, text in texts.items()}


def _same_path(value: Any) -> Any:
    try:
        return "a path" if isinstance(value, str) and Path(value).expanduser().exists() else value
    except (OSError, ValueError, RuntimeError):
        return value


def check_alike(
    gather: Callable[[Any], list[Any]],
    shown: Mapping[str, str],
    options: Mapping[str, str],
    locations: Sequence[RankLocation],
) -> None:
    """Compare the facts of every rank with those of rank 0; every rank calls this.

    Raises:
        UserError: on every rank, naming the first rank that differs and what differs there.
    """
    for rank, (theirs, their_options) in enumerate(everyones := gather((dict(shown), dict(options)))):
        first, first_options = everyones[0]
        differ = [
            f"{name} {theirs.get(name, 'none')} instead of {first.get(name, 'none')}"
            for name in sorted(theirs.keys() | first.keys())
            if theirs.get(name) != first.get(name)
        ]
        differ += [f"another {name}" for name in first_options if their_options.get(name) != first_options[name]]
        if differ:
            raise UserError(
                f"{locations[rank]} was started with {', '.join(differ[:5])} as rank 0; start every node with the same "
                "kit, environment (uv sync --locked), accelerate config and options."
            )
