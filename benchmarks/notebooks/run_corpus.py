"""Convert every notebook of a corpus, check the scripts, and run them with third-party modules stubbed.

    uv run benchmarks/notebooks/run_corpus.py --corpus DIR [--all] [--jobs N] [--json results.json]

DIR is a checkout of github.com/unslothai/notebooks. Without --all: its nb/*.ipynb but for the AMD-, Kaggle- and
HuggingFace Course- variants. See README.md here for what the columns mean.
"""

import argparse
import datetime
import importlib.metadata
import inspect
import json
import platform
import random
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import judge
from harness import Outcome, Settings, pins, read_cells, run_notebook, run_other_node, run_ranks, run_script

VARIANTS = ("AMD-", "Kaggle-", "HuggingFace Course-")
CHECKS = (
    *("compiles", "leftovers", "installs", "text_kept", "same_bytes"),
    *("settings", "start_and_end", "trains", "same_training", "same_process", "same_changes", "arguments"),
    *("rank_1", "rank_0", "read_back", "in_step", "data", "single"),
)


@dataclass
class Result:
    """One notebook's outcome: findings by check (an empty list is a pass), warnings, counts."""

    name: str
    error: str = ""  # why it was not converted
    warnings: list[str] = field(default_factory=list)
    findings: dict[str, list[str]] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    convert_s: float = 0.0

    @property
    def passes(self) -> bool:
        return not self.error and not any(self.findings.values())


def select(corpus: Path, everything: bool) -> list[Path]:
    """The notebooks to check, in order."""
    if everything:
        return sorted(path for path in corpus.rglob("*.ipynb") if ".git" not in path.parts)
    return sorted(path for path in (corpus / "nb").glob("*.ipynb") if not path.name.startswith(VARIANTS))


def by_the_kit(path: Path) -> tuple[str, list[str]]:
    """The kit's script and its warnings."""
    from unsloth_ddp.notebook.convert import convert
    from unsloth_ddp.notebook.types import ConversionOptions

    conversion = convert(path, ConversionOptions())
    return conversion.script, [warning_text(warning) for warning in conversion.report.warnings]


def by_nbconvert(path: Path) -> tuple[str, list[str]]:
    """Return the output of `jupyter nbconvert --to python`, to compare with."""
    from nbconvert import PythonExporter

    return PythonExporter().from_filename(str(path))[0], []


CONVERTERS = {"kit": by_the_kit, "nbconvert": by_nbconvert, "nbconvert-ipython": by_nbconvert}


def convert_one(path: Path, result: Result, converter: str) -> str:
    """The converted script, or "" with the reason in the result."""
    started = time.process_time()
    try:
        script, result.warnings = CONVERTERS[converter](path)
    except Exception as error:
        result.error = f"{type(error).__name__}: {str(error)[:300]}"
        return ""
    finally:
        result.convert_s = round(time.process_time() - started, 4)
    return script


def warning_text(warning: Any) -> str:
    return str(getattr(warning, "text", getattr(warning, "message", warning)))[:200]


@cache
def real_fields() -> dict[str, list[str]]:
    """Return the parameters of the argument classes that are installed here, by class."""
    import transformers
    import trl

    names = [name for name in dir(trl) if name.endswith("Config")]
    classes = [transformers.TrainingArguments, *(getattr(trl, name) for name in names)]
    return {kind.__name__: list(inspect.signature(kind).parameters) for kind in classes if isinstance(kind, type)}


def summary(outcome: Outcome) -> dict[str, Any]:
    """Summarize how far a run came, without the notebook's code or output."""
    trainers = [event["name"] for event in outcome.trains]
    error = {k: outcome.error[k] for k in ("type", "at")} if outcome.error else None
    return {"trains": trainers, "error": error, "seconds": outcome.seconds}


def check(path: Path, script: str, result: Result, options: argparse.Namespace) -> None:
    """All checks of one converted notebook, into its result."""
    common = Settings(python=options.python, limit=options.limit, versions=pins(judge.read_text(path)))
    try:
        plain = run_notebook(path, common)
    except SyntaxError:  # a cell that is no Python, for which the converter refuses the notebook too
        if script:
            raise
        return
    result.plain = summary(plain)
    if not script:
        return
    common = replace(common, ipython=options.converter == "nbconvert-ipython")
    alone = run_script(script, common)
    ranks = run_ranks(script, common)
    rank_0, rank_1 = ranks
    result.findings = {
        "compiles": judge.compiles(script, options.python),
        "leftovers": judge.leftovers(script),
        "installs": judge.installs(script) + judge.installs_run(ranks),
        "text_kept": judge.text_kept(read_cells(path), script),
        "settings": judge.settings(plain, ranks, script),
        "trains": judge.reaches_training(plain, ranks),
        "rank_1": judge.main_only(rank_1, script),
        "rank_0": judge.kept(plain, rank_0),
        "read_back": judge.read_back(rank_0, rank_1)
        and judge.read_back(rank_0, rank_1, run_other_node(script, common)),
        "in_step": judge.in_step(ranks),
        "start_and_end": judge.start_and_end(plain, ranks),
        "data": judge.data(ranks),
        "same_training": [
            f"rank {rank}: {text}" for rank, one in enumerate(ranks) for text in judge.same_training(plain, one, rank)
        ],
        "same_process": judge.same_process(plain, ranks),
        "same_changes": judge.same_changes(ranks),
        "arguments": judge.refused_arguments(plain, ranks, real_fields()),
        "single": judge.single(plain, alone),
        "same_bytes": [] if CONVERTERS[options.converter](path)[0] == script else ["converting twice differs"],
    }
    result.counts = {
        "rank_1_side_effects": len(rank_1.of(*judge.MAIN_ONLY)),
        "barriers_rank_0": len(rank_0.of("collective")),
        "barriers_rank_1": len(rank_1.of("collective")),
        "plain_trains": len(plain.trains),
        "rank_0_trains": len(rank_0.trains),
        "rank_1_trains": len(rank_1.trains),
    }


