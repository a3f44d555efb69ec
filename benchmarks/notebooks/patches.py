"""Side effects of the standard library, recorded and mostly not performed.

Processes, sockets and sleeps never happen. Files are really written, but only inside the run's own folder: absolute
paths elsewhere are moved under it, so that a program which reads back what it wrote goes on working.
Standard library only.
"""

import builtins
import datetime
import getpass
import importlib.metadata
import io
import json
import logging
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import zipfile
from typing import Any

from events import RECORDER
from stubs import VERSIONS, Stub, Text

SHORT = 0.2  # seconds that a limit set by the program lasts
OWN_ENVIRONMENT = re.compile(r"--python\b|\.venv\b|\bvenv/")
MADE_UP = '{"stub_key": "1"}'  # what a file holds that would exist had the program's commands really run
INSTALL = re.compile(
    r"\b(?:(?:pip3?|pipx|uv|conda|mamba|poetry)(?:\s+pip)?\s+(?:-\S+\s+)*(?:install|add|uninstall|sync)"
    r"|pip3?-autoremove\b|(?:apt|apt-get|aptitude|yum|dnf|brew|apk)\s+(?:-\S+\s+)*(?:install|update|upgrade|add)|npm\s+i(?:nstall)?\b|(?:curl|wget)\b[^;&]*\|\s*(?:sudo\s+)?(?:ba|z)?sh\b)"
)


def is_install(command: str) -> bool:
    """Return whether a shell command installs packages, other than into an environment of a server's own."""
    return bool(INSTALL.search(command)) and not OWN_ENVIRONMENT.search(command)


MADE: dict[str, int] = {}  # paths that exist from then on, though nothing real made them: collectives passed before


def make(path: Any, base: Any = None) -> None:
    """Let a path exist from now on, and everything under it."""
    if isinstance(path, str | os.PathLike) and os.fspath(path):
        full = os.path.normpath(os.path.join(os.getcwd(), str(base or ""), os.path.expanduser(path)))
        MADE.setdefault(full, RECORDER.waits)


def is_made(path: Any) -> bool:
    """Return whether a path is one that something would have made."""
    if not isinstance(path, str | os.PathLike):
        return False
    full = os.path.normpath(os.path.join(os.getcwd(), os.path.expanduser(path)))
    return any(full == made or full.startswith(made + os.sep) for made in MADE)


def share(folder: str, other: str, made: dict[str, int]) -> None:
    """See what another rank made and wrote, as on a shared disk, from the collective on that orders the two.

    `other` is a copy of that rank's folder after its run, `made` the paths in it and the collectives before each.
    """
    waiting = sorted(made.items(), key=lambda item: item[1])
    copy, is_file, makedirs = shutil.copyfile, os.path.isfile, os.makedirs

    def reveal(waits: int) -> None:
        while waiting and waiting[0][1] < waits:
            path = waiting.pop(0)[0]
            source, target = os.path.join(other, path), os.path.join(folder, path)
            MADE.setdefault(target, waits)
            if is_file(source) and not is_file(target):
                makedirs(os.path.dirname(target), exist_ok=True)
                copy(source, target)

    RECORDER.on_wait.append(reveal)


def shell(command: Any, how: str, cwd: Any = None) -> None:
    """Record a command that the program wanted to run; the paths it names exist afterwards."""
    text = command if isinstance(command, str) else " ".join(str(part) for part in command)
    for word in text.split():
        if os.sep in word and ":" not in word:
            make(word.strip("'\""), cwd)
    make(cwd)
    if is_install(text):
        RECORDER.add("install", how, text=text[:200])
    else:
        RECORDER.add("shell", how, text=text[:200])


class Process:
    """A started process that has already ended well."""

    returncode, pid = 0, 4242

    def __init__(self, command: Any = "", *args: Any, **kwargs: Any) -> None:
        shell(command, "Popen", kwargs.get("cwd"))
        self.args = command
        binary = not (kwargs.get("text") or kwargs.get("universal_newlines") or kwargs.get("encoding"))
        self.stdout: Any = io.BytesIO(b"") if binary else io.StringIO("")
        self.stderr: Any = io.BytesIO(b"") if binary else io.StringIO("")
        self.stdin: Any = io.BytesIO() if binary else io.StringIO()

    def poll(self) -> None:
        return None

    def wait(self, timeout: Any = None) -> int:
        return 0

    def communicate(self, input: Any = None, timeout: Any = None) -> tuple[Any, Any]:
        return self.stdout.read(), self.stderr.read()

    def terminate(self) -> None:
        pass

    kill = terminate

    def send_signal(self, number: int) -> None:
        pass

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def _empty(kwargs: dict[str, Any]) -> Any:
    return "" if kwargs.get("text") or kwargs.get("universal_newlines") or kwargs.get("encoding") else b""


