"""Check one node, or all nodes of a job, before training. Nothing is trained.

This node, or every node with one process each (set NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT; no launcher):
    uv run python -m unsloth_ddp.preflight [train_ddp.py options]
Every process of every node, as the run will be launched:
    uv run accelerate launch --config_file CONFIG -m unsloth_ddp.preflight [train_ddp.py options]

Give all options of the run: they are checked and compared too. Exit code: 0 without failures (warnings are allowed), 1
after a failure, 2 for a mistake in the options.
"""

import os
import sys

from unsloth_ddp.config.command_line import Parser, make_command_parser
from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.distributed.exit_codes import EXIT_USER_ERROR, note_exit_code
from unsloth_ddp.preflight.checks import print_message
from unsloth_ddp.preflight.run import PreflightOptions, run_preflight
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.streams import protect_streams

A_DAY = 86400


def make_parser() -> Parser:
    """Return the parser of preflight's own options; all others are those of train_ddp.py."""
    parser = make_command_parser("python -m unsloth_ddp.preflight", __doc__)
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE",
        help="also write the result to FILE as JSON; without FILE, print it instead of the table",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", default=str(PreflightOptions.timeout), metavar="SECONDS",
        help=f"time to wait for the other nodes [{PreflightOptions.timeout}]",
    )  # fmt: skip
    return parser


def parse(argv: list[str]) -> tuple[PreflightOptions, Settings]:
    """Return preflight's own options and the settings of the run.

    Raises:
        UserError: an unknown option, a value of the wrong type, or settings that contradict each other.
    """
    options, others = make_parser().parse_known_args(argv)
    try:
        timeout = float(options.timeout)
        if not 0 < timeout <= A_DAY:
            raise ValueError
    except ValueError:
        raise UserError(
            f"--timeout is {options.timeout}, but it takes a number of seconds above 0, at most {A_DAY}."
        ) from None
    return PreflightOptions(timeout, options.json), parse_settings(others, __doc__ or "", make_parser())


def main() -> None:
    # The table reports lost connections; torch's store would print C++ stacks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    prints = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        options, settings = parse(sys.argv[1:])
        code = run_preflight(options, settings)
    except UserError as error:
        if prints:
            print_message(f"preflight: error: {error}")
        code = EXIT_USER_ERROR
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        print_message(
            f"preflight: error: preflight itself failed ({type(error).__name__}: {error}); this says nothing about the "
            "node."
        )
        code = 1
    if code and prints:
        note_exit_code(code)
    sys.stdout.flush()
    sys.stderr.flush()
    # A hung collective or file system may still hold a thread, and gloo may abort during an orderly exit.
    os._exit(code)


if __name__ == "__main__":
    protect_streams()
    main()
