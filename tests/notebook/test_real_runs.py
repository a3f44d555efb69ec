"""Notebooks that train for real: alone a script gives the notebook's numbers, and two processes give its weights."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from making import convert_cells, write
from real_notebooks import DRAWN, NOTEBOOKS, OF_TRL, SCALED

from tests.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "notebooks"))
import real_runs
from real_runs import CPU, Seen, differences, free_ports, play, read_seen


def _run(programs: dict[str, list[str]], processes: int, out: Path) -> list[dict[str, Seen]]:
    out.mkdir()
    run_ranks(processes, play, programs, out, free_ports(len(programs)), folder=out, environ=CPU).check()
    return read_seen(out, processes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Seen]]]:
    """Each notebook, its script alone and its script on two processes; the programs of a run share its imports."""
    folder = tmp_path_factory.mktemp("runs")
    cells = {name: list(parts) for name, parts in NOTEBOOKS.items()}
    scripts = {name: [convert_cells(*parts).script] for name, parts in NOTEBOOKS.items()}
    return [
        _run(cells, 1, folder / "notebook"),
        _run(scripts, 1, folder / "alone"),
        _run(scripts, 2, folder / "ranks"),
    ]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_script_trains_what_its_notebook_trains(name: str, runs: list[list[dict[str, Seen]]]) -> None:
    (notebook,), (alone,), ranks = runs
    assert notebook[name].steps > 1
    assert (
        differences(notebook[name], alone[name], [seen[name] for seen in ranks], alike=name not in DRAWN | SCALED) == []
    )


@pytest.mark.slow
def test_a_script_trains_what_a_notebook_with_trl_trains(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.ipynb", *cells) for name, cells in OF_TRL.items()]
    done = subprocess.run([sys.executable, real_runs.__file__, *paths], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("the same") == len(paths), done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("backward", [1.0, 2.5], "alone it differs in backward"),
        ("error", "KeyError: 'x'", "ends with KeyError"),
        ("steps", 3, "takes 3 steps"),
        ("weights", 1.1, "weights of norm 1.1"),
        ("files", [], "missing files"),
    ],
)
def test_a_difference_is_seen(field: str, value: object, says: str) -> None:
    good = Seen(backward=[1.0, 2.0], steps=2, weights=1.0, files=["a"])
    bad = dataclasses.replace(good, **{field: value})
    assert differences(good, good, [good, good], alike=True) == []
    assert any(says in text for text in differences(good, bad, [bad, bad], alike=True))