def _run(command: Any, *args: Any, **kwargs: Any) -> Any:
    shell(command, "run", kwargs.get("cwd"))
    return subprocess.CompletedProcess(command, 0, _empty(kwargs), _empty(kwargs))


def _check_output(command: Any, *args: Any, **kwargs: Any) -> Any:
    shell(command, "check_output", kwargs.get("cwd"))
    return _empty(kwargs)


def _status(how: str, answer: Any) -> Any:
    def run(command: Any = "", *args: Any, **kwargs: Any) -> Any:
        shell(command, how)
        return answer

    return run


def put(owner: Any, **names: Any) -> None:
    """Replace attributes of a module or class."""
    for name, value in names.items():
        setattr(owner, name, value)


def patch_processes() -> None:
    """No child process is ever started."""
    put(subprocess, Popen=Process, run=_run, check_output=_check_output)
    put(subprocess, call=_status("call", 0), check_call=_status("check_call", 0))
    put(subprocess, getoutput=_status("getoutput", ""), getstatusoutput=_status("getstatusoutput", (0, "")))
    put(os, system=_status("os.system", 0), popen=lambda *command: io.StringIO(_status("os.popen", "")(*command)))
    put(os, kill=lambda *ignored: None, killpg=lambda *ignored: None)


class Folder:
    """Maps the paths a program writes into the run's own folder."""

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)

    def inside(self, path: Any) -> Any:
        """The path itself where it is inside the folder, else its place under it."""
        if isinstance(path, int):
            return path
        text = os.fspath(path) if not isinstance(path, Stub) else "stub"
        text = os.fsdecode(text)
        full = os.path.realpath(text)
        if full == self.root or full.startswith(self.root + os.sep):
            return text
        return os.path.join(self.root, "_elsewhere", full.lstrip("/"))


def patch_files(folder: Folder) -> None:
    """Record writes, keep them inside the folder, and make up what is read but does not exist."""
    real_open, real_chdir, real_makedirs, real_isfile = builtins.open, os.chdir, os.makedirs, os.path.isfile

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int):
            return real_open(file, mode, *args, **kwargs)
        target = folder.inside(file)
        if any(flag in mode for flag in "wax+"):
            RECORDER.add("write", os.path.basename(str(file)), mode=mode)
            make(file)
            real_makedirs(os.path.dirname(os.path.realpath(target)), exist_ok=True)
            return real_open(target, mode, *args, **kwargs)
        for candidate in (file, target):
            if not isinstance(candidate, Stub) and real_isfile(candidate):
                return real_open(candidate, mode, *args, **kwargs)
        RECORDER.add("read_missing", str(file))
        text = f"{MADE_UP}\n" if RECORDER.where(sys._getframe(1)) else ""
        return io.BytesIO(text.encode()) if "b" in mode else io.StringIO(text)

    def chdir(path: Any) -> None:
        target = folder.inside(path)
        RECORDER.add("chdir", str(path))
        real_makedirs(target, exist_ok=True)
        real_chdir(target)

    def wrapped(real: Any, how: str) -> Any:
        def act(path: Any, *args: Any, **kwargs: Any) -> Any:
            if RECORDER.where(sys._getframe(1)):
                RECORDER.add("fileop", how, text=str(path)[:100])
            for target in args[:1] if how.split(".")[1] in TARGETS else ():
                make(target)
            try:
                args = tuple(folder.inside(a) if isinstance(a, str | os.PathLike) else a for a in args)
                return real(folder.inside(path), *args, **kwargs)
            except OSError:
                return None  # the thing was never made, because its maker is a stub

        return act

    def exists(real: Any) -> Any:
        return lambda path: isinstance(path, Stub) or real(path) or is_made(path)

    for name in ("exists", "isfile", "isdir"):
        setattr(os.path, name, exists(getattr(os.path, name)))
    for name in ("exists", "is_file", "is_dir"):
        setattr(pathlib.Path, name, exists(getattr(pathlib.Path, name)))
    put(builtins, open=open_)
    put(io, open=open_)
    put(os, chdir=chdir)
    for name in ("makedirs", "mkdir", "remove", "unlink", "rename", "replace", "rmdir", "symlink", "link"):
        setattr(os, name, wrapped(getattr(os, name), f"os.{name}"))
    for name in ("rmtree", "move", "copy", "copy2", "copyfile", "copytree", "make_archive", "unpack_archive"):
        setattr(shutil, name, wrapped(getattr(shutil, name), f"shutil.{name}"))
    for name in ("mkdir", "unlink", "touch", "rename", "rmdir"):
        setattr(pathlib.Path, name, wrapped_path(getattr(pathlib.Path, name), f"Path.{name}", folder))
    put(pathlib.Path, open=lambda self, mode="r", *rest, **options: open_(self, mode, *rest, **options))


