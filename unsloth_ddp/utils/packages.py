"""Answer a command that was started with a Python without the kit's packages in one sentence.

Only the standard library is imported here.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import TracebackType

from unsloth_ddp.utils.errors import UserError

REPO = Path(__file__).resolve().parents[2]


def explain_missing_packages() -> None:
    """Have an import that fails for want of a package end the process with one sentence instead of a traceback.

    Raises:
        SystemExit: this Python is too old for the kit.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 (a clone is started by whatever `python` is)
        raise SystemExit(_said(f"is {sys.version.partition(' ')[0]}, and the kit needs 3.11 or later"))
    others = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Where torch is installed, the kit's packages are, and another module is missing.
        if not isinstance(error, ModuleNotFoundError) or importlib.util.find_spec("torch") is not None:
            others(kind, error, trace)
            return
        print(_said(f"lacks {error.name} and other packages of the kit"), file=sys.stderr, flush=True)
        raise SystemExit(UserError.exit_code)

    sys.excepthook = show


def _said(lack: str) -> str:
    return (
        f"error: this Python ({sys.executable}) {lack}; begin the command with `uv run`, in the folder {REPO}, or install the "
        f"kit's packages into an environment of yours with `pip install -e {REPO}`."
    )
