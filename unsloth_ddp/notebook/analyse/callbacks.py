"""Find callbacks that stop, save or evaluate by themselves: on their own clock the processes would not agree."""

from __future__ import annotations

import libcst as cst

from unsloth_ddp.notebook.syntax.tree import contains


def decides(node: cst.FunctionDef) -> bool:
    """Return whether a callback's method sets a flag of its control (`control.should_training_stop = True`)."""
    return node.name.value.startswith("on_") and contains(node.body, _sets_flag)


def _sets_flag(node: cst.CSTNode) -> bool:
    match node:
        case cst.AssignTarget(target=cst.Attribute(attr=cst.Name(value=name))):
            return name.startswith("should_")
    return False
