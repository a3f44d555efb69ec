"""Run a notebook of Kaggle or Colab as it would run there, in this folder: `play_hosted.py FILE.ipynb`.

Lines that install are skipped, and Colab's Drive is a stand-in; every other command runs, and its failure ends this.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

from play_notebook import play

INSTALLERS = ("git ", "pip ", "uv ")


def run(command: str) -> None:
    """Run a shell line, unless it installs."""
    if not command.startswith(INSTALLERS):
        # Else what a cell has printed would come after the command's own output.
        sys.stdout.flush()
        subprocess.run(["bash", "-c", command], check=True)


if __name__ == "__main__":
    colab = ModuleType("google.colab")
    colab.drive = ModuleType("drive")  # type: ignore[attr-defined]
    colab.drive.mount = lambda folder: Path(folder).mkdir(parents=True)  # type: ignore[attr-defined]
    sys.modules |= {"google": ModuleType("google"), "google.colab": colab}
    play(Path(sys.argv[1]), run)
