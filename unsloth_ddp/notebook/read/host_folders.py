"""Replace the folders of a notebook's host where it goes to them, and find the paths in them that it names."""

import re
from collections.abc import Callable

import libcst as cst

from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.arguments import code, with_value
from unsloth_ddp.notebook.syntax.ipython import command_of, ipython_call
from unsloth_ddp.notebook.syntax.tree import dotted, full_path

# Folders in which a host starts a notebook; a script starts anywhere.
_HOMES = {"/content": "Colab", "/kaggle/working": "Kaggle"}
# Folders whose files no other machine has.
_MOUNTED = {
    "/content/drive": "Google Drive is not mounted here",
    "/content/gdrive": "Google Drive is not mounted here",
    "/kaggle/input": "Kaggle's data sets are not mounted here",
}
_PATH = re.compile(r"(?<![\w.~/{}$-])/(?:content|kaggle/(?:working|input))(?![\w.-])(?:/[^\s'\"`;|&<>()]*)?")
_ASKS_FOR_HOST = re.compile(r"colab|kaggle|/content\b", re.IGNORECASE)


def change_folder(
    path: str, what: str, quote: Callable[[str], str], context: ConversionContext
) -> tuple[str | None, str] | None:
    """Return the expression for a folder that a notebook goes to, and the comment; None if it is not the host's.

    The folder in which the host starts a notebook becomes the one in which the script is started. The expression is
    None for a folder that no other machine has: that change is left out.

    Args:
        path: the folder, as the notebook gives it.
        what: the statement, for the comment.
        quote: returns the source of a string for the part of the path below the host's folder.
    """
    if mounted := next((name for name in _MOUNTED if _below(path, name) is not None), None):
        why = f"{what} left out: {_MOUNTED[mounted]}; start the script in the folder that holds the files"
        return None, context.warn("host", why)
    for home, host in _HOMES.items():
        rest = _below(path, home)
        if rest is not None:
            start = context.names["START_FOLDER"]
            note = context.edit("host", f"{what}: {home} of {host} is the folder in which the script was started")
            return (f"os.path.join({start}, {quote(rest)})" if rest else start), note
    return None


def edit_chdir(call: cst.Call, context: ConversionContext) -> tuple[cst.Call | None, str] | None:
    """Return what replaces `os.chdir("/content/...")`, and the comment; None where nothing does (see change_folder)."""
    if full_path(dotted(call.func), context.imports) != "os.chdir" or len(call.args) != 1:
        return None
    folder_argument = call.args[0].value
    path = folder_argument.evaluated_value if isinstance(folder_argument, cst.SimpleString) else None
    changed = change_folder(path, code(call), repr, context) if isinstance(path, str) else None
    if changed is None:
        return None
    folder, note = changed
    if folder is None:
        return None, note
    return with_value(call, call.args[0], cst.parse_expression(folder)), note


def host_paths(node: cst.BaseStatement) -> list[str]:
    """Return the host's paths that a statement names."""
    collector = _Paths()
    node.visit(collector)
    return list(dict.fromkeys(collector.paths))


def _below(path: str, folder: str) -> str | None:
    """Return the part of a path below a folder, "" for the folder itself; None for a path elsewhere."""
    if path.rstrip("/") == folder:
        return ""
    return path.removeprefix(f"{folder}/").strip("/") if path.startswith(f"{folder}/") else None


class _Paths(cst.CSTVisitor):
    """Collect the host's paths in the strings and commands of a statement, except where it has asked for the host."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def visit_If(self, node: cst.If) -> bool:
        if not _ASKS_FOR_HOST.search(code(node.test)):
            return True
        if node.orelse is not None:
            node.orelse.visit(self)
        return False

    def visit_IfExp(self, node: cst.IfExp) -> bool:
        return not _ASKS_FOR_HOST.search(code(node.test))

    def visit_Call(self, node: cst.Call) -> bool:
        magic = ipython_call(node)
        command = " ".join(magic.args) if magic is not None else command_of(node)
        self.paths += _PATH.findall(command)
        return not command

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        if isinstance(node.evaluated_value, str):
            self._begins_with(node.evaluated_value)

    def visit_FormattedString(self, node: cst.FormattedString) -> bool:
        if node.parts and isinstance(node.parts[0], cst.FormattedStringText):
            self._begins_with(node.parts[0].value)
        return False

    def _begins_with(self, text: str) -> None:
        if path := _PATH.match(text):
            self.paths.append(path[0])
