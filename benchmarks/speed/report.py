"""Turn the results of the speed comparison into a Markdown table and a picture; every number comes from the JSON."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common.models import SHAPES
from benchmarks.speed.cells import CONTESTANTS
from benchmarks.speed.figures import used_share, work_done

# What others are compared with: the first of these that was measured.
REFERENCE = "kit"
# Dense bf16 operations a second, as NVIDIA publishes them.
PUBLISHED = {"H200": 989e12, "H100": 989e12}

Group = tuple[str, str, str]


@dataclass(frozen=True)
class Summary:
    """Hold all runs of one contestant on one workload: speeds are tokens a second per GPU, without padding."""

    contestant: str
    processes: int
    scaling: str
    speed: float
    lowest: float
    highest: float
    tokens_a_step: float
    first_step: float | None
    memory: float
    runs: int
    batch: str
    head_share: float


def summarize(cells: Sequence[dict[str, Any]]) -> Summary:
    """Combine the repeats of a run."""
    empty = [cell for cell in cells if not cell.get("warm_caches")]
    first = [cell["seconds_to_first_step"] for cell in empty if cell.get("seconds_to_first_step")]
    return Summary(
        contestant=cells[0]["contestant"],
        processes=cells[0]["processes"],
        scaling=cells[0]["scaling"],
        speed=statistics.median(cell["tokens_per_second_a_gpu"] for cell in cells),
        lowest=min(cell["lowest"] for cell in cells),
        highest=max(cell["highest"] for cell in cells),
        tokens_a_step=statistics.median(cell["tokens_a_step"] for cell in cells),
        first_step=statistics.median(first) if first else None,
        memory=max(cell.get("peak_memory_bytes", 0) for cell in cells),
        runs=len(cells),
        batch=describe_batch(cells[0].get("settings", {})),
        head_share=statistics.median(cell.get("head_share", 1.0) for cell in cells),
    )


def describe_batch(settings: dict[str, Any]) -> str:
    """Describe rows (or packs) a micro-batch x micro-batches a step, their layout, and what is recomputed."""
    lie = "packs" if settings.get("packing") else "rows, flat" if settings.get("padding_free") else "rows, padded"
    batch = f"{settings.get('per_device_train_batch_size')} x {settings.get('gradient_accumulation_steps')} {lie}"
    return f"{batch}; {settings.get('gradient_checkpointing')}"


def by_group(cells: Iterable[dict[str, Any]]) -> dict[Group, list[Summary]]:
    """Group the contestants by workload, shape and method, in the order in which contestants are listed."""
    groups: dict[Group, dict[tuple[str, int, str], list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        if cell["exit_code"] == 0:
            key = cell["contestant"], cell["processes"], cell["scaling"]
            groups[cell["work"], cell["shape"], cell["method"]][key].append(cell)
    order = list(CONTESTANTS)
    return {
        group: [summarize(runs[key]) for key in sorted(runs, key=lambda k: (k[1], k[2], order.index(k[0])))]
        for group, runs in groups.items()
    }


def published_rate(gpus: Sequence[str]) -> float | None:
    """Return the rate that NVIDIA publishes for GPUs of this name."""
    return next((rate for name, rate in PUBLISHED.items() if any(name in gpu for gpu in gpus)), None)


def measured_rate(content: dict[str, Any]) -> float | None:
    """Return the median rate of bf16 matrix products over GPUs and calls."""
    rates = [rate["flops_a_second"] for rate in content.get("matmul", []) if rate]
    return statistics.median(rates) if rates else None


def head_flops(shape: str, method: str) -> float:
    """Return the output head's work of a token: one product forward, one backward, one more if it is trained."""
    hidden, *_, vocabulary = SHAPES.get(shape, (0, 0))
    return 2.0 * hidden * vocabulary * (3 if method == "full" else 2)


def _share(speed: float, work: float | None, rate: float | None) -> str:
    return f"{used_share(speed, work, rate):.1%}" if work and rate else "-"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a Markdown table, the first column left-aligned and the others right-aligned."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def speed_table(group: Group, summaries: Sequence[Summary], content: dict[str, Any]) -> list[str]:
    """Format the speed of every contestant on one GPU."""
    alone = [summary for summary in summaries if summary.processes == 1]
    speeds = {summary.contestant: summary.speed for summary in alone}
    work = (content["flops_a_token"].get(group[1]) or {}).get(group[2])
    work_a_token = [work_done(work, head_flops(*group[1:]), summary.head_share) if work else None for summary in alone]
    rows = [
        [
            summary.contestant,
            f"{summary.speed:,.0f}",
            f"{summary.lowest:,.0f} to {summary.highest:,.0f}",
            f"{summary.speed / speeds[REFERENCE]:.2f}" if REFERENCE in speeds else "-",
            _share(summary.speed, of_this, published_rate(content["gpus"])),
            _share(summary.speed, of_this, measured_rate(content)),
            summary.batch,
            f"{summary.tokens_a_step:,.0f}",
            f"{summary.memory / 2**30:.1f}" if summary.memory else "-",
            f"{summary.first_step:.0f}" if summary.first_step else "-",
            str(summary.runs),
        ]
        for summary, of_this in zip(alone, work_a_token, strict=True)
    ]
    head = [
        "contestant", "tokens/s", "from, to", f"/ {REFERENCE}", "MFU, published", "MFU, measured", "micro-batch x "
            "accumulation; checkpointing",
        "tokens a step", "GiB",
        "s to step 1", "runs",
    ]  # fmt: skip
    return _table(head, rows) if rows else []


