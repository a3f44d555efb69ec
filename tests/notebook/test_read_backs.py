"""Test where a path is read back, and where it is written so that it can be."""

import pytest
from making import LOAD, TRAIN, body, convert_cells, kinds

DATA = "from datasets import load_dataset\ndataset = load_dataset('d', split = 'train')"
PEFT = "from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel"
AGAIN = TRAIN.replace("trainer", "second")


@pytest.mark.parametrize(
    ("before", "save", "read"),
    [
        ("folder = 'out'", "model.save_pretrained(folder)", "PeftConfig.from_pretrained(folder)"),
        ("folder = 'out'", "model.save_pretrained(folder)", "PeftConfig.from_pretrained('out')"),
        ("name = 'x'", "model.save_pretrained(f'runs/{name}')", "PeftConfig.from_pretrained('runs/x')"),
        (
            "import os\ntop = 'runs'",
            "model.save_pretrained(os.path.join(top, 'x'))",
            "PeftConfig.from_pretrained('runs/x')",
        ),
        ("top = 'runs/'", "model.save_pretrained(top + 'x')", "PeftConfig.from_pretrained('runs/x/')"),
    ],
)
def test_what_was_saved_is_read_where_it_was_saved(before: str, save: str, read: str) -> None:
    text = body(convert_cells(LOAD, DATA, PEFT, before, TRAIN, save, f"config = {read}\nprint(config)"))
    assert f"if IS_MAIN:\n    config = {read}" in text


def test_the_folder_of_a_trainer_that_saves_is_known() -> None:
    arguments = "args = SFTConfig(output_dir='out')"
    train = "from trl import SFTConfig, SFTTrainer\n" + arguments
    train += (
        "\ntrainer = SFTTrainer(model=model, args=args, train_dataset=dataset)\ntrainer.train()\ntrainer.save_model()"
    )
    read = "tuned = AutoPeftModelForCausalLM.from_pretrained(args.output_dir)\ntuned.eval()"
    text = body(convert_cells(LOAD, DATA, PEFT, train, read))
    assert "if IS_MAIN:\n    tuned = AutoPeftModelForCausalLM" in text and "    tuned.eval()" in text


def test_a_name_that_was_assigned_again_is_another_folder() -> None:
    cells = ("folder = 'out'", TRAIN, "model.save_pretrained(folder)", "folder = choose()", "x = load(folder)")
    text = body(convert_cells(LOAD, DATA, *cells, "print(trainer.evaluate(x))"))
    assert "\nx = load(folder)" in text


def test_what_a_second_training_reads_back_is_saved_on_each_node() -> None:
    read = "model = AutoPeftModelForCausalLM.from_pretrained('out')"
    done = convert_cells(LOAD, DATA, PEFT, TRAIN, "trainer.model.save_pretrained('out')", read, AGAIN)
    text = body(done)
    assert "if LOCAL_RANK == 0:\n    trainer.model.save_pretrained('out')\nwait_for_everyone()" in text
    assert f"\n{read}\n" in text and "read back" not in kinds(done)


def test_what_only_one_process_of_the_job_can_save_is_said() -> None:
    """Transformers' save_model asks which process may save: on a second node, none."""
    read = "model = AutoPeftModelForCausalLM.from_pretrained('out')"
    done = convert_cells(LOAD, DATA, PEFT, TRAIN, "trainer.save_model('out')", read, AGAIN)
    assert "\ntrainer.save_model('out')\nwait_for_everyone()" in body(done) and "read back" in kinds(done)


def test_a_model_loaded_to_be_tried_goes_to_the_main_process_with_what_follows_it() -> None:
    cells = (
        "base = AutoModelForCausalLM.from_pretrained('b')",
        "base.config.use_cache = True\ntuned = PeftModel.from_pretrained(base, 'hub/adapter')\ntuned.eval()",
        "print(tuned.generate('x'))",
    )
    text = body(convert_cells("from transformers import AutoModelForCausalLM", LOAD, DATA, PEFT, TRAIN, *cells))
    assert "if IS_MAIN:\n    base = AutoModelForCausalLM" in text
    assert (
        "if IS_MAIN:\n    base.config.use_cache = True\n    tuned = PeftModel" in text and "\n    tuned.eval()" in text
    )


