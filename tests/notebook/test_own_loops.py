"""Training loops written by hand: what a converted one trains on two processes is what the notebook trains on one."""

from pathlib import Path

import pytest
from making import body, convert_cells, kinds

from tests.ranks import run_file, run_ranks

MADE = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(1)
inputs = torch.randn(22, 4)
rows = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
loader = DataLoader(rows, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(5))
"""
HEAD = "model = torch.nn.Linear(4, 1)\noptimizer = torch.optim.AdamW(model.parameters(), lr=0.1)\n"
PLAIN = (
    MADE,
    HEAD,
    "for epoch in range(3):\n"
    "    for number, (x, y) in enumerate(loader):\n"
    "        loss = ((model(x) - y) ** 2).mean()\n"
    "        loss.backward()\n"
    "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    "        optimizer.step()\n"
    "        optimizer.zero_grad()\n",
    "torch.save(model.state_dict(), 'out.pt')",
)
IN_A_FUNCTION = (
    MADE,
    HEAD,
    "def train(net, batches, opt, epochs):\n"
    "    for epoch in range(epochs):\n"
    "        for x, y in batches:\n"
    "            loss = ((net(x) - y) ** 2).mean()\n"
    "            loss.backward()\n"
    "            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
    "            opt.step()\n"
    "            opt.zero_grad()\n"
    "train(model, loader, opt=optimizer, epochs=3)",
    "torch.save(model.state_dict(), 'out.pt')",
)
ACCELERATED = (
    MADE.replace("22", "24"),
    HEAD,
    "from accelerate import Accelerator\n"
    "accelerator = Accelerator(cpu=True)\n"
    "schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=12)\n"
    "model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)\n"
    "for epoch in range(3):\n"
    "    for x, y in loader:\n"
    "        loss = ((model(x) - y) ** 2).mean()\n"
    "        accelerator.backward(loss)\n"
    "        optimizer.step()\n"
    "        schedule.step()\n"
    "        optimizer.zero_grad()\n",
    "torch.save(accelerator.unwrap_model(model).state_dict(), 'out.pt')",
)


def trained(script: str, processes: int, folder: Path) -> dict[str, object]:
    import torch

    folder.mkdir()
    (folder / "script.py").write_text(script)
    environ = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "1"}
    run_ranks(processes, run_file, folder / "script.py", folder=folder, environ=environ).check()
    return dict(torch.load(folder / "out.pt"))


@pytest.mark.parametrize("cells", [IN_A_FUNCTION, ACCELERATED], ids=["plain", "accelerate"])
def test_two_processes_train_what_one_trains(cells: tuple[str, ...], tmp_path: Path) -> None:
    """Also with a last batch that the processes cannot share equally, and with clipping."""
    import torch

    done = convert_cells(*cells)
    assert kinds(done) == []
    notebook = trained("\n".join(cells), 1, tmp_path / "notebook")
    two = trained(done.script, 2, tmp_path / "two")
    for name, weight in notebook.items():
        assert torch.allclose(weight, two[name], atol=1e-6), (name, weight, two[name])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("enumerate(loader)", "enumerate(batches())"),  # no DataLoader by name
        ("        optimizer.step()", "        other_opt.step()\n        optimizer.step()"),
        ("        loss.backward()\n", "        loss.backward()\n        loss.backward()\n"),
        ("for epoch in range(3):", "while True:"),
    ],
)
def test_a_loop_that_is_not_plain_is_left_and_said(old: str, new: str) -> None:
    done = convert_cells(*PLAIN[:2], PLAIN[2].replace(old, new))
    assert kinds(done) == ["loop"] and "average_gradients" not in body(done)


def test_a_loop_that_may_end_early_is_shared_and_said() -> None:
    early = PLAIN[2] + "        if loss < 0.1:\n            break\n"
    done = convert_cells(*PLAIN[:2], early)
    assert kinds(done) == ["loop"] and "average_gradients(optimizer)" in body(done)


def test_a_loader_may_be_the_default_of_a_parameter() -> None:
    cell = IN_A_FUNCTION[2].replace("batches, opt, epochs", "batches=loader, opt=optimizer, epochs=3")
    cell = cell[: cell.rindex("train(model")] + "train(model)"
    assert "in share_rows(batches):" in body(convert_cells(*IN_A_FUNCTION[:2], cell))


@pytest.mark.parametrize(("value", "said"), [("loss", ["loop"]), ("val_loss", [])])
def test_a_scheduler_that_steps_by_a_training_loss_is_said(value: str, said: list[str]) -> None:
    assert kinds(convert_cells(*PLAIN[:2], PLAIN[2] + f"    plateau.step({value})\n")) == said


def test_a_progress_bar_around_the_loader_is_kept() -> None:
    bar = (
        PLAIN[2]
        .replace("    for number", "    bar = tqdm(loader, desc='x')\n    for number")
        .replace("enumerate(loader)", "enumerate(bar)")
    )
    text = body(convert_cells("from tqdm import tqdm", *PLAIN[:2], bar))
    assert "bar = tqdm(share_rows(loader), desc='x')\n" in text and "in enumerate(bar):" in text
