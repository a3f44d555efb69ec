"""Names that Transformers gives to schedules, optimizers and trackers, read from its source.

So a misspelt one is told before anything is loaded: Transformers itself is slow to import, and has to wait for Unsloth.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Collection, Sequence
from pathlib import Path

from unsloth_ddp.utils.errors import UserError

# The file, and the enum or dict in it.
PLACES = {
    "optim": ("training_args.py", "OptimizerNames"),
    "lr_scheduler_type": ("trainer_utils.py", "SchedulerType"),
    "report_to": ("integrations/integration_utils.py", "INTEGRATION_TO_CALLBACK"),
}


@functools.cache
def known_names(option: str) -> tuple[str, ...]:
    """What the installed Transformers takes for an option; nothing where it keeps its names elsewhere."""
    spec = importlib.util.find_spec("transformers")
    file, wanted = PLACES[option]
    path = Path(spec.origin).parent / file if spec and spec.origin else None
    if path is None or not path.is_file():
        return ()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.ClassDef(name=name, body=lines) if name == wanted:
                values: list[ast.expr | None] = [line.value for line in lines if isinstance(line, ast.Assign)]
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys)) if name == wanted:
                values = list(keys)
            case _:
                continue
        return tuple(one.value for one in values if isinstance(one, ast.Constant) and isinstance(one.value, str))
    return ()


def check_name(option: str, value: str) -> None:
    """Refuse a schedule or an optimizer that Transformers does not know.

    Raises:
        UserError: naming the one that is near.
    """
    known = known_names(option)
    if known and value not in known:
        hint = nearest(value, known, "the documentation of Transformers' TrainingArguments")
        raise UserError(f"{option} {value} is not one that Transformers knows; {hint}")


def choose_trackers(asked: Sequence[str], known: Collection[str], installed: Collection[str]) -> list[str]:
    """Where reports go; `all` is every tracker that is installed.

    Raises:
        UserError: one is unknown or not installed, or none stands beside others.
    """
    if list(asked) in ([], ["none"]):
        return []
    if list(asked) == ["all"]:
        return sorted(installed)
    for name in asked:
        if name in ("none", "all"):
            raise UserError(f"report_to {' '.join(asked)}: {name} stands alone; leave it or the others out.")
        if name not in known:
            raise UserError(
                f"report_to {name} is no tracker that Transformers knows; they are {', '.join(sorted(known))}."
            )
        if name not in installed:
            raise UserError(
                f"report_to {name}: its package is not installed; add it (uv pip install), or take tensorboard."
            )
    return list(asked)


def nearest(name: str, known: Collection[str], documentation: str) -> str:
    """The end of a sentence that refuses a name: the known one that is near, or where they stand."""
    near = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"{documentation} lists them."
