"""Parse the command line of notebook_to_script.py, convert, and write the script and the report."""

import argparse
import difflib
import json
import re
import sys
from pathlib import Path
from typing import Literal

from unsloth_ddp.notebook.types import ConversionOptions, NotebookError
from unsloth_ddp.utils.files.safe import write_whole


def make_parser() -> argparse.ArgumentParser:
    """Build the parser, its options grouped by topic."""
    parser = argparse.ArgumentParser(
        prog="notebook_to_script.py", description="Turn an Unsloth notebook into a script that trains under DDP."
    )
    parser.add_argument("notebook", type=Path, help="the .ipynb to convert")
    parser.add_argument("script", type=Path, nargs="?", help="the .py to write (default: the notebook's name)")
    training = parser.add_argument_group("training")
    training.add_argument(
        "--per-device-batch-size",
        type=_batch_size,
        default="auto",
        metavar="N|keep",
        help="rows in one forward pass of a process; gradient accumulation keeps the notebook's global batch "
        "(default: 1 with Unsloth, keep without)",
    )
    training.add_argument(
        "--tensorboard", action="store_true", help="report to TensorBoard instead of the notebook's trackers"
    )
    training.add_argument("--seed", type=int, default=3407, help="seed for splits, shuffles and samples that have none")
    output = parser.add_argument_group("output")
    output.add_argument("--force", action="store_true", help="replace an existing script")
    output.add_argument("--report", type=Path, metavar="FILE.json", help="write every edit and warning to a file")
    output.add_argument("--check", action="store_true", help="exit with code 1 if there is a warning")
    output.add_argument("--dry-run", action="store_true", help="print the report and write no script")
    output.add_argument("--diff", action="store_true", help="show the differences from plain nbconvert's script")
    return parser


def _batch_size(text: str) -> int | Literal["auto"] | None:
    if text in ("auto", "keep"):
        return "auto" if text == "auto" else None
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of rows from 1 nor keep")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit code: 0 done, 1 warnings with --check, 2 an error of the user."""
    options = make_parser().parse_args(arguments)
    try:
        return _run(options)
    except NotebookError as error:
        print(f"notebook_to_script.py: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    _refuse_url(options.notebook)
    target = options.script or options.notebook.with_suffix(".py")
    # Of a notebook that is not there, convert() says so.
    if not options.dry_run and options.notebook.exists():
        _refuse_target(target, options)
    if options.report is not None:
        _refuse_folder(options.report)
    from unsloth_ddp.notebook.convert import convert

    conversion = convert(
        options.notebook,
        ConversionOptions(
            per_device_batch_size=options.per_device_batch_size, tensorboard=options.tensorboard, seed=options.seed
        ),
    )
    if not options.dry_run:
        _write(target, conversion.script)
    if options.report is not None:
        _write(options.report, json.dumps(conversion.report.to_dict(), indent=2, ensure_ascii=False) + "\n")
    if options.diff:
        sys.stdout.writelines(_diff(options.notebook, conversion.script, target))
    print(conversion.report.summary("(nothing written)" if options.dry_run else f"-> {target}"))
    return 1 if options.check and conversion.report.warnings else 0


def _refuse_url(notebook: Path) -> None:
    """Refuse an address, and say how to download the notebook; a path has lost one of the two slashes."""
    if not re.match(r"https?:/", str(notebook)):
        return
    address = re.sub(r"^(https?):/+", r"\1://", str(notebook))
    how = "in Colab: File > Download; on GitHub: Download raw file"
    raise NotebookError(f"{address}: is an address; download the notebook ({how}), and give the file.")


def _refuse_target(target: Path, options: argparse.Namespace) -> None:
    _refuse_folder(target)
    if target.exists() and target.samefile(options.notebook):
        raise NotebookError(f"{target}: is the notebook itself; give another name for the script.")
    if target.exists() and not options.force:
        raise NotebookError(f"{target}: exists already; give another name, or --force to replace it.")


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise NotebookError(f"{path}: is a folder; give the name of a file.")
    if not path.absolute().parent.is_dir():
        raise NotebookError(f"{path}: its folder does not exist; make it, or give another name.")


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise NotebookError(f"{path}: cannot be written ({error.strerror}); give another name.") from None


def _diff(notebook: Path, script: str, target: Path) -> list[str]:
    from nbconvert import PythonExporter

    plain = str(PythonExporter().from_filename(str(notebook))[0])
    plain_lines, after = plain.splitlines(keepends=True), script.splitlines(keepends=True)
    return list(difflib.unified_diff(plain_lines, after, "nbconvert --to python", str(target)))
