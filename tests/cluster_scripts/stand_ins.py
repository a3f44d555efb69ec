"""A folder to run the scripts of cluster/ in, with stand-ins for launchers and tools that write down their calls."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from tests.conftest import REPO
from tests.waiting import wait_until

# Writes its arguments to calls.txt, then does what SCRIPT says. Asked about the settings, it names the MISTAKE, or has
# a result after so many questions.
LAUNCHER = """#!/bin/bash
if [[ $1 == - && -n ${MISTAKE:-} ]]; then echo "$MISTAKE" >&2; exit 2; fi
if [[ $1 == - ]]; then echo >>"$CALLS.asked"; (($(wc -l <"$CALLS.asked") > ${FINISHED:-1000})); exit; fi
printf '%s\\n' "$*" >>"$CALLS"
trap 'echo "got TERM" >>"$CALLS"; echo 75 >"$UNSLOTH_DDP_EXIT_CODE_FILE"; exit 1' TERM
trap 'echo "got USR1" >>"$CALLS"; exit 1' USR1
eval "${SCRIPT:-}"
"""


class Workplace:
    """The folder; `tools/` comes first on PATH, and uv says that the environment, a launcher alone, is in `prefix/`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls_file = folder / "calls.txt"
        self.calls_file.touch()
        for name in ("tools", "prefix/bin"):
            (folder / name).mkdir(parents=True)
        self.tool("uv", f"#!/bin/sh\necho {shlex.quote(str(folder / 'prefix'))}\n")
        for name in ("accelerate-launch", "python"):
            self.tool(name, LAUNCHER, "prefix/bin")
        # Scripts look twice a second whether what they started has ended, and nothing here takes so long.
        self.tool("sleep", '#!/bin/sh\n[ "$1" = 0.5 ] && set -- 0.05\nexec /bin/sleep "$@"\n')

    def tool(self, name: str, text: str, where: str = "tools") -> None:
        """Make, or replace, a stand-in."""
        (self.folder / where / name).write_text(text)
        (self.folder / where / name).chmod(0o755)

    def start(self, script: str, words: str = "", kit: Path = REPO, **variables: str) -> subprocess.Popen[str]:
        """Start a script of the kit's cluster/ here, with nothing in its environment but these variables."""
        environ = {
            "PATH": f"{self.folder / 'tools'}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder),
            "CALLS": str(self.calls_file),
        }
        return subprocess.Popen(
            ["bash", str(kit / "cluster" / script), *shlex.split(words)],
            cwd=self.folder,
            env=environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, script: str, words: str = "", kit: Path = REPO, **variables: str) -> tuple[int, str]:
        """Run it to its end: its exit code and what it said."""
        process = self.start(script, words, kit, **variables)
        text, _ = process.communicate(timeout=200)
        return process.returncode, text

    def calls(self) -> list[str]:
        """What the stand-ins wrote down."""
        return self.calls_file.read_text().splitlines()

    def wait_for(self, call: str, times: int = 1) -> None:
        """Wait until so many calls hold these words."""
        wait_until(lambda: sum(call in line for line in self.calls()) >= times, 100, f"the call {call}")
