"""Put the edited statements of a notebook together as a script: header, helpers, cells, end."""

import ast
import re
import sys
from dataclasses import dataclass

import libcst as cst

from unsloth_ddp.notebook.analyse.checks import check_notebook, check_statement
from unsloth_ddp.notebook.analyse.graph import SEEDS, Graph, Role
from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.arguments import code
from unsloth_ddp.notebook.syntax.effects import Effect, makes_accelerator
from unsloth_ddp.notebook.syntax.ipython import command_of, without_installs
from unsloth_ddp.notebook.syntax.lines import comment_line
from unsloth_ddp.notebook.syntax.tree import assignment, dotted
from unsloth_ddp.notebook.syntax.usage import NAMESPACE
from unsloth_ddp.notebook.types import Cell, Notebook
from unsloth_ddp.notebook.write.loops import share_loop
from unsloth_ddp.notebook.write.prologue import render_device, render_region
from unsloth_ddp.notebook.write.rewrite import rewrite
from unsloth_ddp.notebook.write.writer import DEVICE_MARK, EditedStatement, cell_body, needs_no_guard

_IMPORT_TIME = re.compile(r"^(UNSLOTH|CUDA|PYTORCH|TORCH|HF|TRANSFORMERS|TOKENIZERS|VLLM|NCCL|TRITON|BNB|OMP|MKL)_")
_ON_GPU = re.compile(
    r"""\.cuda\(\)|\.to\((device\s*=\s*)?["']cuda["']|torch\.device\(["']cuda["']\)|^\w*device\w* = ["']cuda["']"""
)
# Third-party modules that neither import torch nor touch a GPU.
_LIGHT = {"google", "numpy", "pandas", "tqdm", "dotenv", "requests", "wandb", "huggingface_hub", "matplotlib"}
_LIGHT |= {"sklearn", "PIL", "yaml", "rich", "kagglehub", "IPython", "seaborn", "mlflow", "ipywidgets", "httpx"}
_LIGHT |= {"psutil", "pydantic"}
_HASHING = {"set", "frozenset", "hash", "intersection", "union", "difference", "symmetric_difference"}


@dataclass
class CodeCell:
    """A code cell, parsed, with its magics turned into Python."""

    number: int
    module: cst.Module
    body: list[cst.BaseStatement]
    top: list[str]
    footer: list[cst.EmptyLine]


def write_script(notebook: Notebook, cells: list[CodeCell], graph: Graph, context: ConversionContext) -> str:
    """Return the script of a notebook whose statements have their roles, with the marks of report entries in it."""
    notes = check_notebook(graph, context)
    placed: dict[int, list[EditedStatement]] = {cell.number: [] for cell in cells}
    loads = any(site.tail == "DataLoader" for site in graph.sites)
    context.accelerated = graph.prepares and loads and any(makes_accelerator(graph.full_path(s)) for s in graph.sites)
    for index, statement in enumerate(graph.statements):
        context.cell = statement.cell
        if statement.role is Role.DROP:
            for site in statement.usage.calls:
                context.requirements += without_installs(command_of(site.node))[1]
            placed[statement.cell].append(EditedStatement(statement, index, statement.node))
            continue
        statement.node = share_loop(statement, graph, context)
        checks = check_statement(statement, graph, context)
        node = rewrite(statement, graph, context)
        if statement.role is Role.FIRST and _sends(node, context):
            statement.role = Role.ALL  # who waits for his turn does not receive
        placed[statement.cell].append(EditedStatement(statement, index, node, checks))
    first = _first_heavy(graph)
    by_number = {cell.number: cell for cell in cells}
    future: list[str] = []
    texts = [
        _code(by_number[cell.number], placed[cell.number], first, graph, context, future)
        if cell.kind == "code"
        else _prose(cell)
        for cell in notebook.cells
    ]
    body = "\n".join(texts) + _ending(graph, context)
    quiet = ""
    if _speaks(graph) or "display" in context.names.used:
        context.names.used.add("quiet_print")
        context.cell = None
        quiet = context.edit("print", "code that every process runs prints on the main process only")
    if any(NAMESPACE in graph.stores_of(s.usage) for s in graph.statements if s.role is not Role.DROP):
        context.names.used.add("keep_names")
    needs_gpu = context.unsloth or f'{{"": {context.names["LOCAL_RANK"]}}}' in body or _moves_to_gpu(graph)
    device, body = _place_device(render_device(context.names, needs_gpu=needs_gpu), body)
    environment = _hoisted(graph, first)
    hashes = _orders_by_hash(body)
    region = render_region(context.names, environment, quiet, device, unsloth=context.unsloth, hashes=hashes)
    return _header(context, notes) + "".join(future) + region + "\n" + body


