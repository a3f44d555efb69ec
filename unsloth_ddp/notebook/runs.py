"""The edit of tracked runs that start where every process trains, and so cannot be kept off the others."""

from __future__ import annotations

import libcst as cst

from unsloth_ddp.notebook.arguments import code, keyword, set_keyword, splats
from unsloth_ddp.notebook.context import Context
from unsloth_ddp.notebook.effects import starts_run

_NEEDS_MAIN = "every process starts this run; start it on the main process only"


def edit_run(call: cst.Call, full: str, context: Context) -> tuple[cst.Call, list[str]]:
    """A call that starts a run: W&B's runs are switched off elsewhere, where others have no such switch it is said.

    Args:
        full: the callee's path with imports resolved.
    """
    if context.on_one_process or not starts_run(full):
        return call, []
    if full != "wandb.init" or splats(call):
        return call, [context.warn("tracker", _NEEDS_MAIN)]
    old = keyword(call, "mode")
    given = f"({code(old.value)})" if old is not None else "None"
    call = set_keyword(call, "mode", f'{given} if {context.names["IS_MAIN"]} else "disabled"')
    return call, [context.edit("once", "only the main process's run is tracked; the others' does nothing")]
