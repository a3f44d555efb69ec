"""Find callbacks that stop, save or evaluate by themselves: on their own clock the processes would not agree."""

from __future__ import annotations

import libcst as cst


def decides(node: cst.FunctionDef) -> bool:
    """Return whether a callback's method sets a flag of its control (`control.should_training_stop = True`)."""
    if not node.name.value.startswith("on_"):
        return False
    finder = _Decisions()
    node.body.visit(finder)
    return finder.found


class _Decisions(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found = False

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        target = node.target
        self.found |= isinstance(target, cst.Attribute) and target.attr.value.startswith("should_")