def _moves_to_gpu(graph: Graph) -> bool:
    """Return whether what trains is moved to a GPU without a look at whether there is one."""
    everywhere = [s for s in graph.statements if s.needed and s.everywhere]
    return any(_ON_GPU.search(code(s.node)) and "is_available" not in code(s.node) for s in everywhere)


def _sends(node: cst.CSTNode, context: ConversionContext) -> bool:
    """Return whether a statement receives values of the main process when it runs."""
    if "from_main" not in context.names.used or isinstance(node, cst.FunctionDef | cst.ClassDef):
        return False
    if isinstance(node, cst.Call) and code(node.func) == context.names["from_main"]:
        return True
    return any(_sends(part, context) for part in node.children)


def _place_device(device: str, body: str) -> tuple[str, str]:
    """Return the lines that choose the GPU, "" once they are in the body, behind what runs before a heavy import."""
    ahead, mark, after = body.partition(DEVICE_MARK + "\n")
    if not mark:
        return device, body
    if any(line and not line.startswith("#") and not _imports_standard(line) for line in ahead.splitlines()):
        return "", ahead + device + after
    return device, ahead.removesuffix("# %%\n") + after.lstrip("\n")


def _imports_standard(line: str) -> bool:
    """Return whether a line does nothing but import modules of the standard library."""
    statement = re.fullmatch(r"import ([\w., ]+)|from ([\w.]+) import [\w., ]+", line)
    roots = (
        {name.strip().split(".")[0].split(" ")[0] for name in (statement[1] or statement[2]).split(",")}
        if statement
        else set()
    )
    return bool(roots) and roots <= sys.stdlib_module_names


def _header(context: ConversionContext, notes: list[str]) -> str:
    lines = [
        f"# Made from {context.report.notebook} to train on several GPUs; what was changed is marked `# ddp:`.",
        "#",
        "#     python SCRIPT                        one process",
        "#     accelerate launch SCRIPT             every GPU of this machine",
        "#     torchrun --nproc-per-node 2 SCRIPT   two of them",
    ]
    requirements = context.report.requirements = _without_repeats(context.requirements)
    if requirements:
        lines += ["#", "# The notebook installed these; install them before you run this:"]
        lines += ["#     " + name for name in requirements]
    if notes:
        lines += ["#", *notes]
    return "\n".join(lines) + "\n\n"


def _without_repeats(requirements: list[str]) -> list[str]:
    """Return what to install, each package once: the notebook's last words on its version count."""
    latest: dict[str, str] = {}
    for text in requirements:
        name = " ".join(text.split())
        package = re.split(r"[\[<>=!~;@ ]", name.lower().replace("_", "-"), maxsplit=1)[0]
        if re.fullmatch(r"pip\d?-autoremove", package):
            continue  # it served to uninstall
        key = package if re.fullmatch(r"[a-z0-9][a-z0-9.-]*", package) else name
        if key not in latest or name.lower().replace("_", "-") != package:
            latest[key] = name
    return list(latest.values())


def _prose(cell: Cell) -> str:
    title = "# %% [markdown]" if cell.kind == "markdown" else "# %% [raw]"
    lines = [f"# {line}".rstrip() for line in cell.source.split("\n")]
    return "\n".join([title, *lines]) + "\n"


