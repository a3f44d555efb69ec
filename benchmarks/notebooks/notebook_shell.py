"""Stand in for IPython's `get_ipython()` when a plain notebook runs under the stubs. Standard library only."""

import builtins
import os
from typing import Any

from events import RECORDER
from patches import shell


class Lines(list):
    """The lines a captured shell command prints."""

    n = s = p = ""


class Shell:
    """The few methods of InteractiveShell that transformed cells call."""

    def install(self) -> None:
        """Make get_ipython and display built in, as a notebook has them."""
        setattr(builtins, "get_ipython", lambda: self)  # noqa: B010 - not a name of the module's type
        setattr(builtins, "display", lambda *args, **kwargs: RECORDER.add("display", "display"))  # noqa: B010

    def system(self, command: str) -> None:
        shell(command, "!")

    def getoutput(self, command: str) -> Lines:
        shell(command, "!")
        return Lines(["1"])

    def run_line_magic(self, name: str, line: str, *args: Any) -> Any:
        if name in ("pip", "uv", "conda", "mamba"):
            RECORDER.add("install", f"%{name}", text=line[:200])
        elif name == "cd":
            os.chdir(line.strip().strip("'\"") or "~")
        elif name in ("env", "set_env") and line:
            key, _, value = line.partition("=") if "=" in line else line.partition(" ")
            os.environ[key.strip()] = value.strip()
        elif name in ("sx", "sc", "system", "bash", "sh"):
            shell(line, "!")
        else:
            RECORDER.add("magic", name)
        return None

    def run_cell_magic(self, name: str, line: str, body: str) -> Any:
        if name in ("bash", "sh", "script", "shell"):
            shell(body, f"%%{name}")
        elif name in ("writefile", "file"):
            with open(line.strip().split()[-1], "w") as file:
                file.write(body)
        else:
            RECORDER.add("magic", name)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None
