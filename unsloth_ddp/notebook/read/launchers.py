"""Call what a notebook gives to Accelerate's `notebook_launcher`: a script's processes are started already."""

from __future__ import annotations

import libcst as cst

from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.arguments import keyword
from unsloth_ddp.notebook.syntax.tree import dotted, full_path

# The function, its arguments and the number of processes; what stands behind them is the precision.
_POSITIONAL = 3
# Arguments that say how many processes to start, and where: the launcher of the script has been told.
_OF_THE_LAUNCH = {"args", "num_processes", "num_nodes", "use_port", "master_addr", "node_rank"}


def call_directly(call: cst.Call, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return `function(*args)` for `notebook_launcher(function, args, ...)`; other calls are returned unchanged.

    A launcher that also chooses a precision is left, and `checks.py` warns of it.
    """
    if not full_path(dotted(call.func), context.imports).endswith("accelerate.notebook_launcher"):
        return call, []
    plain = [arg for arg in call.args if arg.keyword is None]
    named = {arg.keyword.value for arg in call.args if arg.keyword is not None}
    if not plain or not isinstance(plain[0].value, cst.Name) or any(arg.star for arg in call.args):
        return call, []
    if not named <= _OF_THE_LAUNCH or len(plain) > _POSITIONAL:
        return call, []
    given = plain[1] if len(plain) > 1 else keyword(call, "args")
    note = context.edit("once", "call the function itself: the script's launcher has started the processes")
    return cst.Call(func=plain[0].value, args=[] if given is None else _spread(given.value)), [note]


def _spread(given: cst.BaseExpression) -> list[cst.Arg]:
    """Return the arguments that a tuple stands for."""
    if isinstance(given, cst.Tuple) and all(isinstance(element, cst.Element) for element in given.elements):
        return [cst.Arg(element.value) for element in given.elements]
    return [cst.Arg(given, star="*")]
