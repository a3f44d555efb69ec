"""Training loops written by hand: what a converted one trains on two processes is what the notebook trains on one."""

from pathlib import Path

import pytest
from making import body, convert_cells, helpers, kinds

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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "        optimizer.zero_grad()\n",
            "        optimizer.zero_grad()\n        if loss < 0.1:\n            break\n",
        ),
        # by a figure made of the rows of one process
        ("        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n    if loss < 0.1:\n        break\n"),
        ("        loss.backward()\n", "        if loss > 9:\n            continue\n        loss.backward()\n"),
        ("        loss.backward()\n", "        if loss < 9:\n            loss.backward()\n"),
        (
            "        loss.backward()\n",
            "        try:\n            loss.backward()\n        finally:\n            pass\n",
        ),
        # each process has a part of them
        ("        loss.backward()\n", "        seen = number * size\n        loss.backward()\n"),
    ],
    ids=["break", "break by a figure", "continue", "if", "try", "batch size"],
)
def test_what_may_differ_between_the_processes_of_a_shared_loop_is_said(old: str, new: str) -> None:
    rows = "size = 6\n" + MADE.replace("batch_size=6", "batch_size=size")
    done = convert_cells(rows, PLAIN[1], PLAIN[2].replace(old, new))
    assert kinds(done) == ["loop"] and "average_gradients(optimizer)" in body(done)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        optimizer.step()\n", "        if number % 4 != 3:\n            continue\n        optimizer.step()\n"),
        ("        loss.backward()\n", "        if trains:\n            loss.backward()\n"),
        ("        optimizer.zero_grad()\n", "        optimizer.zero_grad()\n    if valid() < 0.1:\n        break\n"),
    ],
    ids=["accumulation", "a setting", "an evaluation"],
)
def test_what_all_processes_of_a_shared_loop_decide_alike_is_not_said(old: str, new: str) -> None:
    done = convert_cells(*PLAIN[:2], PLAIN[2].replace(old, new))
    assert kinds(done) == [] and "average_gradients(optimizer)" in body(done)


def test_an_optimizer_is_known_by_its_methods_and_may_share_a_line() -> None:
    loop = IN_A_FUNCTION[2].replace("opt.", "o.").replace("opt,", "o,").replace("opt=", "o=")
    loop = loop.replace("            loss.backward()\n", "").replace(
        "            o.step()\n", "            loss.backward(); o.step()\n"
    )
    text = body(convert_cells(*IN_A_FUNCTION[:2], loop))
    assert "    same_weights(o)\n" in text and "            loss.backward(); average_gradients(o); o.step()\n" in text


def test_a_loader_may_be_made_in_the_function_that_calls_the_loop() -> None:
    loop, call = IN_A_FUNCTION[2].rsplit("train(model", 1)
    made = MADE.replace("loader = DataLoader", "\ndef main():\n    loader = DataLoader")
    done = convert_cells(HEAD, loop, made + f"    train(model{call}\nmain()")
    assert kinds(done) == [] and "in share_rows(batches):" in body(done)


def test_a_loop_that_saves_is_waited_for() -> None:
    saves = PLAIN[2] + "    torch.save(model.state_dict(), 'best.pt')\n"
    text = body(convert_cells(*PLAIN[:2], saves, "model.load_state_dict(torch.load('best.pt'))\nmodel.eval()"))
    assert text.index("wait_for_everyone()") < text.index("load_state_dict")


@pytest.mark.parametrize(
    ("line", "guarded"),
    [
        ("if i % 2: torch.save(model, 'a.pt')", "        if IS_MAIN:\n            torch.save(model, 'a.pt')"),
        (
            "best = 1; torch.save(model, 'a.pt')",
            "    best = 1\n    if IS_MAIN:\n        torch.save(model, 'a.pt')",
        ),
        ("with open('a', 'a') as f: f.write('x')", "    if IS_MAIN:\n        with open('a', 'a') as f: f.write('x')"),
    ],
)
def test_what_shares_a_line_in_a_loop_is_guarded(line: str, guarded: str) -> None:
    assert guarded in body(convert_cells(*PLAIN[:2], PLAIN[2] + f"    {line}\n"))


def test_what_saves_and_gives_back_a_path_saves_once() -> None:
    save = "def save(net):\n    torch.save(net.state_dict(), 'out.pt')\n    return 'out.pt'"
    text = body(convert_cells(*PLAIN[:2], save, PLAIN[2] + "    path = save(model)\n"))
    assert "    if LOCAL_RANK == 0:\n        torch.save(net.state_dict(), 'out.pt')\n" in text
    assert "    path = save(model)\n" in text


@pytest.mark.parametrize(
    "run",
    [
        "import optuna\ndef try_one(trial):\n    train(model, loader, opt=optimizer, epochs=3)\n"
        "    print(trial)\nstudy.optimize(try_one)",
        "import torchmetrics\nmetric = torchmetrics.Accuracy()\ndef show():\n    print(metric.compute())\nshow()",
    ],
    ids=["a study", "a metric"],
)
def test_what_waits_for_the_other_processes_is_not_under_a_guard(run: str) -> None:
    assert "IS_MAIN" not in body(convert_cells(*IN_A_FUNCTION[:3], run))


def test_a_parameter_called_as_a_function_that_trains_does_not_train() -> None:
    reads = "def read(train):\n    return open_rows(train)\nprint(read(True))"
    assert "IS_MAIN:\n    print(read(True))" in body(convert_cells(*IN_A_FUNCTION, reads))


def test_accelerate_cannot_share_a_batch_whose_size_is_in_a_dict() -> None:
    rows = ACCELERATED[0].replace("batch_size=6, shuffle=True", "**options")
    done = convert_cells(rows, *ACCELERATED[1:])
    assert kinds(done) == ["loop"] and "shared_batch" not in done.script


def test_data_parallel_takes_one_gpu() -> None:
    text = body(convert_cells(*PLAIN[:2], "model = torch.nn.DataParallel(model)", PLAIN[2]))
    assert "model = torch.nn.DataParallel(model, device_ids=[LOCAL_RANK])\n" in text


def test_batches_that_cannot_be_shared_are_said_when_the_script_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from torch.utils.data import DataLoader, IterableDataset

    class Stream(IterableDataset[int]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            yield from range(4)

    space = helpers("share_rows", RANK=0, WORLD_SIZE=2, IS_MAIN=True)
    space["share_rows"](DataLoader(list(range(4)), batch_size=1))  # type: ignore[arg-type]
    assert "Batches of 1 rows are too few for 2 processes" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no batches to share"):
        space["share_rows"](DataLoader(Stream(), batch_size=2))


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


def test_a_loop_that_generates_is_marked_without_the_advice_to_guard_it() -> None:
    loop = PLAIN[2] + "        model.generate('x')\n"
    done = convert_cells(*PLAIN[:2], loop)
    assert kinds(done) == ["inference"] and "IS_MAIN" not in "".join(e.message for e in done.report.warnings)
