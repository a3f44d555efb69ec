"""Replace what only notebook hosts (Colab, Kaggle, Databricks) have: drop it, or take it from the environment.

`_SECRETS` and `_DROPPED` are the table for all hosts: patterns of a callee's full path, and what becomes of the call.
What a host gives to Accelerate's `notebook_launcher` is called: a script's processes are started already.
"""

import re

import libcst as cst

from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.arguments import code, keyword
from unsloth_ddp.notebook.syntax.tree import dotted, full_path

MODULES = ("google.colab", "kaggle_secrets", "kaggle_datasets")
# Names that a host binds before the first cell.
HOST_NAMES = {"dbutils": "Databricks", "spark": "Databricks", "sc": "Databricks", "sqlContext": "Databricks"}

# Callee -> the argument (position, keyword) that names the secret.
_SECRETS = (
    (re.compile(r"google\.colab\.userdata\.get$"), 0, "key"),
    (re.compile(r"(.*\.)?get_secret$"), 0, "label"),
    (re.compile(r"dbutils\.secrets\.get$"), 1, "key"),
    (re.compile(r"dbutils\.widgets\.get$"), 0, "name"),
)
# Statements left out; the ones with a warning need something of the user.
_DROPPED = (
    (
        re.compile(r"google\.colab\.drive\.mount$"),
        "Google Drive is not mounted here; paths under /content/drive must be yours",
    ),
    (re.compile(r"google\.colab\.files\.upload$"), "nothing is uploaded here; put the files into this folder first"),
    (re.compile(r"google\.colab\.auth\.\w+$"), "sign in before the start: gcloud auth application-default login"),
    (re.compile(r"google\.colab\."), ""),
    (re.compile(r"kaggle_secrets\."), ""),
    (re.compile(r"dbutils\.(library\.restartPython|widgets\.(?!get\b)\w+)$"), ""),
)
_RESTARTS = re.compile(r"(os\._exit|os\.kill|(.*\.)?kernel\.do_shutdown|(.*\.)?kernel\.restart|.*\.do_shutdown)$")


def edit_value(call: cst.Call, context: ConversionContext) -> tuple[cst.BaseExpression | None, list[str]]:
    """Return what replaces a call whose value a host gives, and the comments; None where nothing does."""
    full = full_path(dotted(call.func), context.imports)
    on_kaggle = any(path.startswith("kaggle_secrets") for path in context.imports.values())
    for pattern, position, name in _SECRETS:
        if pattern.match(full) and (not full.endswith("get_secret") or on_kaggle):
            argument = keyword(call, name) or (call.args[position] if len(call.args) > position else None)
            if argument is None:
                continue
            note = context.edit("host", f"{code(argument.value)} comes from the environment")
            return cst.parse_expression(f"{context.names['secret']}({code(argument.value)})"), [note]
    if full == "google.colab.files.upload":
        note = context.warn("host", "nothing is uploaded here; UPLOADED_FILES=path[:path ...] names the files")
        return cst.parse_expression(f"{context.names['uploaded_files']}()"), [note]
    return None, []


def is_dropped(call: cst.Call, context: ConversionContext) -> bool:
    """Return whether a call is left out where it is a statement."""
    full = full_path(dotted(call.func), context.imports)
    return any(pattern.match(full) for pattern, _ in _DROPPED) or _restarts(call, full)


def note_dropped(call: cst.Call, context: ConversionContext) -> str:
    """Return the comment for a call that is left out."""
    path = dotted(call.func)
    full = full_path(path, context.imports)
    if _restarts(call, full):
        return context.edit("host", "restarting the kernel has no use in a script")
    warning = next(text for pattern, text in _DROPPED if pattern.match(full))
    return context.warn("host", warning) if warning else context.edit("host", f"{path} exists only on the host")


def _restarts(call: cst.Call, full: str) -> bool:
    return bool(_RESTARTS.match(full)) and (full != "os.kill" or "getpid" in code(call))


