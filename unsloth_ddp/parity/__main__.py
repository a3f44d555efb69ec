"""Check before a long job that it takes the same steps on one process and on many.

Give the options you train with. A few steps are run with each launcher and shape of the batch, and compared:
    uv run python -m unsloth_ddp.parity --config recipes/qwen3_8b_lora.yaml --dataset my_chats.jsonl
The demo:
    uv run python -m unsloth_ddp.parity

Every launch trains on the first few rows with plain gradient descent, without dropout, clipping or a schedule, and in
fp32 unless --precision is given. (Adam divides each gradient by its own size, which makes rounding errors as large as
steps.) The change of the weights and the losses are compared. Exit code 0: they agree; 1: they differ, or a launch
failed; 2: a mistake in the options.
"""

import argparse
import dataclasses
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from unsloth_ddp.config.command_line import Parser, make_command_parser
from unsloth_ddp.config.parse import REPO, parse_settings
from unsloth_ddp.data.sources.hub import use_cache_if_hub_is_unreachable
from unsloth_ddp.distributed.exit_codes import EXIT_USER_ERROR
from unsloth_ddp.distributed.missing_gpu import check_cpu_is_meant
from unsloth_ddp.distributed.runtime import asks_for_cpu
from unsloth_ddp.distributed.sharding import sharding_from_environment
from unsloth_ddp.model.backend import BackendFacts, choose_backend, with_backend
from unsloth_ddp.parity.comparison import LaunchComparison, Tolerance, choose_tolerance, overall_verdict
from unsloth_ddp.parity.launches import LEARNING_RATE, choose_precision, describe_omissions, plan_launches, visible_gpus
from unsloth_ddp.parity.processes import StoppedBySignal, stopped_by_signals
from unsloth_ddp.parity.run import ParityCheck, run_launches
from unsloth_ddp.run.file_checks import check_files
from unsloth_ddp.utils.errors import UserError, one_line
from unsloth_ddp.utils.files.json import write_as_asked
from unsloth_ddp.utils.streams import protect_streams
from unsloth_ddp.utils.tables import Column, fit_text, render_table
from unsloth_ddp.utils.units import counted
from unsloth_ddp.utils.versions import versions


