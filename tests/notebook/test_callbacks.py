"""Callbacks that stop, save or evaluate by themselves, and what tells a tracker something inside functions."""

import pytest
from making import LOAD, TRAIN, body, convert_cells, helpers, kinds

STOPPER = """\
import time
from transformers import TrainerCallback
class Limit(TrainerCallback):
    def __init__(self):
        self.start = time.time()
    def on_step_end(self, args, state, control, **kwargs):
        if time.time() - self.start > 60:
            control.should_training_stop = True
        return control
    def on_log(self, args, state, control, **kwargs):
        self.last = state"""


def test_a_callback_s_decisions_are_the_main_process_s() -> None:
    text = body(convert_cells(LOAD, STOPPER, TRAIN))
    assert "    @shared_decision\n    def on_step_end(" in text and text.count("@shared_decision") == 1


@pytest.mark.parametrize(
    "line",
    [
        "wandb.log({'a': 1})",
        "run.log({'a': 1})",
        "wandb.run.summary['a'] = 1",
        "wandb.summary['a'] = 1",
        "mlflow.log_metric('a', 1)",
        "run.log_artifact('x')",
    ],
)
def test_what_tells_a_tracker_something_inside_a_function_is_guarded(line: str) -> None:
    cells = (
        "import wandb, mlflow\nrun = wandb.init()",
        f"def reward(completions, **kwargs):\n    scores = [1.0]\n    {line}\n    return scores",
        f"class C(TrainerCallback):\n    def on_log(self, args, state, control, **kwargs):\n        {line}",
    )
    text = body(
        convert_cells(
            LOAD, *cells, "from trl import GRPOTrainer\nt = GRPOTrainer(model, reward_funcs=reward)\nt.train()"
        )
    )
    assert f"    scores = [1.0]\n    if IS_MAIN:\n        {line}\n    return scores" in text
    assert f"        if IS_MAIN:\n            {line}\n" in text


@pytest.mark.parametrize("call", ["get_running_experiment", "get_global_experiment"])
def test_the_experiment_of_comet_is_ended_where_it_is(call: str) -> None:
    """The other processes have none: the call returns None there."""
    text = body(convert_cells("import comet_ml", LOAD, TRAIN, f"comet_ml.{call}().end()"))
    assert f"if IS_MAIN:\n    comet_ml.{call}().end()\n" in text


@pytest.mark.parametrize("start", ["", "artifact = run.use_artifact('x')", "artifact = wandb.use_artifact('x')"])
def test_an_artifact_s_folder_reaches_every_process(start: str) -> None:
    use = "folder = artifact.download()" if start else "folder = run.use_artifact('x').download()"
    text = body(
        convert_cells(LOAD, "import wandb\nrun = wandb.init()", f"{start}\n{use}\ndataset = open(folder).read()", TRAIN)
    )
    assert "folder = from_main(lambda: " in text and ".download())" in text
    assert not start or f"if IS_MAIN:\n    {start}\n" in text


def test_a_trainer_with_its_own_loader_is_named() -> None:
    trainer = (
        "from trl import SFTTrainer\nclass Mine(SFTTrainer):\n    def get_train_dataloader(self):\n        return {}"
    )
    use = TRAIN.replace("SFTTrainer(model", "Mine(model")
    done = convert_cells(LOAD, trainer.format("DataLoader(self.train_dataset)"), use)
    assert kinds(done) == ["data loader"] and "Mine.get_train_dataloader" in done.report.warnings[0].message
    good = trainer.format("self.accelerator.prepare(DataLoader(self.train_dataset))")
    assert kinds(convert_cells(LOAD, good, use)) == []


LOOP = "for batch in loader:\n    loss = model(batch)\n    {}\n    optimizer.step()"


def test_a_loop_that_accelerate_prepares_is_told_about_its_batch() -> None:
    prepared = (
        "from accelerate import Accelerator\na = Accelerator()\nmodel, optimizer, loader = a.prepare(model, o, l)"
    )
    done = convert_cells(LOAD, prepared, LOOP.format("a.backward(loss)"))
    assert [
        (e.kind, "averages the gradients" in e.message, "batch_size" in e.message) for e in done.report.warnings
    ] == [("loop", True, True)]
    done = convert_cells(LOAD, LOOP.format("loss.backward()"))
    assert ["not averaged" in e.message for e in done.report.warnings] == [True]


