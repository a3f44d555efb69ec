"""Record the files that loading a model opens, so that a run is identified by what it read and not by a list of names.

Python tells its audit hooks of every file that it opens. Weights are opened by native code, which tells nobody.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The folder of a repository at one commit, in the cache of the Hub.
SNAPSHOT = re.compile(r"/models--([^/]+)/snapshots/([0-9a-f]{40})(?=/|$)")

# What describes a file that is not there, and one that loading did not open.
MISSING, UNREAD = "none", "not read"


class _Recorder:
    """Keep the paths that are opened to read while `depth` is not 0; an audit hook stays until the process ends."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.depth = 0
        self.installed = False

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.depth and event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            flags = arguments[2]
            if not isinstance(flags, int) or flags & os.O_ACCMODE == os.O_RDONLY:
                # The working folder may change later.
                self.paths.add(os.path.abspath(os.fsdecode(arguments[0])))


_recorder = _Recorder()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Record the files that the block opens to read."""
    if not _recorder.installed:
        sys.addaudithook(_recorder.note)
        _recorder.installed = True
    _recorder.depth += 1
    try:
        yield
    finally:
        _recorder.depth -= 1


def opened_below(folder: Path) -> set[str]:
    """Return the recorded files below `folder`, as paths relative to it, or "" if it is a recorded file itself."""
    root = Path(os.path.realpath(folder))
    # A file may be a link out of the folder, as in the cache of the Hub.
    places = {Path(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) for path in _recorder.paths}
    if root.is_file():
        return {""} if root in {place.resolve() for place in places} else set()
    return {str(place.relative_to(root)) for place in places if place.is_relative_to(root) and place.is_file()}


def opened_commits() -> dict[str, str]:
    """Return the commit (of several, the last) of each repository whose files were recorded in the Hub's cache."""
    commits = (match.groups() for path in sorted(_recorder.paths) if (match := SNAPSHOT.search(path)))
    return {repository.replace("--", "/"): commit for repository, commit in commits}
