"""The value of a cell's last line: a notebook displays it, the script prints it."""

import pytest
from making import LOAD, TRAIN, body, convert_cells

DATA = "from datasets import load_dataset\ndataset = load_dataset('d')"


@pytest.mark.parametrize(
    ("last", "printed"),
    [
        ("dataset[0]", "print(dataset[0])"),
        ("dataset.features", "print(dataset.features)"),
        ("dataset[0], len(dataset)", "print(dataset[0], len(dataset))"),
        ("(dataset[0], 1)", "print((dataset[0], 1))"),
        ("dataset.to_pandas().head()", "print(dataset.to_pandas().head())"),
        ("len(dataset)", "print(len(dataset))"),
        ("tokenizer.decode(dataset[0]['input_ids'])", "print(tokenizer.decode(dataset[0]['input_ids']))"),
    ],
)
def test_what_a_cell_ends_with_is_printed(last: str, printed: str) -> None:
    done = convert_cells(LOAD, DATA, f"x = 1\n{last}", TRAIN)
    assert f"x = 1\n{printed}\n" in body(done) or f"    {printed}\n" in body(done)
    assert "# ddp: print what the notebook displays" in done.script
    assert f"    {printed}\n" in body(done) or "if not IS_MAIN:\n\n    def print" in done.script


@pytest.mark.parametrize(
    "cell",
    [
        "dataset[0];",  # the notebook hides it
        "dataset[0]\nx = 1",  # only the last line is displayed
        "x = 1\nif x:\n    dataset[0]",
        "'a text'",
        "trainer.train()",
        "fix(dataset)",  # may return nothing
        "print = log\ndataset[0]",
        "display(dataset), len(dataset)",
    ],
)
def test_what_the_notebook_does_not_display_is_not_printed(cell: str) -> None:
    done = convert_cells(LOAD, DATA, TRAIN, cell)
    assert "print what the notebook displays" not in done.script


def test_what_the_main_process_generated_is_seen() -> None:
    """A guard around a bare name would do nothing, and the text that was generated would be lost."""
    text = body(convert_cells(LOAD, DATA, TRAIN, "out = model.generate(**inputs)", "out[0]"))
    assert "if IS_MAIN:\n    print(out[0])\n" in text
