"""Refuse misspelt names of schedules, optimizers and trackers, without importing Transformers.

Transformers takes seconds to import and has to be imported after Unsloth, so its names are read from its source.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.util
from collections.abc import Collection, Sequence
from pathlib import Path

from unsloth_ddp.utils.errors import UserError

# The file of Transformers, and the enum or dict in it.
SOURCES = {
    "optim": ("training_args.py", "OptimizerNames"),
    "lr_scheduler_type": ("trainer_utils.py", "SchedulerType"),
    "report_to": ("integrations/integration_utils.py", "INTEGRATION_TO_CALLBACK"),
}


@functools.cache
def known_names(option: str) -> tuple[str, ...]:
    """Return the names that the installed Transformers takes for an option; none where they are defined elsewhere."""
    spec = importlib.util.find_spec("transformers")
    file, wanted = SOURCES[option]
    path = Path(spec.origin).parent / file if spec and spec.origin else None
    if path is None or not path.is_file():
        return ()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        defined = [node.name] if isinstance(node, ast.ClassDef) else [t.id for t in _targets(node)]
        if wanted in defined:
            texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            return tuple(text for text in texts if text.isidentifier())
    return ()


def _targets(node: ast.stmt) -> list[ast.Name]:
    return [t for t in node.targets if isinstance(t, ast.Name)] if isinstance(node, ast.Assign) else []


def check_name(option: str, value: str) -> None:
    """Refuse a schedule or an optimizer that Transformers does not know.

    Raises:
        UserError: naming the nearest one.
    """
    known = known_names(option)
    if known and value not in known:
        hint = nearest(value, known, "the documentation of Transformers' TrainingArguments")
        raise UserError(f"{option} {value} is not one that Transformers knows; {hint}")


def choose_trackers(asked: Sequence[str], known: Collection[str], installed: Collection[str]) -> list[str]:
    """Return the trackers that get reports; `all` is every tracker that is installed.

    Raises:
        UserError: one is unknown or not installed, or none or all stands beside others.
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
    """Return the end of a sentence that refuses a name: the nearest known one, or the place that lists them."""
    near = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"{documentation} lists them."
