"""What trains: it runs on every process."""

import pytest
from making import LOAD, TRAIN, body, convert_cells, kinds

DATA = "from datasets import load_dataset\ndataset = load_dataset('d', split = 'train')"


def test_training_and_evaluation_are_never_guarded() -> None:
    text = body(
        convert_cells(LOAD, DATA, TRAIN, "stats = trainer.evaluate()\nprint(stats)\nprint(trainer.predict(dataset))")
    )
    assert "\ntrainer.train()" in text and "\nstats = trainer.evaluate()\nprint(stats)\n" in text
    assert "\nprint(trainer.predict(dataset))" in text


def test_what_waits_for_every_process_is_never_guarded() -> None:
    cells = (
        "from accelerate import PartialState\nstate = PartialState()",
        "with state.main_process_first():\n    dataset = dataset.map(f)\n    print(dataset)",
        "state.wait_for_everyone()",
    )
    text = body(convert_cells(LOAD, DATA, *cells, TRAIN))
    assert "\nwith state.main_process_first():\n    dataset = dataset.map(f)\n" in text
    assert "\nstate.wait_for_everyone()\n" in text


IN_A_CLASS = "class Run:\n    def go(self):\n        " + TRAIN.replace("\n", "\n        ")


@pytest.mark.parametrize("start", ["Run().go()", "run = Run()\nrun.go()"])
def test_a_method_that_trains_saves_once(start: str) -> None:
    done = convert_cells(LOAD, DATA, IN_A_CLASS + "\n        model.save_pretrained('x')", start)
    assert "        if IS_MAIN:\n            model.save_pretrained('x')\n" in body(done) and kinds(done) == []


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        ("import wandb\nwandb.agent(wandb.sweep({}), go, count=3)", "tracker"),
        ("from accelerate import notebook_launcher\nnotebook_launcher(go, mixed_precision='bf16')", "sizing"),
        ("from accelerate import notebook_launcher\nnotebook_launcher(go, (), 2, 'bf16')", "sizing"),
        ("import torch\ntorch.multiprocessing.spawn(go, nprocs=2)", "sizing"),
    ],
)
def test_what_starts_trainings_by_itself_is_said(start: str, kind: str) -> None:
    function = "def go():\n    " + TRAIN.replace("\n", "\n    ")
    assert kinds(convert_cells(LOAD, DATA, function, start)) == [kind]


LAUNCHED = """\
from accelerate import Accelerator, notebook_launcher
def go(rate, epochs):
    accelerator = Accelerator()
    loader, net = accelerator.prepare(rows, model)
    for batch in loader:
        accelerator.backward(net(batch))
"""


@pytest.mark.parametrize(
    ("start", "made"),
    [
        ("notebook_launcher(go, (1e-3, 2), num_processes=2)", "go(1e-3, 2)"),
        ("notebook_launcher(go, args=(1e-3, 2))", "go(1e-3, 2)"),
        ("given = (1e-3, 2)\nnotebook_launcher(go, given, num_processes=1)", "go(*given)"),
        ("import accelerate\naccelerate.notebook_launcher(go)", "go()"),
    ],
)
def test_what_a_notebook_gives_to_a_launcher_is_called_on_every_process(start: str, made: str) -> None:
    """Started from rank 0 alone, the launcher would start processes on the GPUs that the others hold."""
    done = convert_cells(LOAD, LAUNCHED, start)
    assert f"\n{made}\n" in body(done) and "notebook_launcher(" not in body(done)
    assert kinds(done) == ["loop"]


def test_the_trainer_of_lightning_trains_and_is_to_be_checked() -> None:
    cell = "import lightning as L\ntrainer = L.Trainer(devices=[0], max_epochs=2)\ntrainer.fit(module)"
    done = convert_cells("import torch\nfrom mine import module", cell, "trainer.save_checkpoint('x')")
    assert "\ntrainer.fit(module)\n" in body(done) and "sizing" in kinds(done) and "no trainer" not in kinds(done)


def test_an_object_that_trains_when_called_is_never_guarded() -> None:
    """On the main process alone its training would wait for the others."""
    cell = (
        "from txtai.pipeline import HFTrainer\ntrainer = HFTrainer()\nmodel, tok = trainer('m', rows)\n"
        "model.generate('x')"
    )
    done = convert_cells("import torch\nrows = [1]", cell)
    assert "\nmodel, tok = trainer('m', rows)\n" in body(done) and "arguments" in kinds(done)


def test_the_trainer_of_a_tokenizer_is_none() -> None:
    cell = (
        "from tokenizers.trainers import BpeTrainer\ntrainer = BpeTrainer(vocab_size=100)\n"
        "tokens.train(['a.txt'], trainer)"
    )
    assert kinds(convert_cells(LOAD, "tokens = object()", cell, DATA, TRAIN)) == []


_MADE = "SFTTrainer(model=model, args=SFTConfig(), train_dataset=[1])"


@pytest.mark.parametrize(
    ("made", "trains"),
    [
        (f"trainer = {_MADE}\nfrom unsloth import unsloth_train", "unsloth_train(trainer)"),
        (f"trainer = {_MADE}\ndef go(what):\n    return what.train()", "go(trainer)"),
        (f"runs = {{}}\nruns['a'] = {_MADE}", "runs['a'].train()"),
        (f"runs = [{_MADE}]", "runs[0].train()"),
        (f"trainer = {_MADE}\nsame = trainer", "same.train()"),
        (f"import types\nrun = types.SimpleNamespace()\nrun.one = {_MADE}", "run.one.evaluate()"),
        (
            "from trl import SFTTrainer as Kind\nrun = Kind(model=model, args=SFTConfig(), train_dataset=[1])",
            "run.train()",
        ),
        ("Kind = SFTTrainer\nrun = Kind(model=model, args=SFTConfig(), train_dataset=[1])", "run.train()"),
        (
            f"def start():\n    trainer = {_MADE}\n    return {{'trainer': trainer}}\nrun = start()",
            "run['trainer'].train()",
        ),
    ],
)
def test_what_trains_is_never_guarded_however_the_trainer_is_reached(made: str, trains: str) -> None:
    """Under a guard the main process would wait for the gradients of the others."""
    text = body(
        convert_cells(LOAD, "from trl import SFTConfig, SFTTrainer", made, f"stats = {trains}", "print(stats.metrics)")
    )
    assert f"\nstats = {trains}\n" in text and "IS_MAIN" not in text