@pytest.mark.parametrize(
    "cell",
    [
        "rows = [await fetch(x) for x in range(3)]",
        "for x in range(3):\n    await fetch(x)",
        "rows = []\nasync for x in stream():\n    rows.append(x)",
        "async with client() as c:\n    rows = await c.get()",
        "rows = [x async for x in stream()]",
        "print(f'{await fetch(1)}')",
    ],
)
def test_await_in_blocks_and_comprehensions(cell: str) -> None:
    done = convert_cells(LOAD, "async def fetch(x): return x", cell + "\ndataset = rows", TRAIN)
    compile(done.script, "script", "exec")
    assert "run_async(" in body(done) and "fetch" in done.script


@pytest.mark.parametrize(
    "cell",
    [
        "rows = [x async for x in stream()]",
        "async def one(x): return x\nimport asyncio\nrows = await asyncio.gather(one(1), one(2))",
        "async def one(x): return x\nfrom asyncio import create_task\ntasks = [create_task(one(x)) for x in (1, 2)]\n"
        "rows = [await task for task in tasks]",
    ],
)
def test_what_needs_a_running_loop_hands_its_names_on(cell: str) -> None:
    done = convert_cells(LOAD, "async def stream():\n    yield 1\n    yield 2", cell, TRAIN)
    text = body(done)
    cells = text[text.index("async def stream") : text.index("# %%\nfrom trl")]
    space: dict = helpers("run_async")
    exec(cells, space)
    assert space["rows"] == [1, 2]


@pytest.mark.parametrize(
    ("cell", "role"),
    [
        ("%%writefile data.json\n[]", "LOCAL_RANK == 0"),
        ("with open('data.json', 'w') as f:\n    f.write('[]')", "LOCAL_RANK == 0"),
        ("import os, shutil\nshutil.rmtree('old')", "IS_MAIN"),
    ],
)
def test_files_that_every_node_reads_are_made_on_every_node(cell: str, role: str) -> None:
    text = body(convert_cells(LOAD, cell, "dataset = load_dataset('json', data_files='data.json')", TRAIN))
    assert f"if {role}:\n" in text
    assert "if IS_MAIN:\n" in body(convert_cells(LOAD, TRAIN, "%%writefile results.txt\nx"))


@pytest.mark.parametrize(
    "cell",
    [
        "%%writefile rewards.py\ndef score(texts):\n    return [1.0]",
        "from pathlib import Path\nPath('rewards.py').write_text('x = 1')",
        "import json\nwith open('settings.json', 'w') as f:\n    json.dump({}, f)",
    ],
)
def test_files_that_nothing_visible_reads_are_made_on_every_node_too(cell: str) -> None:
    """A module, or settings that a library finds by itself: on the second node they would be missing."""
    text = body(convert_cells(LOAD, cell, "from rewards import score\ndataset = score([])", TRAIN))
    assert "if LOCAL_RANK == 0:\n" in text and "if IS_MAIN:" not in text


def test_a_loop_that_ends_by_the_clock_is_pointed_at() -> None:
    loop = (
        "for batch in loader:\n    loss = model(batch)\n    loss.backward()\n"
        "    if time.time() - start > 60:\n        break"
    )
    done = convert_cells(LOAD, "import time\nstart = time.time()", loop)
    assert any("ends by the clock" in entry.message for entry in done.report.warnings)
    timed = loop.replace("if time.time() - start > 60:\n        break", "print(time.time() - start)")
    done = convert_cells(LOAD, "import time\nstart = time.time()", timed)
    assert not any("by the clock" in entry.message for entry in done.report.warnings)


def test_a_callback_removes_files_on_one_process_and_makes_them_on_each() -> None:
    cell = (
        "import os\nfrom transformers import TrainerCallback\nclass Tidy(TrainerCallback):\n"
        "    def on_save(self, args, state, control, **kwargs):\n        os.makedirs('notes', exist_ok=True)\n"
        "        if os.path.exists('old'):\n            os.remove('old')\n"
    )
    text = body(convert_cells(LOAD, cell, TRAIN.replace("))", "), callbacks=[Tidy()])", 1)))
    assert "\n        os.makedirs(" in text and "            if IS_MAIN:\n                os.remove('old')\n" in text
