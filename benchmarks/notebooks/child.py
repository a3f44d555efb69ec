"""The child process: runs one program with every third-party module stubbed and writes what it did as JSON.

    python -I -S child.py JOB.json

The job says the program's files, the folder to run in, and where to write the events. Nothing outside the standard
library can be imported: -S leaves site-packages out of the path.
"""

import ast
import atexit
import builtins
import json
import os
import sys
import threading
import time
import types
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

import fake_data  # noqa: E402
import fake_models  # noqa: E402
import fake_training  # noqa: E402
import patches  # noqa: E402
from events import RECORDER  # noqa: E402
from notebook_shell import Shell  # noqa: E402
from stubs import VERSIONS, StubFinder  # noqa: E402


def write_result(path: str, folder: str, started: float, error: dict[str, Any] | None) -> None:
    """The run's events, whole or not at all."""
    result = {
        "events": RECORDER.events,
        "dropped": RECORDER.dropped,
        "error": error,
        "made": {os.path.relpath(path, folder): waits for path, waits in patches.MADE.items()},
        "broadcasts": fake_training.BROADCASTS,
        "seconds": round(time.perf_counter() - started, 3),
    }
    with REAL_OPEN(path + ".part", "w") as file:
        json.dump(result, file, default=str)
    REAL_REPLACE(path + ".part", path)


REAL_OPEN, REAL_REPLACE, REAL_SLEEP = open, os.replace, time.sleep


def describe(error: BaseException) -> dict[str, Any]:
    """An exception with the innermost line of the program on its way."""
    at, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name in RECORDER.programs:
            at = f"{os.path.basename(name)}:{trace.tb_lineno}"
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and not at:
        at = f"{os.path.basename(error.filename or '')}:{error.lineno}"
    return {"type": type(error).__name__, "text": str(error)[:300], "at": at}


def watch(seconds: float, finish: Any) -> None:
    """End a run that takes too long, from a thread, saying which line it was at."""

    def wait() -> None:
        REAL_SLEEP(seconds)
        frame = sys._current_frames().get(watched)
        finish({"type": "TimeLimit", "text": f"more than {seconds:g} s", "at": RECORDER.where(frame)})
        os._exit(0)

    watched = threading.get_ident()
    threading.Thread(target=wait, daemon=True).start()


def run_cell(source: str, path: str, space: dict[str, Any]) -> None:
    """Run one notebook cell as IPython does: the value of a last expression is shown."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    tree = ast.parse(source, path)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    run_code(compile(tree, path, "exec", flags), space)
    if last is not None:
        expression = ast.Expression(last.value)  # type: ignore[attr-defined]
        value = run_code(compile(ast.fix_missing_locations(expression), path, "eval", flags), space)
        if value is not None and not source.rstrip().endswith(";"):
            RECORDER.add("display", "last expression")


def run_code(code: types.CodeType, space: dict[str, Any]) -> Any:
    value = eval(code, space)
    if code.co_flags & 0x80:  # a coroutine: the cell awaits at top level
        import asyncio

        return asyncio.run(value)
    return value


def main(job_path: str) -> None:
    started = time.perf_counter()
    with open(job_path) as file:
        job = json.load(file)
    sys.path.remove(HERE)
    os.chdir(job["folder"])
    sys.path.insert(0, job["folder"])
    sys.argv = [job["files"][0]]
    sys.meta_path.append(StubFinder())
    fake_models.install()
    fake_training.install()
    fake_data.install()
    RECORDER.programs.update(job["files"])
    VERSIONS.update(job["versions"])
    if job["shared"]:
        patches.share(job["folder"], job["shared"], job["made"])
    fake_training.RECEIVED.extend(job["broadcasts"])

    module = types.ModuleType("__main__")
    module.__file__ = job["files"][0]
    sys.modules["__main__"] = module
    space = module.__dict__
    space["__builtins__"] = builtins
    output = patches.Output()
    sys.stdout = output

    def finish(error: dict[str, Any] | None) -> None:
        output.close_line()
        write_result(job["result"], job["folder"], started, error)

    watch(job["limit"], finish)
    sources = []
    for path in job["files"]:
        with open(path, encoding="utf-8") as file:
            sources.append(file.read())
    patches.patch_processes()
    patches.patch_files(patches.Folder(job["folder"]))
    patches.patch_rest()
    error = None
    try:
        if job["cells"] or job["ipython"]:
            Shell().install()
        if job["cells"]:
            for cell, (path, source) in enumerate(zip(job["files"], sources, strict=True)):
                capture = job["cells"][cell]["capture"]
                RECORDER.captured += capture
                try:
                    run_cell(source, path, space)
                finally:
                    output.close_line()
                    RECORDER.captured -= capture
        else:
            exec(compile(sources[0], job["files"][0], "exec"), space)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            error = describe(stop)
    except BaseException as caught:
        error = describe(caught)
    try:
        atexit._run_exitfuncs()
    except BaseException as caught:
        error = error or describe(caught)
    finish(error)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