def totals(results: list[Result]) -> dict[str, Any]:
    """The figures of a whole corpus."""
    ran = [result for result in results if result.findings]
    reach = [result for result in results if result.plain.get("trains")]
    figures: dict[str, Any] = {
        "notebooks": len(results),
        "convert": sum(not result.error for result in results),
        "convert_seconds": round(sum(result.convert_s for result in results), 2),
        "without_warning": sum(not result.error and not result.warnings for result in results),
        "plain_reaches_train": len(reach),
        "plain_ends_well": sum(result.plain.get("error") is None for result in results if result.plain),
        "rank_0_reaches_train": sum(result.counts.get("rank_0_trains", 0) > 0 for result in reach),
        "rank_1_reaches_train": sum(result.counts.get("rank_1_trains", 0) > 0 for result in reach),
        "rank_1_side_effects": sum(result.counts.get("rank_1_side_effects", 0) for result in ran),
        "all_checks_pass": sum(result.passes for result in results),
    }
    figures["pass"] = {name: sum(not r.findings[name] for r in ran) for name in CHECKS}
    return figures


def report(results: list[Result], console: Console) -> None:
    """The figures, then the failures by cause."""
    figures = totals(results)
    table = Table(title=f"{figures['notebooks']} notebooks", show_header=False)
    for name, value in figures.items():
        if name == "pass":
            for check_name, count in value.items():
                table.add_row(f"pass: {check_name}", str(count))
        else:
            table.add_row(name.replace("_", " "), str(value))
    console.print(table)
    causes = Counter(
        f"{name}: {judge.cause(text)}" for r in results for name, found in r.findings.items() for text in found[:1]
    )
    for text, count in causes.most_common(25):
        console.print(f"{count:4} {text}", markup=False, highlight=False)
    for result in results:
        if not result.passes:
            first = result.error or next(f"{n}: {f[0]}" for n, f in result.findings.items() if f)
            console.print(f"- {result.name}: {first}", markup=False, highlight=False)


def run(paths: list[Path], options: argparse.Namespace) -> list[Result]:
    """Convert all first, on one core and timed; then check them, several at a time where asked."""
    results = [Result(str(path.relative_to(options.corpus))) for path in paths]
    scripts = [convert_one(path, result, options.converter) for path, result in zip(paths, results, strict=True)]

    def check_one(path: Path, script: str, result: Result) -> None:
        if options.keep and script:
            (options.keep / f"{path.stem}.py").write_text(script, encoding="utf-8")
        check(path, script, result, options)

    real_fields()  # imports, which threads must not do at the same time
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(check_one, paths, scripts, results))
    return results


def public(result: Result, corpus: Path) -> dict[str, Any]:
    """A notebook's outcome to commit: what failed and where, nothing of what the notebook says."""
    shown = asdict(result)
    shown["findings"] = {
        name: [re.sub(r"'[^']*'|\"[^\"]*\"|(?<=py:)(\d+).*", r"\1", text) for text in found[:5]]
        for name, found in result.findings.items()
        if found
    }
    shown["error"] = result.error.replace(f"{corpus}/", "")
    shown["warnings"] = len(result.warnings)
    shown["passes"] = result.passes
    return shown


def versions(options: argparse.Namespace) -> dict[str, str]:
    """Return the versions and the commit behind the figures."""
    code = "import platform; print(platform.python_version())"
    python = subprocess.run([options.python, "-I", "-S", "-c", code], capture_output=True, text=True).stdout.strip()
    libraries = {name: importlib.metadata.version(name) for name in ("nbconvert", "ipython", "libcst")}
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "converter's commit": commit,
        "corpus": options.commit,
        "programs run by Python": python,
        "Python": platform.python_version(),
        **libraries,
    }


def write(path: Path, results: list[Result], options: argparse.Namespace) -> None:
    """Write a run's figures and every notebook's outcome; rows of other notebooks stay, with their run's name."""
    which = "all" if options.all else "without prefix"
    name = f"{options.sample} of {which}, seed {options.seed}" if options.sample else which
    head = {"made with": versions(options), "converter": options.converter, "totals": totals(results)}
    merge(path, name, head, [public(result, options.corpus) for result in results])