def scaling_table(groups: dict[Group, list[Summary]]) -> list[str]:
    """Format the speed of each of several GPUs over that of one GPU alone."""
    rows = []
    for group, summaries in groups.items():
        single = {summary.contestant: summary for summary in summaries if summary.processes == 1}
        for summary in summaries:
            if summary.processes > 1:
                base = single.get(summary.contestant)
                share = f"{summary.speed / base.speed:.1%}" if base else "-"
                rows.append(
                    [" ".join(group), summary.contestant, str(summary.processes), summary.scaling,
                     f"{summary.speed:,.0f}", share, f"{summary.tokens_a_step:,.0f}"]
                )  # fmt: skip
    head = ["work", "contestant", "GPUs", "scaling", "tokens/s a GPU", "of one GPU's", "tokens a step"]
    return _table(head, rows) if rows else []


def markdown(content: dict[str, Any]) -> str:
    """Format the whole report."""
    groups = by_group(content["cells"])
    rate, published = measured_rate(content), published_rate(content["gpus"])
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines = [
        "# Training speed",
        "",
        "Tokens that are not padding a second and GPU: the median over the intervals of a run after warm-up, and the "
        "slowest and fastest interval. `s to step 1` is that of runs with empty caches. `/ kit` is the speed over that "
        "of train_ddp.py with its defaults. MFU is model work (no recomputation, no attention scores) over "
        + (f"the published {published / 1e12:,.0f} TFLOP/s, and over " if published else "")
        + (
            f"the {rate / 1e12:,.3g} TFLOP/s that bf16 matrix products reached here."
            if rate
            else "a rate not measured."
        ),
        "",
        f"{'; '.join(content['gpus']) or 'no GPU'}. {versions}."
        + (
            " torch's varlen_attn was given enable_gqa, which it has from 2.12 on."
            if content.get("VARLEN_SHIM")
            else ""
        ),
    ]
    if content["lanes"] > 1:
        lines += ["", f"Runs on one GPU stood side by side, {content['lanes']} at a time, each on a GPU of its own."]
    for group, summaries in groups.items():
        table = speed_table(group, summaries, content)
        work = content["works"][group[0]]
        step = f"rows of up to {work['max_length']:,} tokens, {work['global_batch']} a step where rows are counted"
        lines += ["", f"## {' '.join(group)}", "", f"One GPU; {step}.", "", *table] if table else []
    scaling = scaling_table(groups)
    lines += ["", "## Several GPUs", "", *scaling] if scaling else []
    notes: dict[str, list[str]] = defaultdict(list)
    for cell in content["cells"]:
        if cell.get("note"):
            notes[cell["note"]].append(cell["name"])
    lines += ["", "## Notes", ""] if notes else []
    lines += [f"- {', '.join(names)}: {note}" for note, names in notes.items()]
    failed = {cell["name"]: cell["exit_code"] for cell in content["cells"] if cell["exit_code"] != 0}
    lines += ["", "## Without result", ""] if failed or content.get("left_out") else []
    lines += [f"- {name}: ended with {code}" for name, code in failed.items()]
    lines += [f"- {name}: {why}" for name, why in (content.get("left_out") or {}).items()]
    return "\n".join(lines) + "\n"


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw one panel per workload: the speed of each contestant on one GPU, with its slowest and fastest interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        group: [summary for summary in summaries if summary.processes == 1]
        for group, summaries in by_group(content["cells"]).items()
    }
    panels = {group: summaries for group, summaries in panels.items() if summaries}
    if not panels:
        raise SystemExit("no run has a result, so there is nothing to draw")
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(6.5 * columns, 2.8 * rows), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (group, summaries) in zip(axes.flat, panels.items(), strict=False):
        names, speeds = [summary.contestant for summary in summaries], [summary.speed for summary in summaries]
        spread = [
            [summary.speed - summary.lowest for summary in summaries],
            [summary.highest - summary.speed for summary in summaries],
        ]
        colors = ["tab:blue" if name == REFERENCE else "tab:gray" for name in names]
        axis.barh(names, speeds, xerr=spread, color=colors, capsize=2)
        for index, summary in enumerate(summaries):
            axis.annotate(f"  {summary.speed:,.0f}", (summary.highest, index), va="center", fontsize=8)
        axis.set_xlim(0, 1.15 * max(summary.highest for summary in summaries))
        axis.invert_yaxis()
        axis.set_title(" ".join(group), fontsize=10)
        axis.set_xlabel("tokens/s of one GPU, without padding", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def write_report(content: dict[str, Any], table: Path, picture: Path) -> bool:
    """Write both files and return True; without matplotlib write the table alone, say so, and return False."""
    table.write_text(markdown(content))
    print(f"{table} is written")
    if not find_spec("matplotlib"):
        print("the picture needs matplotlib: uv run --group bench python -m benchmarks.speed.compare report ...")
        return False
    draw(content, picture)
    print(f"{picture} is written")
    return True
