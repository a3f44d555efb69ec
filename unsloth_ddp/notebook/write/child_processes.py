"""Start commands without the launcher's variables, by which they would join the job and wait for it for ever."""

from __future__ import annotations

import re

import libcst as cst

from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.arguments import code, keyword, set_keyword, splats

_STARTS = re.compile(
    r"^(subprocess\.(run|call|check_call|check_output|Popen)|asyncio\.(subprocess\.)?create_subprocess_(exec|shell))$"
)
# These take no environment: the command itself removes the variables.
_SHELLS = re.compile(r"^(os\.popen|subprocess\.(getoutput|getstatusoutput))$")


def edit_command(call: cst.Call, full: str, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return a call that starts a command with an environment of its own.

    Args:
        full: the callee's path with imports resolved.
    """
    note = "the command does not get the launcher's variables"
    if full == "os.system" and len(call.args) == 1:
        call = call.with_changes(func=cst.Name(context.names["run_shell"]))
        return call, [context.edit("shell", note)]
    if _SHELLS.match(full):
        return _edit_shell(call, note, context)
    if not _STARTS.match(full) or not call.args:
        return call, []
    given = keyword(call, "env")
    if given is None and splats(call):
        return call, [context.warn("shell", "takes the launcher's variables along: pass env=child_environment()")]
    inner = "" if given is None or code(given.value) in ("None", "os.environ") else code(given.value)
    helper = context.names["child_environment"]
    if given is None:  # after the others: the command comes first
        last = call.args[-1]
        if isinstance(last.comma, cst.MaybeSentinel):
            last = last.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
        none = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
        env = cst.Arg(cst.parse_expression(f"{helper}()"), keyword=cst.Name("env"), equal=none)
        return call.with_changes(args=[*call.args[:-1], last, env]), [context.edit("shell", note)]
    return set_keyword(call, "env", f"{helper}({inner})"), [context.edit("shell", note)]


def _edit_shell(call: cst.Call, note: str, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return a call whose command runs without the launcher's variables, where the call takes no `env`."""
    helper = context.names["own_shell"]
    if any(arg.star for arg in call.args):
        return call, [context.warn("shell", f"takes the launcher's variables along: give the command to {helper}()")]
    for index, arg in enumerate(call.args):  # a position or a keyword: nothing else can be the command
        if arg.keyword is None or arg.keyword.value == "cmd":
            wrapped = arg.with_changes(value=cst.Call(cst.Name(helper), [cst.Arg(arg.value)]))
            args = [*call.args[:index], wrapped, *call.args[index + 1 :]]
            return call.with_changes(args=args), [context.edit("shell", note)]
    return call, []
