"""Check one node, or all nodes of a job, before training; nothing is trained.

This node, or one process on each node (NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set, no launcher yet):
    uv run python -m unsloth_ddp.preflight [train_ddp.py options]
Every process of every node:
    uv run accelerate launch --config_file CONFIG -m unsloth_ddp.preflight [train_ddp.py options]

Give the run's options, all of them: they are compared too. Exit code: 0 with warnings or none, 1 after a failure, 2
for a mistake in the options.
"""

from __future__ import annotations

import os
import sys

from unsloth_ddp.config.command_line import Parser, make_command_parser
from unsloth_ddp.config.parse import Settings, parse_settings
from unsloth_ddp.distributed.exit_codes import EXIT_USER_ERROR, note_exit_code
from unsloth_ddp.preflight.run import Options, run, say
from unsloth_ddp.utils.errors import UserError

A_DAY = 86400


def make_parser() -> Parser:
    """The options of preflight itself; all others are those of train_ddp.py."""
    parser = make_command_parser("python -m unsloth_ddp.preflight", __doc__)
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write the result there too; without FILE: print it instead of the table"
    )  # fmt: skip
    parser.add_argument(
        "--timeout", default=str(Options.timeout), metavar="SECONDS", help=f"how long to wait for the other nodes [{Options.timeout}]"
    )  # fmt: skip
    return parser


def parse(argv: list[str]) -> tuple[Options, Settings]:
    """preflight's own options, and the run's.

    Raises:
        UserError: an unknown option, a value of the wrong type, or settings that contradict each other.
    """
    own, others = make_parser().parse_known_args(argv)
    try:
        timeout = float(own.timeout)
        if not 0 < timeout <= A_DAY:
            raise ValueError
    except ValueError:
        raise UserError(
            f"--timeout is {own.timeout}, but it takes a number of seconds above 0, at most {A_DAY}."
        ) from None
    return Options(timeout, own.json), parse_settings(others, __doc__ or "", make_parser())


def main() -> None:
    """Parse, run, and leave with the exit code, whatever threads and process groups are still about."""
    # What torch's store has to say of a connection that ends, stacks of C++ included, is said better in the table.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        options, settings = parse(sys.argv[1:])
        code = run(options, settings)
    except UserError as error:
        if speaks:
            say(f"preflight: error: {error}")
        code = EXIT_USER_ERROR
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        say(
            f"preflight: error: preflight itself failed ({type(error).__name__}: {error}); this says nothing about the node."
        )
        code = 1
    if code and speaks:
        note_exit_code(code)
    sys.stdout.flush()
    sys.stderr.flush()
    # A hung collective or file system may still hold a thread, and gloo may abort in an orderly exit.
    os._exit(code)


if __name__ == "__main__":
    main()