TARGETS = ("rename", "replace", "move", "copy", "copy2", "copyfile", "copytree")  # whose second path is made


def wrapped_path(real: Any, how: str, folder: Folder) -> Any:
    """The same for a method of pathlib.Path."""

    def act(self: Any, *args: Any, **kwargs: Any) -> Any:
        if RECORDER.where(sys._getframe(1)):
            RECORDER.add("fileop", how, text=str(self)[:100])
        if "mkdir" not in how:
            make(args[0] if how == "Path.rename" else self if how == "Path.touch" else None)
        try:
            return real(type(self)(folder.inside(self)), *args, **kwargs)
        except OSError:
            return None

    return act


def patch_rest() -> None:
    """Network, waiting, asking, versions."""

    def fetched(how: str) -> Any:
        def fetch(*args: Any, **kwargs: Any) -> Any:
            RECORDER.add("download", how, text=str(args[:1])[:100])
            return Stub(f"{how}()")

        return fetch

    put(urllib.request, urlopen=fetched("urlopen"), urlretrieve=fetched("urlretrieve"))
    put(socket, socket=Stub("socket.socket"), create_connection=fetched("create_connection"))
    put(time, sleep=lambda seconds: None)
    put(time, strftime=lambda form, at=None, real=time.strftime: real(form, at) if at else Clock.now().strftime(form))
    put(datetime, datetime=Clock)

    def asked(prompt: str = "", *args: Any, **kwargs: Any) -> str:
        RECORDER.add("input", str(prompt)[:80])
        return "stub"

    put(builtins, input=asked)
    put(getpass, getpass=asked)
    put(importlib.metadata, version=lambda name: VERSIONS.get(name, "2.9.0"))
    real_loads = json.loads

    def loads(text: Any, **options: Any) -> Any:
        made_up = isinstance(text, Text | Stub) or (isinstance(text, str) and text.strip() == MADE_UP)
        return Stub("json") if made_up else real_loads(text, **options)

    put(json, loads=loads)
    put(os, cpu_count=lambda: 8)
    put(zipfile, ZipFile=Stub("zipfile.ZipFile"))
    real_level = logging._checkLevel  # type: ignore[attr-defined]
    put(logging, _checkLevel=lambda level: 20 if isinstance(level, Stub) else real_level(level))
    for name in ("search", "match", "fullmatch", "findall", "finditer", "split"):
        put(re, **{name: of_text(getattr(re, name))})
    # Programs that limit a game or a solver to seconds: let them reach their limit sooner.
    real_timer = signal.setitimer
    put(signal, setitimer=lambda which, seconds, *rest: real_timer(which, min(seconds, SHORT)))
    put(signal, alarm=lambda seconds: real_timer(signal.ITIMER_REAL, min(seconds, SHORT)) and 0)
    put(random, Random=Random)


def of_text(real: Any) -> Any:
    """Return a function of `re` that also searches what stands for a text."""

    def act(pattern: Any, string: Any, *args: Any, **options: Any) -> Any:
        return real(pattern, MADE_UP if isinstance(string, Stub) else string, *args, **options)

    return act


class Clock(datetime.datetime):
    """A clock that stands still, an hour later on each rank: what one names by it differs, as on two machines."""

    @classmethod
    def now(cls, tz: Any = None) -> "Clock":
        return cls(2026, 1, 1, int(os.environ.get("RANK") or 0) % 24, tzinfo=tz)

    @classmethod
    def today(cls) -> "Clock":
        return cls.now()

    utcnow = today


class Random(random.Random):
    """A generator that a stub may seed."""

    def __init__(self, seed: Any = None) -> None:
        super().__init__(0 if isinstance(seed, Stub) else seed)


class Output(io.TextIOBase):
    """Standard output: what the program writes there becomes print events, one a line of output."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.part = ""

    def write(self, text: str) -> int:
        self.part += text
        while "\n" in self.part:
            line, self.part = self.part.split("\n", 1)
            self.emit(line)
        return len(text)

    def emit(self, line: str) -> None:
        if not RECORDER.captured:
            RECORDER.add("print", "stdout", text=line[:160])

    def close_line(self) -> None:
        """Count what was written without a newline at the end."""
        if self.part:
            self.emit(self.part)
            self.part = ""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False