def merge(path: Path, name: str, head: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Put a run's figures and rows into a file of results."""
    before = json.loads(path.read_text()) if path.exists() else {"runs": {}, "notebooks": []}
    runs = {**before["runs"], name: head}
    merged = {row["name"]: row for row in before["notebooks"]} | {row["name"]: {**row, "run": name} for row in rows}
    lines = ",\n".join("  " + json.dumps(merged[key]) for key in sorted(merged))  # one line a notebook
    path.write_text(f'{json.dumps({"runs": runs}, indent=1)[:-2]},\n "notebooks": [\n{lines}\n ]\n}}\n')


# Why a notebook was refused, by a part of the sentence.
REFUSED = {
    "is not Python": "a cell is not Python",
    "its only training is the command": "its only training is a command",
    "runs on machines of a service": "its only training runs at a service",
}


def write_elsewhere(path: Path, results: list[Result], options: argparse.Namespace) -> None:
    """Write the outcomes of the notebooks from elsewhere into their list, which has each one's commit."""
    listed = json.loads(path.read_text())["notebooks"]
    commits = {(entry["repository"], entry["path"]): entry["commit"] for entry in listed}
    entries = []
    for result in results:
        owner, _, rest = result.name.partition("/")
        repository = owner.replace("+", "/", 1)
        error = result.plain.get("error") or {}
        entries.append(
            {
                "repository": repository,
                "path": rest,
                "commit": commits[repository, rest],
                "refused": next((why for part, why in REFUSED.items() if part in result.error), result.error[:80]),
                "warnings": len(result.warnings),
                "plain_trains": result.plain.get("trains", []),
                "plain_stops": error.get("type", ""),
                "rank_0_trains": result.counts.get("rank_0_trains", 0),
                "rank_1_trains": result.counts.get("rank_1_trains", 0),
                "rank_1_side_effects": result.counts.get("rank_1_side_effects", 0),
                "fails": [name for name, found in result.findings.items() if found],
            }
        )
    payload = {"made with": versions(options), "totals": totals_elsewhere(entries, results)}
    lines = ",\n".join("  " + json.dumps(entry, ensure_ascii=False) for entry in entries)
    path.write_text(
        f'{json.dumps(payload, indent=1, ensure_ascii=False)[:-2]},\n "notebooks": [\n{lines}\n ]\n}}\n',
        encoding="utf-8",
    )


def totals_elsewhere(entries: list[dict[str, Any]], results: list[Result]) -> dict[str, Any]:
    """Count the outcomes of the notebooks from elsewhere."""
    done = [entry for entry in entries if not entry["refused"]]
    reach = [entry for entry in done if entry["plain_trains"]]
    passed = [result for result in results if result.findings]
    return {
        "notebooks": len(entries),
        "repositories": len({entry["repository"] for entry in entries}),
        "convert": len(done),
        "refused": dict(Counter(entry["refused"] for entry in entries if entry["refused"])),
        "without_warning": sum(not entry["warnings"] for entry in done),
        "plain_reaches_train": len(reach),
        "both_ranks_reach_it": sum(entry["rank_0_trains"] > 0 and entry["rank_1_trains"] > 0 for entry in reach),
        "plain_stops_early": dict(Counter(entry["plain_stops"] for entry in done if entry["plain_stops"])),
        "no_side_effect_on_rank_1": sum(not entry["rank_1_side_effects"] for entry in done),
        "same_collectives": sum(not result.findings["in_step"] for result in passed),
        "all_checks_pass": sum(not entry["fails"] for entry in done),
        "fails": dict(Counter(name for entry in done for name in entry["fails"])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="a checkout of unslothai/notebooks")
    parser.add_argument("--all", action="store_true", help="every notebook, not only the 158 without a prefix")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default 1)")
    parser.add_argument("--json", type=Path, help="write every notebook's outcome here")
    parser.add_argument("--elsewhere", type=Path, help="write the outcomes into this list of notebooks from elsewhere")
    parser.add_argument("--python", default=sys.executable, help="runs the programs; 3.12 is what Colab has")
    parser.add_argument("--commit", default="", help="the corpus's commit, to note in the JSON")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds a run may take (default 10)")
    parser.add_argument("--converter", choices=CONVERTERS, default="kit", help="whose scripts to check")
    parser.add_argument("--keep", type=Path, help="write the scripts into this folder")
    parser.add_argument("--sample", type=int, help="only so many, drawn with --seed")
    parser.add_argument("--seed", type=int, default=20, help="seed of --sample (default 20)")
    parser.add_argument("--only", action="append", default=[], help="only notebooks whose name contains this")
    options = parser.parse_args()
    paths = select(options.corpus, options.all)
    paths = [path for path in paths if not options.only or any(part in path.name for part in options.only)]
    if not paths:
        parser.error(f"no notebook under {options.corpus}")
    if options.sample:
        paths = sorted(random.Random(options.seed).sample(paths, min(options.sample, len(paths))))
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    results = run(paths, options)
    report(results, Console(width=160))
    if options.json:
        write(options.json, results, options)
    if options.elsewhere:
        write_elsewhere(options.elsewhere, results, options)
    return 0 if all(result.passes for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
