"""List the runs of a folder, or write the report of one again.

    uv run python -m unsloth_ddp.runs outputs
    uv run python -m unsloth_ddp.runs outputs --report RUN

A run is named by its name in the folder of the runs, or by its path.

Reads what the runs left on the disk; no model is loaded and no GPU is needed.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import jinja2

from unsloth_ddp.config.command_line import Parser, run_command
from unsloth_ddp.run.documents.files import RECORD_FILE, STATE_FILE, SUMMARY_FILE
from unsloth_ddp.run.documents.record import find_runs, is_run, read_run
from unsloth_ddp.run.documents.report import write_report
from unsloth_ddp.runs.table import describe_run, render_runs
from unsloth_ddp.utils.errors import UserError, one_line, os_reason
from unsloth_ddp.utils.files.json import write_as_asked
from unsloth_ddp.utils.files.missing import similar_path
from unsloth_ddp.utils.streams import protect_streams


def make_parser() -> Parser:
    parser = Parser("python -m unsloth_ddp.runs", __doc__)
    parser.add_argument(
        "outputs", type=Path, nargs="?", metavar="FOLDER", help="the folder of the runs, or one run [outputs]"
    )
    parser.add_argument("--report", type=Path, metavar="RUN", help="write report.html of a run in any state")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the table to FILE as JSON")
    return parser


def show_runs(argv: list[str]) -> None:
    """Read the command line and print what it asks for."""
    options = make_parser().parse_args(argv)
    outputs = options.outputs or Path("outputs")
    if options.report is not None:
        if options.json:
            raise UserError("--json writes the table, and --report has none; leave it out.")
        _report(find_run(outputs, options.report))
    else:
        runs, problems = find_runs(outputs)
        described = []
        for run in runs:
            try:
                with _named(str(run.folder)):
                    described.append(describe_run(run))
            except UserError as error:
                problems.append(str(error))
        if described:
            print(render_runs(described), flush=True)
        for problem in problems:
            print(problem, flush=True)
        if options.json:
            write_as_asked("--json", options.json, {"runs": described, "problems": problems})


def find_run(outputs: Path, named: Path) -> Path:
    """Return the folder of a run that is named by its path, or by its name in the folder of the runs.

    Raises:
        UserError: there is neither.
    """
    inside = outputs / named
    folder = next((path for path in (named, inside) if is_run(path)), None)
    if folder is None and not named.exists() and not inside.exists():
        near = similar_path(inside, is_run) or similar_path(named, is_run)
        hint = f"did you mean {near}?" if near else f"python -m unsloth_ddp.runs {outputs} lists those there are."
        raise UserError(f"there is no run {named}, here or in {outputs}; {hint}")
    return folder or (inside if inside.exists() else named)


def _report(folder: Path) -> None:
    run = read_run(folder)
    try:
        with _named(str(folder)):
            path = write_report(run)
    except OSError as error:
        raise UserError(f"the report of {folder} cannot be written: {os_reason(error)}.") from None
    print(f"Wrote {path}, of the {run.state} run at step {run.step:,}.", flush=True)


@contextlib.contextmanager
def _named(folders: str) -> Iterator[None]:
    """Refuse a run whose files are JSON but not as the kit writes them."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, jinja2.UndefinedError) as error:
        raise UserError(
            f"{folders}: {RECORD_FILE}, {SUMMARY_FILE} or {STATE_FILE} lacks a part or holds a value of the wrong type "
            f"({type(error).__name__}: {one_line(error, 80)}); the file is damaged or of another version of the kit."
        ) from None


def main(argv: list[str]) -> int:
    return run_command("runs", show_runs, argv)


if __name__ == "__main__":
    protect_streams()
    sys.exit(main(sys.argv[1:]))
