"""Run a notebook as Jupyter would, cell by cell in one IPython shell, without a kernel: `play_notebook.py FILE.ipynb`.

Shell lines are skipped: a test installs nothing.
"""

import json
import sys
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell


def play(path: Path) -> None:
    """Run every code cell; the first error ends it."""
    shell = InteractiveShell.instance()
    shell.system = lambda command: None
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            shell.run_cell("".join(cell["source"])).raise_error()


if __name__ == "__main__":
    play(Path(sys.argv[1]))
