"""Data: caches made once, and the same rows everywhere."""

import importlib
import random

import numpy as np
import pytest
import torch
from making import LOAD, TRAIN, body, convert_cells

LOADED = "from datasets import load_dataset\ndataset = load_dataset('d')"


def test_loading_and_mapping_go_first_on_one_process() -> None:
    text = body(
        convert_cells(LOAD, LOADED + "\ndataset = dataset.map(f, batched = True)\ndataset = dataset.filter(g)", TRAIN)
    )
    assert (
        "with main_process_first():\n    dataset = load_dataset('d')\n    dataset = dataset.map(f, batched = True)\n"
        "    dataset = dataset.filter(g)\n" in text
    )


@pytest.mark.parametrize(
    "call", ["huggingface_hub.snapshot_download('m')", "nltk.download('punkt')", "monai.apps.download_and_extract(url)"]
)
def test_downloads_go_first(call: str) -> None:
    text = body(convert_cells("import huggingface_hub, monai, nltk", f"path = {call}", LOAD + "\nuse(path)"))
    assert f"with main_process_first():\n    path = {call}\n" in text


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("dataset = dataset.train_test_split(test_size = 0.1)", "train_test_split(seed = 3407, test_size = 0.1)"),
        ("dataset = dataset.train_test_split(0.1)", "train_test_split(0.1, seed=3407)"),
        ("dataset = dataset.shuffle()", "shuffle(seed=3407)"),
        ("dataset = frame.sample(100)", "sample(100, random_state=3407)"),
        ("dataset = frame.sample(frac = 1)", "sample(random_state = 3407, frac = 1)"),
        ("a, dataset = train_test_split(rows)", "train_test_split(rows, random_state=3407)"),
        ("import numpy as np\nrng = np.random.default_rng()\ndataset = rng.permutation(dataset)", "default_rng(3407)"),
    ],
)
def test_random_choices_get_a_seed(given: str, made: str) -> None:
    done = convert_cells(LOAD, LOADED, given, TRAIN)
    assert made in body(done)
    assert "seed" in [e.kind for e in done.report.edits]


@pytest.mark.parametrize(
    "given",
    [
        "dataset = dataset.train_test_split(0.1, seed = 1)",
        "dataset = dataset.shuffle(seed = 1)",
        "dataset = dataset.shuffle(42)",
        "dataset = frame.sample(3, random_state = 1)",
        "import random\nrng = random.Random(1)\nrng.shuffle(dataset)",
    ],
)
def test_seeds_that_are_there_stay(given: str) -> None:
    done = convert_cells(LOAD, LOADED, given, TRAIN)
    assert given in body(done) and "seed" not in [e.kind for e in done.report.edits]


def test_global_generators_are_seeded_where_training_needs_the_draw() -> None:
    assert "same_draws(3407)\nrandom.shuffle(dataset)" in body(
        convert_cells(LOAD, LOADED, "import random\nrandom.shuffle(dataset)", TRAIN)
    )
    seeded = convert_cells(LOAD, LOADED, "import random\nrandom.seed(1)\nrandom.shuffle(dataset)", TRAIN)
    assert "same_draws" not in seeded.script


SAMPLE = "dataset = random.sample(rows, 5)"
NOISY = "def noisy(row):\n    return {'x': random.random()}\n"


@pytest.mark.parametrize(
    ("before", "after", "seeds"),
    [
        ("np.random.seed(0)", "", '3407, "random"'),
        ("torch.manual_seed(0)", "", '3407, "random"'),
        ("random.seed()", "", "3407"),
        ("if fixed:\n    random.seed(1)", "", "3407"),
        ("", "transformers.set_seed(42)", "3407"),
        ("random.seed(1)\nprint(random.random())", "", "3407"),
        ("def seed_all(n):\n    np.random.seed(n)\nseed_all(1)", "", '3407, "random"'),
        # The notebook's own function, whatever was imported under its name.
        ("from trl import set_seed\ndef set_seed(n):\n    np.random.seed(n)\nset_seed(1)", "", '3407, "random"'),
        # Only the main process prints, and only a first one maps; others may read what it cached.
        ("from lightning import seed_everything\nprint(seed_everything(42))", "", "3407"),
        (f"random.seed(1)\n{NOISY}rows = rows.map(noisy)", "", "3407"),
        # Nothing of training depends on it.
        ("probe = random.random()", "", "3407"),
        # Training draws as its rows have it.
        ("random.seed(1)\n" + TRAIN.replace("=dataset", "=rows"), "", "3407"),
        ("random.seed(1)\nfor row in rows:\n    row.loss.backward()", "", "3407"),
        ("random.seed(1)", "", None),
        ("def fill():\n    random.seed(1)\n    return [random.random()]\nrows = fill()", "", None),
        ("transformers.set_seed(42)", "", None),
        ("from accelerate.utils import set_seed\nset_seed(42)", "", None),
        ("from lightning import seed_everything\nseed_everything(42)", "", None),
        ("def seed_all(n):\n    random.seed(n)\n    np.random.seed(n)\nseed_all(1)", "", None),
        ("class Seeds:\n    def set(self):\n        random.seed(1)\nseeds = Seeds()\nseeds.set()", "", None),
    ],
)
def test_a_draw_is_seeded_if_its_own_generator_was_before_it(before: str, after: str, seeds: str | None) -> None:
    modules = "import random, torch, transformers\nimport numpy as np\nrows = [1]"
    text = body(convert_cells(LOAD, modules, before, SAMPLE, after, TRAIN))
    assert f"\n{SAMPLE}\n" in text
    assert text.count("same_draws(") == (seeds is not None)
    if seeds is not None:
        assert f"same_draws({seeds})\n{SAMPLE}\n" in text


