"""Convert a notebook: read it, turn magics into Python, decide where statements run, edit them, write the script."""

import ast
import sys
from collections import Counter
from pathlib import Path, PurePath

import libcst as cst

from unsloth_ddp.notebook.analyse.batch_terms import batch_term, only_by_row
from unsloth_ddp.notebook.analyse.build import build
from unsloth_ddp.notebook.analyse.changes import link
from unsloth_ddp.notebook.analyse.checks import trains_elsewhere, trains_nothing
from unsloth_ddp.notebook.analyse.draws import assign_seeds
from unsloth_ddp.notebook.analyse.graph import Graph
from unsloth_ddp.notebook.analyse.main_values import mark_sent
from unsloth_ddp.notebook.analyse.roles import assign_roles
from unsloth_ddp.notebook.analyse.tracked_runs import stand_in_for_runs
from unsloth_ddp.notebook.analyse.unused_weights import adapts_idle_tower, without_search
from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.read.bounds import Bounds, room_for_nesting, too_deep
from unsloth_ddp.notebook.read.hosts import makes_distributor
from unsloth_ddp.notebook.read.magics import Lowered, add_automagic, lower
from unsloth_ddp.notebook.read.normalise import normalise
from unsloth_ddp.notebook.read.reader import quoted_line, read_notebook
from unsloth_ddp.notebook.syntax.arguments import code, keyword
from unsloth_ddp.notebook.syntax.commands import training_line
from unsloth_ddp.notebook.syntax.effects import is_trainer_call
from unsloth_ddp.notebook.syntax.name_usage import collect
from unsloth_ddp.notebook.syntax.tree import assignment, dotted, full_path
from unsloth_ddp.notebook.syntax.usage import CallSite, DeferredBody, NameUsage
from unsloth_ddp.notebook.types import Cell, Conversion, ConversionOptions, ConversionReport, Notebook, NotebookError
from unsloth_ddp.notebook.write.config import is_config_call
from unsloth_ddp.notebook.write.prologue import IDENTIFIERS, MODULES, Names
from unsloth_ddp.notebook.write.script import CodeCell, write_script


def convert(path: Path, options: ConversionOptions | None = None) -> Conversion:
    """Convert the notebook at `path`. Raises NotebookError where that is not possible."""
    return convert_notebook(read_notebook(path), options or ConversionOptions())


def convert_notebook(notebook: Notebook, options: ConversionOptions) -> Conversion:
    """Convert a notebook that has been read. Raises NotebookError where that is not possible."""
    code_cells = [cell for cell in notebook.cells if cell.kind == "code"]
    sources = [cell.source for cell in code_cells]
    if trains_nothing(sources) and not any(training_line(source) for source in sources):
        raise NotebookError(f"{notebook.name}: no cell trains or loads a model; give a fine-tuning notebook.")
    bounds = Bounds(notebook.name, sources)
    with room_for_nesting():
        return _convert(notebook, [(cell, *_parse(cell, notebook.name, bounds)) for cell in code_cells], options)


def _convert(
    notebook: Notebook, parsed: list[tuple[Cell, cst.Module, Lowered]], options: ConversionOptions
) -> Conversion:
    """Convert a notebook whose cells are parsed."""
    report = ConversionReport(" ".join(PurePath(notebook.name).name.split()))
    context = _context(parsed, options, report)
    cells = [_normalised(cell, module, lowered, context) for cell, module, lowered in parsed]
    graph = build((cell.number, cell.body) for cell in cells)
    link(graph)
    if why := trains_elsewhere(graph):
        raise NotebookError(f"{notebook.name}: {why}")
    context.batch_term, context.by_row = batch_term(graph), only_by_row(graph)
    context.idle_tower = context.unsloth and adapts_idle_tower(graph)
    context.search = without_search(graph, context.unsloth)
    _know_configs(graph, context)
    _know_arguments(graph, context)
    assign_roles(graph)
    mark_sent(graph)
    stand_in_for_runs(graph)
    assign_seeds(graph)
    script = write_script(notebook, cells, graph, context)
    script = context.place(script)
    _check_syntax(script, notebook.name, context)
    for entries in (report.edits, report.warnings):
        entries.sort(key=lambda entry: (entry.line or 0, entry.cell or 0))
    return Conversion(script, report)


def _parse(cell: Cell, name: str, bounds: Bounds) -> tuple[cst.Module, Lowered]:
    """Parse a cell, with automagic if it is no Python without."""
    try:
        return _parsed(cell, cell.source, bounds)
    except (cst.ParserSyntaxError, SyntaxError):
        source = add_automagic(cell.source)
    except (RecursionError, MemoryError):  # of Python's own parser
        raise too_deep(name, cell.number) from None
    try:
        return _parsed(cell, source, bounds)
    except (cst.ParserSyntaxError, SyntaxError) as error:
        number = error.raw_line if isinstance(error, cst.ParserSyntaxError) else error.lineno
        number, text = quoted_line(cell.source, number or 1)
        raise NotebookError(
            f"{name}: cell {cell.number} is not Python (line {number}: {text[:80]!r}); correct it in the notebook."
        ) from None


