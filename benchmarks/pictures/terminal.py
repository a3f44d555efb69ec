"""Take the picture of a run on a terminal: the demo on two CPU processes, at two thirds of its steps, as SVG.

uv run python -m benchmarks.pictures.terminal docs/images/terminal.svg
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import itertools
import os
import pty
import re
import struct
import sys
import tempfile
import termios
from pathlib import Path
from typing import Any

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

from benchmarks.common.runs import REPO

COLUMNS, LINES = 100, 48
SHARE = 2 / 3
STEP = re.compile(r"step ([\d,]+) of ([\d,]+)")
LAUNCH = "accelerate.commands.launch --config_file accelerate_configs/cpu.yaml train_ddp.py"
# pyte's names of the colours that rich writes.
COLOURS = {"brown": "yellow", "default": None}


def run_on_terminal(command: list[str]) -> pyte.Screen:
    """Run a command on a pseudo terminal to its end; return the screen as it was at SHARE of the steps.

    Raises:
        SystemExit: the command failed, or showed no step.
    """
    process, master = pty.fork()
    if process == 0:
        os.chdir(REPO)
        os.execve(command[0], command, os.environ | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"})  # noqa: S606
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    picture = None
    with contextlib.suppress(OSError):
        while data := os.read(master, 65536):
            stream.feed(data)
            step = STEP.search("\n".join(screen.display))
            if picture is None and step and _number(step[1]) >= SHARE * _number(step[2]):
                picture, screen = screen, pyte.Screen(COLUMNS, LINES)
                stream.attach(screen)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code or picture is None:
        raise SystemExit(f"the run ended with exit code {code} and {'a' if picture else 'no'} picture")
    return picture


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def draw(screen: pyte.Screen, replaced: dict[str, str]) -> str:
    """Return the rows of a screen as SVG, with texts replaced by shorter ones."""
    console = Console(record=True, file=io.StringIO(), width=COLUMNS, force_terminal=True, color_system="truecolor")
    rows = [[screen.buffer[y][x] for x in range(COLUMNS)] for y in range(LINES)]
    while rows and not "".join(cell.data for cell in rows[-1]).strip():
        rows.pop()
    for row in rows:
        for old, new in replaced.items():
            replace(row, old, new)
        text = Text(no_wrap=True)
        for style, cells in itertools.groupby(row, _style):
            text.append("".join(cell.data for cell in cells), style)
        console.print(text, overflow="crop")
    svg = console.export_svg(title="accelerate launch train_ddp.py", unique_id="terminal")
    # Fonts from the network; any monospace font does.
    return re.sub(r"@font-face \{[^}]*\}\s*", "", svg)


def replace(row: list[Any], old: str, new: str) -> None:
    """Replace a text in a row of cells by a shorter one; what follows moves to the left."""
    while (at := "".join(cell.data or " " for cell in row).find(old)) >= 0:
        blank = row[-1]._replace(data=" ")
        row[at : at + len(old)] = [row[at]._replace(data=letter) for letter in new]
        row.extend([blank] * (len(old) - len(new)))


def _style(cell: Any) -> Style:
    name = COLOURS.get(cell.fg, cell.fg)
    return Style(color=f"#{name}" if name and re.fullmatch("[0-9a-f]{6}", name) else name, bold=cell.bold)


def main() -> None:
    """Read the command line, run the demo and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    target = args.file.resolve()
    with tempfile.TemporaryDirectory() as folder:
        options = ["--output_dir", folder, "--run_name", "people", "--save_steps", "40", "--logging_steps", "4"]
        screen = run_on_terminal([sys.executable, "-m", *LAUNCH.split(), *options])
        svg = draw(screen, {folder: "outputs", f"{REPO}/": ""})
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
