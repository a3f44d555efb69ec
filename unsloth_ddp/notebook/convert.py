"""Convert a notebook: read it, turn magics into Python, decide where statements run, edit them, write the script."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path, PurePath

import libcst as cst

from unsloth_ddp.notebook.arguments import code, keyword
from unsloth_ddp.notebook.checks import (
    check_notebook,
    check_statement,
    only_remote_training,
    only_training_command,
    trains_nothing,
)
from unsloth_ddp.notebook.commands import training_line
from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.draws import assign_seeds
from unsloth_ddp.notebook.effects import Effect, is_trainer_call
from unsloth_ddp.notebook.graph import SEEDS, Graph, Role, Statement, build
from unsloth_ddp.notebook.ipython import command_of, without_installs
from unsloth_ddp.notebook.lines import comment_line
from unsloth_ddp.notebook.links import link
from unsloth_ddp.notebook.magics import Lowered, add_automagic, lower
from unsloth_ddp.notebook.main_values import mark_sent
from unsloth_ddp.notebook.name_usage import collect
from unsloth_ddp.notebook.normalise import normalise
from unsloth_ddp.notebook.prologue import IDENTIFIERS, MODULES, Names, render_device, render_region
from unsloth_ddp.notebook.reader import read_notebook
from unsloth_ddp.notebook.rewrite import rewrite
from unsloth_ddp.notebook.roles import assign_roles
from unsloth_ddp.notebook.stand_ins import stand_in_for_runs
from unsloth_ddp.notebook.syntax import dotted
from unsloth_ddp.notebook.types import Cell, Conversion, ConversionOptions, ConversionReport, Notebook, NotebookError
from unsloth_ddp.notebook.writer import DEVICE_MARK, EditedStatement, cell_body, needs_no_guard

_IMPORT_TIME = re.compile(r"^(UNSLOTH|CUDA|PYTORCH|TORCH|HF|TRANSFORMERS|TOKENIZERS|VLLM|NCCL|TRITON|BNB|OMP|MKL)_")


@dataclass
class _CodeCell:
    number: int
    module: cst.Module
    body: list[cst.BaseStatement]
    top: list[str]
    footer: list[cst.EmptyLine]


def convert(path: Path, options: ConversionOptions | None = None) -> Conversion:
    """Convert the notebook at `path`. Raises NotebookError where that is not possible."""
    return convert_notebook(read_notebook(path), options or ConversionOptions())


def convert_notebook(notebook: Notebook, options: ConversionOptions) -> Conversion:
    """Convert a notebook that has been read. Raises NotebookError where that is not possible."""
    code_cells = [cell for cell in notebook.cells if cell.kind == "code"]
    sources = [cell.source for cell in code_cells]
    if trains_nothing(sources) and not any(training_line(source) for source in sources):
        raise NotebookError(f"{notebook.name}: no cell trains or loads a model; give a fine-tuning notebook.")
    report = ConversionReport(" ".join(PurePath(notebook.name).name.split()))
    parsed = [(cell, *_parse(cell, notebook.name)) for cell in code_cells]
    context = _context(parsed, options, report)
    cells = [_normalised(cell, module, lowered, context) for cell, module, lowered in parsed]
    graph = build((cell.number, cell.body) for cell in cells)
    link(graph)
    command = only_training_command(graph)
    if command is not None:
        raise NotebookError(
            f"{notebook.name}: its only training is the command `{command[1]}` in cell {command[0]}, which starts "
            "processes of its own; run that command itself on several GPUs, or give a notebook whose cells train."
        )
    elsewhere = only_remote_training(graph)
    if elsewhere is not None:
        raise NotebookError(
            f"{notebook.name}: its only training, `{elsewhere[1]}()` in cell {elsewhere[0]}, runs on machines of a "
            "service; choose the number of GPUs there, or give a notebook whose cells train."
        )
    _know_configs(graph, context)
    assign_roles(graph)
    mark_sent(graph)
    stand_in_for_runs(graph)
    assign_seeds(graph)
    script = _write(notebook, cells, graph, context)
    script = context.place(script)
    _check_syntax(script, notebook.name, context)
    for entries in (report.edits, report.warnings):
        entries.sort(key=lambda entry: (entry.line or 0, entry.cell or 0))
    return Conversion(script, report)


def _parse(cell: Cell, name: str) -> tuple[cst.Module, Lowered]:
    """Parse a cell, with automagic if it is no Python without."""
    try:
        return _parsed(cell.source)
    except (cst.ParserSyntaxError, SyntaxError):
        source = add_automagic(cell.source)
    try:
        return _parsed(source)
    except cst.ParserSyntaxError as error:
        line = error.raw_line
        lines = lower(source).source.splitlines() or [""]
        text = lines[min(line, len(lines)) - 1].strip()
        raise NotebookError(
            f"{name}: cell {cell.number} is not Python (line {line}: {text[:80]!r}); correct it in the notebook."
        ) from None
    except SyntaxError as error:
        raise NotebookError(
            f"{name}: cell {cell.number} is not Python (line {error.lineno}: {error.msg}); correct it in the notebook."
        ) from None


def _parsed(source: str) -> tuple[cst.Module, Lowered]:
    lowered = lower(source)
    return cst.parse_module(lowered.source), lowered


def _context(
    parsed: list[tuple[Cell, cst.Module, Lowered]],
    options: ConversionOptions,
    report: ConversionReport,
) -> ConversionContext:
    usages = [collect(statement) for _, module, _ in parsed for statement in module.body]
    bound = set().union(*(f.writes for f in usages), set())
    read = set().union(*(f.reads for f in usages), set())
    imports: dict[str, str] = {}
    for item in usages:
        imports.update(item.imports)
    rebound = {n for item in usages for n in item.writes if n in MODULES and item.imports.get(n) != n}
    names = Names(frozenset((bound | read) & set(IDENTIFIERS)), frozenset(rebound))
    if "display" in read - bound:
        names.used.add("display")
    return ConversionContext(options, names, report, bound, imports)


def _normalised(cell: Cell, module: cst.Module, lowered: Lowered, context: ConversionContext) -> _CodeCell:
    context.cell = cell.number
    context.left_out += [(cell.number, text) for text in lowered.left_out]
    top = []
    for name in lowered.removed:
        if name in lowered.unknown:
            top.append(context.warn("magic", f"{name} cell left out: a script has nothing like it"))
        else:
            top.append(context.edit("magic", f"{name} is for notebooks"))
    body, pending = normalise(list(module.body), context)
    return _CodeCell(cell.number, module, body, top, pending)


def _know_configs(graph: Graph, context: ConversionContext) -> None:
    """Find the classes whose instances trainers take as arguments, whatever they are called."""
    made: dict[str, str] = {}
    sites = [site for s in graph.statements for site in s.usage.calls]
    sites += [site for body in graph.functions.values() for site in body.calls]
    for statement in graph.statements:
        for site in statement.usage.calls:
            if len(statement.usage.writes) == 1:
                made.setdefault(next(iter(statement.usage.writes)), site.path)
    for site in sites:
        if not is_trainer_call(site, graph.trainer_classes):
            continue
        found = keyword(site.node, "args")
        if found is None:
            continue
        path = dotted(found.value.func) if isinstance(found.value, cst.Call) else made.get(code(found.value), "")
        if path.split(".")[-1][:1].isupper():
            context.config_classes.add(path)
            context.trainers_of_config.setdefault(path, set()).add(site.tail)


# Writing -------------------------------------------------------------------------------------------------------------


def _write(notebook: Notebook, cells: list[_CodeCell], graph: Graph, context: ConversionContext) -> str:
    notes = check_notebook(graph, context)
    placed: dict[int, list[EditedStatement]] = {cell.number: [] for cell in cells}
    for index, statement in enumerate(graph.statements):
        context.cell = statement.cell
        if statement.role is Role.DROP:
            _note_requirements(statement, context)
            placed[statement.cell].append(EditedStatement(statement, index, statement.node))
            continue
        checks = check_statement(statement, graph, context)
        placed[statement.cell].append(EditedStatement(statement, index, rewrite(statement, graph, context), checks))
    first = _first_heavy(graph)
    by_number = {cell.number: cell for cell in cells}
    texts: list[str] = []
    future: list[str] = []
    for cell in notebook.cells:
        if cell.kind != "code":
            texts.append(_prose(cell))
            continue
        texts.append(_code(by_number[cell.number], placed[cell.number], first, graph, context, future))
    body = "\n".join(texts)
    body += _ending(graph, context)
    quiet = ""
    if _speaks(placed, graph) or "display" in context.names.used:
        context.names.used.add("quiet_print")
        context.cell = None
        quiet = context.edit("print", "code that every process runs prints on the main process only")
    unsloth = any(path.split(".")[0] == "unsloth" for path in context.imports.values())
    device, body = _place_device(render_device(context.names), body)
    environment = _hoisted(graph, first)
    hashes = _orders_by_hash(body)
    region = render_region(context.names, environment, quiet, device, unsloth=unsloth, hashes=hashes)
    return _header(context, notes) + "".join(future) + region + "\n" + body


def _place_device(device: str, body: str) -> tuple[str, str]:
    """Return the lines that choose the GPU, "" once they are in the body: behind code that runs before a heavy import."""
    before, mark, after = body.partition(DEVICE_MARK + "\n")
    if not mark:
        return device, body
    if any(line and not line.startswith("#") and not _imports_standard(line) for line in before.splitlines()):
        return "", before + device + after
    return device, before.removesuffix("# %%\n") + after.lstrip("\n")


def _imports_standard(line: str) -> bool:
    """Return whether a line does nothing but import modules of the standard library."""
    found = re.fullmatch(r"import ([\w., ]+)|from ([\w.]+) import [\w., ]+", line)
    roots = {name.strip().split(".")[0].split(" ")[0] for name in (found[1] or found[2]).split(",")} if found else set()
    return bool(roots) and roots <= sys.stdlib_module_names


def _note_requirements(statement: Statement, context: ConversionContext) -> None:
    for site in statement.usage.calls:
        context.requirements += without_installs(command_of(site.node))[1]


def _header(context: ConversionContext, notes: list[str]) -> str:
    lines = [
        f"# Made from {context.report.notebook} to train on several GPUs; what was changed is marked `# ddp:`.",
        "#",
        "#     python SCRIPT                        one process",
        "#     accelerate launch SCRIPT             every GPU of this machine",
        "#     torchrun --nproc-per-node 2 SCRIPT   two of them",
    ]
    wanted = context.report.requirements = _without_repeats(context.requirements)
    if wanted:
        lines += ["#", "# The notebook installed these; install them before you run this:"]
        lines += ["#     " + name for name in wanted]
    if notes:
        lines += ["#", *notes]
    return "\n".join(lines) + "\n\n"


def _without_repeats(requirements: list[str]) -> list[str]:
    """Return what to install, each package once: the notebook's last words on its version count."""
    found: dict[str, str] = {}
    for text in requirements:
        name = " ".join(text.split())
        package = re.split(r"[\[<>=!~;@ ]", name.lower().replace("_", "-"), maxsplit=1)[0]
        key = package if re.fullmatch(r"[a-z0-9][a-z0-9.-]*", package) else name
        if key not in found or name.lower().replace("_", "-") != package:
            found[key] = name
    return list(found.values())


