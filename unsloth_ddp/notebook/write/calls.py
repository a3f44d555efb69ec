"""Edit calls that start commands, log in or draw, so that many processes may make them without anybody who answers."""

import re

import libcst as cst

from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.arguments import code, keyword, set_keyword, splats, with_value
from unsloth_ddp.notebook.syntax.tree import dotted

_STARTS = re.compile(
    r"^(subprocess\.(run|call|check_call|check_output|Popen)|asyncio\.(subprocess\.)?create_subprocess_(exec|shell))$"
)
# These take no environment: the command itself removes the variables.
_SHELLS = re.compile(r"^(os\.popen|subprocess\.(getoutput|getstatusoutput))$")


def edit_command(call: cst.Call, full: str, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return a call whose command does not get the launcher's variables: with them it would join the job and hang."""
    note = "the command does not get the launcher's variables"
    if full == "os.system" and len(call.args) == 1:
        call = call.with_changes(func=cst.Name(context.names["run_shell"]))
        return call, [context.edit("shell", note)]
    if _SHELLS.match(full):
        return _edit_shell(call, note, context)
    if not _STARTS.match(full) or not call.args:
        return call, []
    environment = keyword(call, "env")
    if environment is None and splats(call):
        return call, [context.warn("shell", "takes the launcher's variables along: pass env=child_environment()")]
    inner = "" if environment is None or code(environment.value) in ("None", "os.environ") else code(environment.value)
    helper = context.names["child_environment"]
    if environment is None:  # after the others: the command comes first
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
    command = next((arg for arg in call.args if arg.keyword is None or arg.keyword.value == "cmd"), None)
    if command is None:
        return call, []
    wrapped = cst.Call(cst.Name(helper), [cst.Arg(command.value)])
    return with_value(call, command, wrapped), [context.edit("shell", note)]


_HUB = re.compile(r"^huggingface_hub\.(\w+\.)*(notebook_login|login|interpreter_login)$")


def edit_login(call: cst.Call, full: str, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return a login that takes what it finds and never asks: nobody could answer, and a widget ends a script."""
    helper, what = ("hub_login", "token") if _HUB.match(full) else ("wandb_login", "key")
    if helper == "wandb_login" and full != "wandb.login":
        return call, []
    note = context.edit("login", f"logs in with the {what} given or found; never asks for one")
    return call.with_changes(func=cst.Name(context.names[helper])), [note]


# Method or function -> the keyword that seeds it.
_SEEDED = {"train_test_split": "seed", "shuffle": "seed", "sample": "random_state"}
_GENERATORS = {"random.Random", "numpy.random.default_rng", "numpy.random.RandomState"}


def edit_generator(call: cst.Call, full: str, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return the call of a random generator with a seed, where it has none."""
    if full not in _GENERATORS or call.args:
        return call, []
    seeded = call.with_changes(args=[cst.Arg(cst.Integer(str(context.options.seed)))])
    return seeded, [context.edit("seed", "a random generator without a seed: every process must draw the same")]


def edit_seed(call: cst.Call, full: str, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return a random choice of a dataset or a data frame with a seed, where it has none."""
    path = dotted(call.func)
    tail = path.split(".")[-1]
    name = _SEEDED.get(tail)
    if name is None or splats(call) or ("." not in path and tail != "train_test_split"):
        return call, []
    if full.split(".")[0] in ("random", "numpy", "torch") or "rng" in path.lower() or "random" in path.lower():
        return call, []
    if tail == "shuffle" and any(arg.keyword is None for arg in call.args):
        return call, []  # shuffle(seed), or a generator's shuffle(list)
    if tail == "train_test_split" and "." not in path:
        name = "random_state"  # scikit-learn's
    if tail == "sample" and not _samples_rows(call):
        return call, []
    old = keyword(call, name)
    if old is not None and not (isinstance(old.value, cst.Name) and old.value.value == "None"):
        return call, []
    if keyword(call, "generator") is not None:
        return call, []
    call = set_keyword(call, name, str(context.options.seed))
    return call, [context.edit("seed", f"{tail} had no seed: every process must choose the same rows")]


def _samples_rows(call: cst.Call) -> bool:
    """Return whether a sample() is a data frame's: random.sample takes a population too."""
    if any(arg.keyword and arg.keyword.value in ("n", "frac", "axis") for arg in call.args):
        return True
    return len(call.args) == 1 and isinstance(call.args[0].value, cst.Integer | cst.Name)
