"""Draw the scaling efficiency of a plan over the number of GPUs."""

from __future__ import annotations

from pathlib import Path

from unsloth_ddp.plan.compute import Hardware, Plan
from unsloth_ddp.plan.network import GUIDE
from unsloth_ddp.utils.errors import UserError, one_line
from unsloth_ddp.utils.units import shown_bandwidth


def draw_efficiency(path: Path, hardware: Hardware, plan: Plan) -> None:
    """Draw the efficiency over the number of GPUs to an image file.

    Raises:
        UserError: the plan has no speed, or the file cannot be written.
    """
    import matplotlib

    if plan.speed is None:
        raise UserError("--picture shows efficiency, which needs --calibration with a measurement of this method.")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for index, network in enumerate(hardware.networks):
        points = [(one.gpus, one.same_work[index]) for one in plan.scale if one.same_work]
        axes.plot(*zip(*points, strict=True), marker="o", label=f"same work per GPU, {shown_bandwidth(network)}")
        batch = [(one.gpus, one.same_batch[index]) for one in plan.scale if one.same_batch]
        if batch:
            axes.plot(
                *zip(*batch, strict=True),
                marker="x",
                linestyle="--",
                label=f"same global batch, {shown_bandwidth(network)}",
            )
    axes.plot(*zip(*GUIDE.items(), strict=True), "k^", label="published, 2 A100s per node")
    axes.set(xlabel="GPUs", ylabel="efficiency", ylim=(0, 1.05))
    axes.set_xscale("log", base=2)
    axes.set_xticks([one.gpus for one in plan.scale], [str(one.gpus) for one in plan.scale])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UserError(f"--picture {path} cannot be written ({one_line(error)}); name another file.") from None