def _prose(cell: Cell) -> str:
    title = "# %% [markdown]" if cell.kind == "markdown" else "# %% [raw]"
    lines = [f"# {line}".rstrip() for line in cell.source.split("\n")]
    return "\n".join([title, *lines]) + "\n"


def _code(
    cell: _CodeCell,
    placed: list[EditedStatement],
    first: int,
    graph: Graph,
    context: ConversionContext,
    future: list[str],
) -> str:
    kept = []
    for item in placed:
        if any(path.startswith("__future__.") for path in item.statement.usage.imports.values()):
            future.append(code(item.node.with_changes(leading_lines=[])))
        else:
            kept.append(item)
    before, comments = cell_body([item for item in kept if item.index < first], graph, context)
    after, more = cell_body([item for item in kept if item.index >= first], graph, context)
    here = any(item.index == first for item in kept)
    mark = cst.SimpleStatementLine(body=[cst.Expr(cst.Name(DEVICE_MARK))])
    if here and before:
        before.append(mark)
    header = [*(comment_line(note) for note in cell.top), *cell.module.header]
    module = cell.module.with_changes(
        header=header, body=[*before, *after], footer=[*comments, *more, *cell.footer, *cell.module.footer]
    )
    text = "# %%\n" + module.code.strip("\n") + "\n"
    return f"# %%\n{DEVICE_MARK}\n\n{text}" if here and not before else text