def is_secret(node: cst.BaseExpression, context: ConversionContext) -> bool:
    """Return whether an expression is a secret that may be unset: a call of the helper, or a name bound to one."""
    if isinstance(node, cst.Name):
        return node.value in context.secrets
    return isinstance(node, cst.Call) and dotted(node.func) in ("secret", "ddp_secret")


def without_host_names(node: cst.ImportFrom | cst.Import) -> cst.ImportFrom | cst.Import | None:
    """Return an import without the hosts' modules: as it is where it has none, None if nothing is left."""
    if isinstance(node, cst.ImportFrom):
        module = dotted(node.module) if node.module is not None else ""
        if _is_host(module):
            return None
        if module.split(".")[0] != "IPython" or isinstance(node.names, cst.ImportStar):
            return node
        return _without(node, [alias for alias in node.names if alias.evaluated_name != "get_ipython"])
    aliases = [alias for alias in node.names if not _is_host(dotted(alias.name))]
    return _without(node, aliases)


def _without(node: cst.ImportFrom | cst.Import, aliases: list[cst.ImportAlias]) -> cst.ImportFrom | cst.Import | None:
    if not aliases:
        return None
    if len(aliases) == len(node.names):  # type: ignore[arg-type]
        return node
    return node.with_changes(names=[*aliases[:-1], aliases[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)])


def imported_names(node: cst.ImportFrom | cst.Import) -> set[str]:
    """Return the names that an import binds, without the root of `import a.b`, which other imports may bind too."""
    if isinstance(node.names, cst.ImportStar):
        return set()
    named = [alias for alias in node.names if isinstance(node, cst.ImportFrom) or alias.asname is not None]
    return {alias.evaluated_alias or alias.evaluated_name for alias in named}


def _is_host(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in MODULES)


# The function, its arguments and the number of processes; what stands behind them is the precision.
_POSITIONAL = 3
# Arguments that say how many processes to start, and where: the launcher of the script has been told.
_OF_THE_LAUNCH = {"args", "num_processes", "num_nodes", "use_port", "master_addr", "node_rank"}


# Spark's launcher, whose `run` gets a function and its arguments.
makes_distributor = re.compile(r"(^|\.)(Deepspeed)?TorchDistributor$").search


def call_directly(call: cst.Call, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return `function(*args)` for `notebook_launcher(function, args, ...)`; other calls are returned unchanged.

    A launcher that also chooses a precision is left, and `checks.py` warns of it.
    """
    match call:
        case cst.Call(
            func=cst.Attribute(value=cst.Name(value=name) | cst.Call(func=cst.Name(value=name)), attr=cst.Name("run")),
            args=[cst.Arg(value=cst.Name() as function, keyword=None), *rest],
        ) if name in context.distributors or makes_distributor(context.imports.get(name, "")):
            note = context.edit("once", "call the function itself: the script's launcher has started the processes")
            return cst.Call(func=function, args=rest), [note]
    if not full_path(dotted(call.func), context.imports).endswith("accelerate.notebook_launcher"):
        return call, []
    plain = [arg for arg in call.args if arg.keyword is None]
    named = {arg.keyword.value for arg in call.args if arg.keyword is not None}
    if not plain or not isinstance(plain[0].value, cst.Name) or any(arg.star for arg in call.args):
        return call, []
    if not named <= _OF_THE_LAUNCH or len(plain) > _POSITIONAL:
        return call, []
    arguments = plain[1] if len(plain) > 1 else keyword(call, "args")
    note = context.edit("once", "call the function itself: the script's launcher has started the processes")
    return cst.Call(func=plain[0].value, args=[] if arguments is None else _spread(arguments.value)), [note]


def _spread(arguments: cst.BaseExpression) -> list[cst.Arg]:
    """Return the arguments that a tuple stands for."""
    if isinstance(arguments, cst.Tuple) and all(isinstance(element, cst.Element) for element in arguments.elements):
        return [cst.Arg(element.value) for element in arguments.elements]
    return [cst.Arg(arguments, star="*")]
