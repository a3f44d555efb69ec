"""Answer a command that was started with a Python without the kit's packages in one sentence.

Only the standard library is imported here.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path
from types import TracebackType

from unsloth_ddp.utils.errors import UserError

REPO = Path(__file__).resolve().parents[2]
# Names the packages; without it the kit was installed as a package, together with them.
PROJECT = REPO / "pyproject.toml"


def explain_missing_packages() -> None:
    """Have an import that fails for want of a package end the process with one sentence instead of a traceback.

    Raises:
        SystemExit: this Python is too old for the kit.
    """
    if sys.version_info < (3, 11):  # noqa: UP036 (a clone is started by whatever `python` is)
        raise SystemExit(_sentence(f"is {sys.version.partition(' ')[0]}, and the kit needs 3.11 or later"))
    others = sys.excepthook

    def show(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        missing = missing_packages(PROJECT) if isinstance(error, ModuleNotFoundError) else []
        if not missing:
            others(error_type, error, trace)
            return
        more = f" and {len(missing) - 3} more packages" if len(missing) > 3 else ""
        print(_sentence(f"lacks {', '.join(missing[:3])}{more}"), file=sys.stderr, flush=True)
        raise SystemExit(UserError.exit_code)

    sys.excepthook = show


def missing_packages(project: Path) -> list[str]:
    """Return the packages that a pyproject.toml depends on and this Python does not have; none without the file."""
    import tomllib

    if not project.is_file():
        return []
    listed = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    return [name for line in listed if not _is_installed(name := re.split(r"[^\w.-]", line)[0])]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _sentence(lack: str) -> str:
    return (
        f"error: this Python ({sys.executable}) {lack}; begin the command with `uv run`, in the folder {REPO}, or "
        f"install the kit's packages into an environment of yours with `pip install -e {REPO}`."
    )
