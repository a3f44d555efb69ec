"""Edit trackers' runs that start inside code that every process runs."""

from __future__ import annotations

import libcst as cst

from unsloth_ddp.notebook.arguments import code, keyword, set_keyword, splats
from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.effects import starts_run

_NEEDS_MAIN = "every process starts this run; start it on the main process only"


def edit_run(call: cst.Call, full: str, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Switch off a W&B run on other processes, and warn about other trackers, which have no such switch.

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
