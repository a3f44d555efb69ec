"""Run a notebook as Jupyter would, cell by cell in one IPython shell, without a kernel: `play_notebook.py FILE.ipynb`.

Shell lines are skipped: a test installs nothing.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell


def play(path: Path, run: Callable[[str], None] = lambda command: None) -> None:
    """Run every code cell, and its shell lines with `run`; the first error ends it."""
    shell = InteractiveShell.instance()
    shell.system = run
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            shell.run_cell("".join(cell["source"])).raise_error()


if __name__ == "__main__":
    play(Path(sys.argv[1]))
