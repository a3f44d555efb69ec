"""Data: caches made once, and the same rows everywhere."""

import pytest
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


def test_downloads_go_first() -> None:
    text = body(
        convert_cells(
            "from huggingface_hub import snapshot_download\npath = snapshot_download('m')", LOAD + "\nuse(path)"
        )
    )
    assert "path = snapshot_download('m')" in text


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


def test_another_seed() -> None:
    assert "shuffle(seed=7)" in body(convert_cells(LOAD, LOADED, "dataset = dataset.shuffle()", TRAIN, seed=7))
