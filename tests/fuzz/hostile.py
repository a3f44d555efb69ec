"""Give something hostile to a whole run in a process of its own.

Each case ends within bounds of time and memory, with one sentence and no stack trace, or trains. None of it runs code.
"""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from tests.bounded import train_bounded
from tests.ranks import run_ranks
from unsloth_ddp.utils.units import GIB

# Far above what a case takes, even on a busy machine, and far below what hostile files ask for.
SECONDS, MEMORY = 30.0, 2 * GIB
OPTIONS = (
    "--use_cpu --max_steps 2 --save_steps 2 --max_length 64 --report_to none --gradient_checkpointing none --run_name r"
)
TRAINS = "Done: "
# Found by training, and not by a look at the files.
BROKEN = "the trained weights contain NaN or infinity"

Act = Callable[[Path], object]


def ended(place: Path, options: str, said: str, change: str = ":") -> None:
    """Run the options, and check how the run ended and what it said."""
    argv = [*shlex.split(OPTIONS), *(["--model", "model"] if "--model " not in options else [])]
    argv += [*(["--dataset", "rows.jsonl"] if "--dataset " not in options else []), *shlex.split(options)]
    environ = {"HF_HUB_OFFLINE": "1"}
    result = run_ranks(
        1, train_bounded, argv, str(place), MEMORY, change, folder=place / "said", environ=environ, timeout=SECONDS
    )
    output = result.output
    assert not (place / "ran").exists(), "code of a file was run"
    assert "Traceback" not in output and "panicked at" not in output, output
    assert re.search(said, output), output
    assert result.codes == [0 if TRAINS in output else 1 if BROKEN in output else 2], output
    told = [line for line in output.splitlines() if line.startswith("train_ddp.py: error: ")]
    assert len(told) == (TRAINS not in output), output
    assert all(len(line) < 1500 and line.isprintable() for line in told), output
