"""Build the folder of an export aside, and move it into place once it is whole and has answered."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from unsloth_ddp.run.result import RunResult
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.durable import flush, write_problem


def export_folder(result: RunResult, format_name: str, output: str | None) -> Path:
    """Return the folder to export to: `output`, or one in the run's folder that names format and checkpoint.

    Raises:
        UserError: it already exists.
    """
    name = format_name if result.step is None else f"{format_name}-checkpoint-{result.step}"
    target = Path(output).expanduser().resolve() if output else result.run / name
    if target.exists():
        raise UserError(f"{target} already exists; remove it, or give another folder with --output.")
    if not target.parent.is_dir():
        raise UserError(f"--output {target}: there is no folder {target.parent}; make it first.")
    return target


@contextlib.contextmanager
def whole_or_absent(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`, which becomes `target` at the end of the block and vanishes if it fails.

    Raises:
        UserError: it cannot be written.
    """
    aside = target.with_name(f"{target.name}.partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        yield aside
        flush(aside)
        aside.rename(target)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{target} could not be written: {write_problem(error, target.parent)}; nothing is left of it."
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