def make_parser() -> Parser:
    """Return the parser of the check's own options; all others are those of train_ddp.py."""
    parser = make_command_parser("python -m unsloth_ddp.parity", __doc__)
    parser.add_argument(
        "--processes", type=int, metavar="N", help="processes to compare with one [one per visible GPU; 2 on a CPU]"
    )
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="optimizer steps of each launch [3]")
    parser.add_argument(
        "--micro_batches", type=int, nargs="+", metavar="ROWS",
        help="rows per device to try [1 and the run's own, or 1 and 2]",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=float, metavar="X", help="relative difference allowed [depends on backend and precision]"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE as JSON")
    parser.add_argument(
        "--script", type=Path, metavar="FILE", default=REPO / "train_ddp.py", help="the script to check [train_ddp.py]"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", default=1800, help="time limit of each launch in seconds [1800]"
    )
    return parser


def read_command_line(argv: list[str]) -> tuple[ParityCheck, argparse.Namespace]:
    """Return the check that a command line asks for, and the check's own options.

    Raises:
        UserError: a mistake in the options, or the command was given to a launcher.
    """
    options, rest = make_parser().parse_known_args(argv)
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        raise UserError("The check starts the launchers itself; start it with plain python, once, on one machine.")
    if sharding_from_environment(os.environ) != "none":
        raise UserError("The check compares DDP with one process; unset the variables that ask for sharding.")
    settings = parse_settings(rest, __doc__ or "", make_parser())
    for name in ("processes", "steps", "tolerance", "timeout"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"--{name} is {value:g}, but it has to be a number above 0.")
    if not options.script.is_file():
        raise UserError(f"--script {options.script}: there is no such file.")
    rows = check_files(settings, 1)
    use_cache_if_hub_is_unreachable(settings)
    import torch

    cuda = torch.cuda.is_available() and not asks_for_cpu(settings)
    if not cuda and not asks_for_cpu(settings):
        check_cpu_is_meant(settings)
    gpus = visible_gpus(os.environ, torch.cuda.device_count()) if cuda else []
    processes = options.processes or (len(gpus) if gpus else 2)
    if gpus and processes > len(gpus):
        raise UserError(
            f"--processes is {processes}, but this machine shows {counted(len(gpus), 'GPU')}; give at most that many."
        )
    if cuda:
        # The launches, which pack no rows, take the backend of a run.
        settings = with_backend(settings, images=rows.images)
    backend, _ = choose_backend(BackendFacts(settings, cuda))
    precision = choose_precision(settings, backend)
    sizes = options.micro_batches or [1, max(2, settings.rows_at_once)]
    if min(sizes) <= 0:
        raise UserError(f"--micro_batches holds {min(sizes)}, but every number of rows has to be above 0.")
    launches = plan_launches(processes, sizes)
    tolerance = choose_tolerance(backend, precision, settings.task)
    if options.tolerance:
        tolerance = Tolerance(options.tolerance, "given on the command line")
    return ParityCheck(
        settings, launches, gpus, options.script.resolve(), options.steps, precision, tolerance, options.timeout
    ), options


def run_in_temporary_folder(check: ParityCheck) -> tuple[list[LaunchComparison], Tolerance, list[str]]:
    """Run the launches in a temporary folder; return what run_launches does.

    Raises:
        UserError: no file can be written there, or no process be started.
        StoppedBySignal: a signal came; all processes and files of the check are gone.
    """
    try:
        with stopped_by_signals(), tempfile.TemporaryDirectory(prefix="unsloth_ddp_parity_") as folder:
            return run_launches(check, Path(folder))
    except OSError as error:
        raise UserError(
            f"The launches cannot be run: {one_line(error)}; their files go to the temporary folder, set TMPDIR to use "
            "another."
        ) from None


def main(argv: list[str]) -> int:
    """Run the check; return the exit code."""
    try:
        check, options = read_command_line(argv)
        for sentence in describe_omissions(check.settings, check.precision, bool(check.gpus)):
            print(fit_text(sentence))
        count = len(check.gpus)
        device = counted(count, "GPU") if count else "CPU"
        settings = check.settings
        how = f"method {settings.method}, {check.precision}, {device}, SGD with learning rate {LEARNING_RATE}"
        print(fit_text(f"{settings.model}: {how}."), flush=True)
        rows, tolerance, errors = run_in_temporary_folder(check)
        agree, sentence = overall_verdict(rows, tolerance)
        print(render_comparisons(rows, colour=sys.stdout.isatty()))
        for text in errors:
            print(f"\n{text}\n")
        print(fit_text(sentence))
        print(fit_text(f"Tolerance {tolerance.value:.1e}: {tolerance.basis}."))
        if options.json:
            write_result(options.json, rows, check, tolerance, agree, errors)
    except UserError as error:
        print(f"parity: error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR
    except StoppedBySignal as stopped:
        print(f"parity: ended by {stopped}; every launch was killed.", file=sys.stderr, flush=True)
        return 128 + stopped.number
    return 0 if agree else 1


COLOURS = {"agrees": "green", "differs": "bold red", "failed": "bold red"}
COLUMNS = [
    Column("launched by"),
    *(
        Column(name, "right")
        for name in ("processes", "rows per device x accumulation", "weight update", "loss", "seconds")
    ),
    Column("verdict", styles=COLOURS),
]


def render_comparisons(rows: Sequence[LaunchComparison], *, colour: bool) -> str:
    """Return the table, its first line the reference."""
    cells = []
    for row in rows:
        differences = [
            "-" if d is None or row.verdict == "reference" else "0" if d == 0 else f"{d:.1e}"
            for d in (row.update, row.loss)
        ]
        launch = row.launch
        numbers = [str(launch.processes), launch.shape, *differences, f"{row.seconds:.0f}"]
        cells.append([launch.launcher, *numbers, row.verdict])
    title = "Relative difference from the first line"
    return render_table(COLUMNS, cells, title=title, colour=colour)


def write_result(
    path: Path,
    rows: Sequence[LaunchComparison],
    check: ParityCheck,
    tolerance: Tolerance,
    agree: bool,
    errors: list[str],
) -> None:
    """Write everything that was measured as JSON.

    Raises:
        UserError: the file cannot be written.
    """
    content = {
        "agree": agree,
        "tolerance": dataclasses.asdict(tolerance),
        "precision": check.precision,
        "steps": check.steps,
        "learning_rate": LEARNING_RATE,
        "gpus": len(check.gpus),
        "settings": dataclasses.asdict(check.settings),
        "launches": [dataclasses.asdict(row) for row in rows],
        "errors": errors,
        "versions": versions(),
    }
    write_as_asked("--json", path, content)


if __name__ == "__main__":
    protect_streams()
    sys.exit(main(sys.argv[1:]))