def test_a_draw_within_training_is_left_to_it() -> None:
    train = TRAIN.replace("model=model", "model=model, formatting_func=noisy")
    assert "same_draws" not in convert_cells(LOAD, LOADED, f"import random\n{NOISY}", train).script


def test_every_unseeded_draw_has_a_seed_of_its_own() -> None:
    cell = "import random\npos = random.sample(range(9), 5)\nneg = random.sample(range(9), 5)\ndataset = [pos, neg]"
    text = body(convert_cells(LOAD, cell, TRAIN))
    assert "same_draws(3407)\npos = random.sample" in text and "same_draws(3408)\nneg = random.sample" in text


def test_a_draw_behind_a_map_that_draws_is_seeded_apart() -> None:
    """The map's first process draws, the others may read its cache."""
    cell = (
        "import random\ndef noisy(row):\n    return {'x': random.random()}\n"
        "dataset = dataset.map(noisy)\ndataset = dataset.map(noisy)\nrandom.shuffle(dataset)"
    )
    text = body(convert_cells(LOAD, LOADED, cell, TRAIN))
    mapped = "with main_process_first():\n    dataset = dataset.map(noisy)\n"
    assert f"same_draws(3407)\n{mapped}" in text and f"same_draws(3408)\n{mapped}" in text
    assert "same_draws(3409)\nrandom.shuffle(dataset)" in text


def test_draws_of_torch() -> None:
    cell = "import torch\norder = torch.randperm(9)\ndataset = dataset.select(order)"
    assert "same_draws(3407)\norder = torch.randperm(9)" in body(convert_cells(LOAD, LOADED, cell, TRAIN))
    given = cell.replace("(9)", "(9, generator = torch.Generator().manual_seed(1))")
    assert "same_draws" not in convert_cells(LOAD, LOADED, given, TRAIN).script


def test_the_helper_seeds_what_it_is_told_to() -> None:
    script = convert_cells(LOAD, "from numpy import random\ndataset = random.permutation(9)", TRAIN).script
    source = script[script.index("def same_draws") : script.index("def finish")]
    names = {"importlib": importlib}
    exec(source, names)
    other = np.random.random(), torch.rand(1)
    names["same_draws"](7, "random")  # type: ignore[operator]
    first = random.random()
    names["same_draws"](7)  # type: ignore[operator]
    same = np.random.random(), torch.rand(1)
    names["same_draws"](7)  # type: ignore[operator]
    assert random.random() == first and (np.random.random(), torch.rand(1)) == same != other


def test_another_seed() -> None:
    assert "shuffle(seed=7)" in body(convert_cells(LOAD, LOADED, "dataset = dataset.shuffle()", TRAIN, seed=7))


REWARDED = (
    "from trl import GRPOConfig, GRPOTrainer\n"
    "trainer = GRPOTrainer(model=model, train_dataset=rows, reward_funcs=[reward], args=GRPOConfig())\n"
    "trainer.train()"
)


@pytest.mark.parametrize(
    ("opened", "made"),
    [
        ("log = open('a.txt', 'a')", "    log = open('a.txt' if LOCAL_RANK == 0 else os.devnull, 'a')"),
        ("log = open(mode='w', file=path)", "    log = open(mode='w', file=path if LOCAL_RANK == 0 else os.devnull)"),
        ("import os\nlog = os.popen('sort > a.txt', 'w')", "    log = os.popen("),
        (
            "import os, sqlite3\ndef start():\n    os.makedirs('d')\n    base = sqlite3.connect('d/a')\n"
            "    return base\n"
            "log = start()",
            "    log = start()",
        ),
    ],
)
def test_what_a_process_has_opened_is_not_sent(opened: str, made: str) -> None:
    reward = "def reward(completions, **given):\n    log.write('x')\n    return [1.0]"
    text = body(convert_cells(LOAD, "rows = [1]\npath = 'a.txt'", opened, reward, REWARDED))
    assert f"with main_process_first():\n{made}" in text and "from_main" not in text


def test_a_file_that_a_function_reads_does_not_keep_its_value() -> None:
    read = "import json\ndef read(path):\n    with open(path) as file:\n        return json.load(file)"
    ask = "import os\nos.makedirs('d')\nsize = read(input())"
    assert "size = read(from_main(lambda: input()))" in body(convert_cells(LOAD, read, ask, "dataset = [size]", TRAIN))
