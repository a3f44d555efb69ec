"""Draw the loss of finished runs, and keep the numbers behind the picture.

uv run --group bench python -m benchmarks.correctness.loss_curves outputs/curve1 outputs/curve2
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.common.runs import REPO, log_history

RESULTS = REPO / "benchmarks/results/correctness"


def main(runs: list[Path]) -> None:
    """Draw one line per run, the second dotted over the first."""
    curves = {}
    figure, axes = plt.subplots(figsize=(7, 3.2), dpi=110)
    for run, style in zip(runs, ("-", ":"), strict=True):
        processes = json.loads((run / "summary.json").read_text())["world_size"]
        label = f"{processes} process{'es' if processes > 1 else ''}"
        points = [(entry["step"], entry["loss"]) for entry in log_history(run) if "loss" in entry]
        curves[label] = points
        axes.plot(*zip(*points, strict=True), style, linewidth=4 - 1.5 * (style == ":"), label=label)
    axes.set(
        xlabel="optimizer step",
        ylabel="training loss",
        title="The demo: 16 rows a step, shared by 1 and by 2 processes",
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "demo_loss.png")
    (RESULTS / "demo_curves.json").write_text(json.dumps(curves) + "\n")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