def _parsed(cell: Cell, source: str, bounds: Bounds) -> tuple[cst.Module, Lowered]:
    lowered = lower(source)
    try:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        bounds.check(
            cell.number, compile(lowered.source, "<cell>", "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        )
        compile(lowered.source, "<cell>", "exec", flags, dont_inherit=True)
    except SyntaxError as error:
        if not _needs_newer_python(error):
            raise
    return cst.parse_module(lowered.source), lowered


def _needs_newer_python(error: SyntaxError) -> bool:
    return sys.version_info < (3, 12) and "f-string" in str(error.msg)


def _context(
    parsed: list[tuple[Cell, cst.Module, Lowered]], options: ConversionOptions, report: ConversionReport
) -> ConversionContext:
    lines = [line for _, module, _ in parsed for line in module.body]
    usages = [collect(line) for line in lines]
    written = Counter(name for item in usages for name in item.writes)
    bound, read = set(written), {name for item in usages for name in item.reads}
    imports = {name: path for item in usages for name, path in item.imports.items()}
    rebound = {n for item in usages for n in item.writes if n in MODULES and item.imports.get(n) != n}
    names = Names(frozenset((bound | read) & set(IDENTIFIERS)), frozenset(rebound))
    shown = [item.reads.union(item.writes, *(body.reads for body in item.defines.values())) for item in usages]
    first = next((item for item, names_shown in zip(usages, shown, strict=True) if "display" in names_shown), None)
    if first is not None and "display" not in first.writes:  # IPython has it before the first cell
        names.used.add("display")
    started = [
        (name, site)
        for item in usages
        for name, site in [*item.assigned, *(("", site) for site in item.calls)]
        if makes_distributor(full_path(site.path, imports))
    ]
    context = ConversionContext(options, names, report, bound, imports)
    for target, value in filter(None, map(assignment, lines)):
        if isinstance(target, cst.Name) and isinstance(value, cst.SimpleString):
            context.texts[target.value] = value.value
        elif isinstance(target, cst.Name) and dotted(value) == "os.environ" and written[target.value] == 1:
            context.environ_names.add(target.value)
    context.distributors = {name for name, _ in started} - {""}
    counts = [keyword(site.node, "num_processes") for _, site in started]
    context.processes = max((int(code(n.value)) for n in counts if n and code(n.value).isdigit()), default=1)
    return context


def _normalised(cell: Cell, module: cst.Module, lowered: Lowered, context: ConversionContext) -> CodeCell:
    context.cell = cell.number
    context.left_out += [(cell.number, text) for text in lowered.left_out]
    top = []
    for name in lowered.removed:
        missing, quiet = f"{name} cell left out: a script has nothing like it", f"{name} is for notebooks"
        top.append(context.warn("magic", missing) if name in lowered.unknown else context.edit("magic", quiet))
    body, pending = normalise(list(module.body), context)
    return CodeCell(cell.number, module, body, top, pending)


def _know_configs(graph: Graph, context: ConversionContext) -> None:
    """Find the classes whose instances trainers take as arguments, whatever they are called."""
    makers = {name: site.path for name, site in reversed(graph.assigned)}
    for site in graph.sites:
        arguments = keyword(site.node, "args")
        if arguments is None or not is_trainer_call(site, graph.trainer_classes):
            continue
        path = (
            dotted(arguments.value.func)
            if isinstance(arguments.value, cst.Call)
            else makers.get(code(arguments.value), "")
        )
        names = {path, *(of for name, of in graph.aliases if name == path)}
        if any(name.split(".")[-1][:1].isupper() for name in names):
            context.config_classes.add(path)
            context.trainers_of_config.setdefault(path, set()).add(site.tail)


def _know_arguments(graph: Graph, context: ConversionContext) -> None:
    """Find the names whose arguments come from a call that the notebook shows, and is edited."""
    context.known_arguments = {name for name, site in graph.assigned if _is_shown(site, graph, context)}
    if any(_is_shown(site, graph, context) for statement in graph.statements for site in statement.usage.calls):
        context.known_arguments |= {param for body in graph.functions.values() for param in _parameters(body)}


def _is_shown(site: CallSite, graph: Graph, context: ConversionContext) -> bool:
    """Return whether a call makes a trainer's arguments, itself or in a function of the notebook."""
    if is_config_call(site.node, context):
        return True
    bodies = graph.bodies_run(NameUsage(calls=[site])) if graph.own_body(site) is not None else []
    return any(is_config_call(inner.node, context) for body in bodies for inner in body.calls)


def _parameters(body: DeferredBody) -> set[str]:
    return set(body.params).union(*(_parameters(method) for method in body.methods.values()))


def _check_syntax(script: str, name: str, context: ConversionContext) -> None:
    try:
        compile(script, "<script>", "exec", dont_inherit=True)
    except SyntaxError as error:
        if _needs_newer_python(error):
            context.cell = None
            context.warn("python", "an f-string in it needs Python 3.12 or later")
            return
        line = "".join(script.split("\n")[(error.lineno or 1) - 1 :][:1]).strip()
        raise NotebookError(
            f"{name}: not valid as a script ({error.msg}: {line[:80]!r}); correct that cell in the notebook."
        ) from None