def _code(
    cell: CodeCell,
    placed: list[EditedStatement],
    first: int,
    graph: Graph,
    context: ConversionContext,
    future: list[str],
) -> str:
    shown = []
    for item in placed:
        if any(path.startswith("__future__.") for path in item.statement.usage.imports.values()):
            future.append(code(item.node.with_changes(leading_lines=[])))
        else:
            shown.append(item)
    ahead, comments = cell_body([item for item in shown if item.index < first], graph, context)
    after, more = cell_body([item for item in shown if item.index >= first], graph, context)
    starts_here = any(item.index == first for item in shown)
    mark = cst.SimpleStatementLine(body=[cst.Expr(cst.Name(DEVICE_MARK))])
    if starts_here and ahead:
        ahead.append(mark)
    header = [*(comment_line(note) for note in cell.top), *cell.module.header]
    module = cell.module.with_changes(
        header=header, body=[*ahead, *after], footer=[*comments, *more, *cell.footer, *cell.module.footer]
    )
    text = "# %%\n" + module.code.strip("\n") + "\n"
    return f"# %%\n{DEVICE_MARK}\n\n{text}" if starts_here and not ahead else text


def _first_heavy(graph: Graph) -> int:
    """Find the first statement that could touch a GPU: the device is chosen just before it."""
    for index, statement in enumerate(graph.statements):
        if statement.role in (Role.DEAD, Role.DROP):
            continue
        modules = {path.split(".")[0] for path in statement.usage.imports.values()}
        touches = any(site.path in graph.functions for site in statement.usage.calls)
        touches |= "import *" in code(statement.node)  # a module of the notebook's own, most likely
        hidden = any(site.path in ("__import__", "exec", "importlib.import_module") for site in statement.usage.calls)
        if modules - sys.stdlib_module_names - _LIGHT or touches or hidden or statement.effects & {Effect.LOAD, *SEEDS}:
            return index
    return 0


def _orders_by_hash(source: str) -> bool:
    """Return whether code uses sets or hashes, whose order differs by process."""
    try:
        tree = ast.parse(source.replace("\x00", ""))  # the marks of report entries
    except SyntaxError:
        return True  # Python that is newer than this one
    return any(
        isinstance(node, ast.Set | ast.SetComp)
        or (isinstance(node, ast.Name) and node.id in _HASHING)
        or (isinstance(node, ast.Attribute) and node.attr in _HASHING)
        for node in ast.walk(tree)
    )


def _hoisted(graph: Graph, first: int) -> list[str]:
    """Collect environment variables that libraries read on import and that the notebook sets before it trains."""
    lines: dict[str, str] = {}
    for statement in graph.statements[first : graph.last_seed + 1 or None]:
        match assignment(statement.node):
            case cst.Subscript(value=owner, slice=[key]) as target, cst.SimpleString() as value if (
                dotted(owner) == "os.environ"
            ):
                name = code(key.slice).strip("\"'")
                if _IMPORT_TIME.match(name) and not re.search("TOKEN|KEY|SECRET", name):
                    lines[name] = f"{code(target)} = {code(value)}\n"
    return list(lines.values())


def _speaks(graph: Graph) -> bool:
    """Return whether code that runs on every process prints."""
    for statement in graph.statements:
        guarded = statement.apart and not needs_no_guard(statement, graph)
        if guarded or statement.role in (Role.DEAD, Role.DROP):
            continue
        if any(site.path == "print" for site in statement.sites):
            return True
    return False


def _ending(graph: Graph, context: ConversionContext) -> str:
    """Return the end of the script: all processes wait for the last save, then the group is closed."""
    context.cell = None
    objects = sorted(
        set().union(*(s.usage.writes for s in graph.statements if s.effects & {Effect.TRAINER, Effect.LOAD}), set())
    )
    names = ", ".join(f'"{name}"' for name in objects)
    note = context.edit("end", "wait for the main process's last work, then leave the process group")
    return f"\n# %%\n{note}\n{context.names['finish']}({names})\n"
