"""Run the numbered cases of a benchmark side by side, and write the results after each of them."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.common.runs import write_results
from unsloth_ddp.utils.versions import kit_checksum, versions

Case = dict[str, Any]


def case_options(description: str | None, runs: int) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark of numbered cases has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=runs, help="cases, numbered from 0")
    parser.add_argument("--at_once", type=int, default=1, help="cases to run side by side")
    parser.add_argument("--seconds", type=float, default=36000.0, help="begin no case after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="results; a file of the same code and settings is continued")
    parser.set_defaults(began=time.monotonic())
    return parser


def machine_facts() -> dict[str, Any]:
    """Return what results are only comparable with: this kit's files and the versions of its packages."""
    return {"kit_sha256": kit_checksum(), "versions": versions()}


def run_cases(
    run_case: Callable[[int], Case],
    options: argparse.Namespace,
    settings: dict[str, Any],
    measured: dict[str, Any],
    totals: Callable[[list[Case]], dict[str, int]],
) -> dict[str, Any]:
    """Run the cases that `options.json` does not hold yet, and return the totals and every case.

    Args:
        run_case: runs the case of this number and returns its result, whose "run" is the number.
        settings: what results must have in common to be counted together.
        measured: anything else to write beside them.
        totals: counts over the results of all cases.
    """
    until = options.began + options.seconds
    settings = settings | machine_facts()
    cases: dict[int, Case] = {case["run"]: case for case in _written(options.json, settings)}

    def content() -> dict[str, Any]:
        each = [cases[number] for number in sorted(cases)]
        return (
            settings | measured | {"cpus": os.cpu_count(), "at_once": options.at_once} | totals(each) | {"each": each}
        )

    def run_in_time(number: int) -> Case | None:
        return run_case(number) if time.monotonic() < until else None

    with ThreadPoolExecutor(options.at_once) as pool:
        missing = [number for number in range(options.runs) if number not in cases]
        try:
            for future in as_completed([pool.submit(run_in_time, number) for number in missing]):
                if case := future.result():
                    cases[case["run"]] = case
                    print(f"{len(cases)} of {options.runs}: {case}", flush=True)
                    if options.json:
                        write_results(options.json, **content())
        finally:
            pool.shutdown(cancel_futures=True)
    summary = content()
    print({name: value for name, value in summary.items() if name != "each"}, flush=True)
    return summary


def _written(path: Path | None, settings: dict[str, Any]) -> list[Case]:
    """Return the cases of an earlier results file.

    Raises:
        SystemExit: they were run with other settings, code or versions.
    """
    if path is None or not path.exists():
        return []
    content = json.loads(path.read_text())
    different = [name for name, value in settings.items() if content.get(name) != value]
    if different:
        raise SystemExit(f"{path} holds results with another {', '.join(different)}; name another file with --json")
    return content["each"]