# Third-party modules that neither import torch nor touch a GPU.
_LIGHT = {
    "google",
    "numpy",
    "pandas",
    "tqdm",
    "dotenv",
    "requests",
    "wandb",
    "huggingface_hub",
    "matplotlib",
    "sklearn",
}
_LIGHT |= {
    "PIL",
    "yaml",
    "rich",
    "kagglehub",
    "IPython",
    "seaborn",
    "mlflow",
    "ipywidgets",
    "httpx",
    "psutil",
    "pydantic",
}


def _first_heavy(graph: Graph) -> int:
    """Find the first statement that could touch a GPU: the device is chosen just before it."""
    for index, statement in enumerate(graph.statements):
        if statement.role in (Role.DEAD, Role.DROP):
            continue
        modules = {path.split(".")[0] for path in statement.usage.imports.values()}
        own = any(site.path in graph.functions for site in statement.usage.calls)
        own |= "import *" in code(statement.node)  # a module of the notebook's own, most likely
        hidden = any(site.path in ("__import__", "exec", "importlib.import_module") for site in statement.usage.calls)
        if modules - sys.stdlib_module_names - _LIGHT or own or hidden or statement.effects & {Effect.LOAD, *SEEDS}:
            return index
    return 0


_HASHING = {"set", "frozenset", "hash", "intersection", "union", "difference", "symmetric_difference"}


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
    """Collect environment variables that libraries read on import and that the notebook sets later."""
    found: dict[str, str] = {}
    for statement in graph.statements[first:]:
        node = statement.node
        if not isinstance(node, cst.SimpleStatementLine) or len(node.body) != 1:
            continue
        small = node.body[0]
        if not isinstance(small, cst.Assign) or not isinstance(small.value, cst.SimpleString):
            continue
        target = small.targets[0].target
        if not isinstance(target, cst.Subscript) or dotted(target.value) != "os.environ":
            continue
        name = code(target.slice[0].slice).strip("\"'")
        if _IMPORT_TIME.match(name) and not re.search("TOKEN|KEY|SECRET", name):
            found[name] = code(small) + "\n"
    return list(found.values())