def test_the_trained_model_stays_everywhere() -> None:
    text = body(
        convert_cells(LOAD, DATA, TRAIN, "model.eval()\nprint(model.generate('x'))\nmetrics = trainer.evaluate()")
    )
    assert "\nmodel.eval()\n" in text and "\nmetrics = trainer.evaluate()" in text


def test_a_function_that_reads_a_name_of_the_main_process_is_called_there() -> None:
    cells = (
        "from transformers import pipeline\npipe = pipeline('text-generation', model=model)",
        "def score(row):\n    return len(pipe(row))",
        "dataset.to_json('held_out.json')",
        "rows = load_dataset('json', data_files='held_out.json')\ntotal = []\nfor row in rows:\n"
        "    total.append(score(row))",
        "print(sum(total))",
    )
    text = body(convert_cells(LOAD, DATA, TRAIN, *cells))
    assert "LOCAL_RANK == 0:\n    rows" not in text and "    for row in rows:" in text


def test_files_drawn_at_random_are_alike_on_every_node() -> None:
    cell = (
        "import random\npicked = random.sample(names, 3)\nwith open('rows.txt', 'w') as file:\n"
        "    file.write(str(picked))"
    )
    read = "dataset = load_dataset('text', data_files='rows.txt')"
    text = body(convert_cells(LOAD, "from datasets import load_dataset", "names = ['a', 'b']", cell, read, TRAIN))
    assert text.index("same_draws(") < text.index("picked = ") and "if LOCAL_RANK == 0:" in text


def test_an_evaluation_that_seeds_what_it_generates_runs_once() -> None:
    cells = (
        "import torch\ndef solve(row):\n    torch.manual_seed(0)\n    return model.generate(row)",
        "for steps in (1, 16):\n    print(steps, solve('x'))",
    )
    text = body(convert_cells(LOAD, DATA, TRAIN, *cells))
    assert "if IS_MAIN:\n    for steps in (1, 16):" in text and "main_process_first():\n    for steps" not in text


WRITE = "import json\nwith open('rows.json', 'w') as file:\n    json.dump(rows, file)"
READ = "from datasets import load_dataset\ndataset = load_dataset('json', data_files='rows.json')"


def test_rows_of_a_file_that_training_reads_are_made_on_each_node() -> None:
    make = (
        "rows = []\nfor row in (1, 2):\n    rows.append(row)\n    print(row)\nif len(rows) < 9:\n"
        "    rows = rows * 2\n    print(9)"
    )
    done = convert_cells(LOAD, f"{make}\n{WRITE}\n{READ}", TRAIN)
    assert "if LOCAL_RANK == 0:\n    rows = []\n" in body(done) and "IS_MAIN" not in body(done) and kinds(done) == []


def test_a_file_of_rows_that_only_the_main_process_makes_needs_a_shared_disk() -> None:
    make = "rows = []\nfor text in ('a', 'b'):\n    rows.append(model.generate(text))"
    done = convert_cells(LOAD, make, WRITE, READ, TRAIN)
    assert "if IS_MAIN:\n    with open('rows.json', 'w')" in body(done) and kinds(done) == ["read back"]


def test_a_function_writes_its_file_on_each_node_and_its_value_is_the_main_process_s() -> None:
    make = (
        "def write(rows):\n    with open('rows.json', 'w') as file:\n        file.write(str(rows))\n"
        "    return 'rows.json'"
    )
    read = "from datasets import load_dataset\ndataset = load_dataset('json', data_files=path)"
    text = body(convert_cells(LOAD, make, "path = write([1])", read, TRAIN))
    assert "if LOCAL_RANK == 0:\n    path = write([1])\npath = from_main(lambda: path)\n" in text