def _speaks(placed: dict[int, list[EditedStatement]], graph: Graph) -> bool:
    """Return whether code that runs on every process prints."""
    for items in placed.values():
        for item in items:
            statement = item.statement
            guarded = statement.role in (Role.MAIN, Role.NODE) and not needs_no_guard(statement, graph)
            if guarded or statement.role in (Role.DEAD, Role.DROP):
                continue
            deferred = [c for body in statement.usage.defines.values() for c in body.calls]
            if any(site.path == "print" for site in [*statement.usage.calls, *deferred]):
                return True
    return False


def _ending(graph: Graph, context: ConversionContext) -> str:
    """Return the end of the script: all processes wait for the last save, then the group is closed."""
    context.cell = None
    held = sorted(
        set().union(*(s.usage.writes for s in graph.statements if s.effects & {Effect.TRAINER, Effect.LOAD}), set())
    )
    names = ", ".join(f'"{name}"' for name in held)
    note = context.edit("end", "wait for the main process's last work, then leave the process group")
    return f"\n# %%\n{note}\n{context.names['finish']}({names})\n"


def _check_syntax(script: str, name: str, context: ConversionContext) -> None:
    try:
        compile(script, "<script>", "exec", dont_inherit=True)
    except SyntaxError as error:
        if sys.version_info < (3, 12) and "f-string" in str(error.msg):
            context.cell = None
            context.warn("python", "an f-string in it needs Python 3.12 or later")
            return
        line = "".join(script.split("\n")[(error.lineno or 1) - 1 :][:1]).strip()
        raise NotebookError(
            f"{name}: not valid as a script ({error.msg}: {line[:80]!r}); correct that cell in the notebook."
        ) from None
