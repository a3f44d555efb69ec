"""Each dataset of a run has its own subset, split, slice and weight, and columns are read under other names."""

from __future__ import annotations

import csv
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from tests.conftest import DEMO_MODEL, REPO, write_jsonl
from tests.docs.test_readme import commands_of
from tests.runtimes import cpu_runtime
from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.data.sources.examples import held_out_examples, read_examples
from unsloth_ddp.data.sources.rows import read_rows, training_rows
from unsloth_ddp.run.file_checks import check_data
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.sources import Source, read_source


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of 20 rows of text (a, b), and one of questions and answers, in the working folder."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_jsonl(Path(f"{name}.jsonl"), [{"text": f"{name}{i}"} for i in range(20)])
    with Path("qa.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("Question", "Reply"), *((f"q{i}", f"a{i}") for i in range(20))])
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"p{i}" for i in range(20)]}), "p.parquet")


def settings_of(*words: str) -> Settings:
    settings = parse_settings(["--model", str(DEMO_MODEL), "--dataset", *words])
    check_data(settings, 1)
    return settings


def texts(*words: str) -> list[str]:
    """The text of the training rows of a command line, as a run and a stream read them."""
    settings = settings_of(*words)
    return [row.columns["text"] for row in training_rows(settings, {}, streaming=settings.streaming)]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("org/set", Source("org/set")),
        ("org/set@en", Source("org/set", "en")),
        ("org/set[test]", Source("org/set", None, "test")),
        ("org/set@en[train[:10%]]:0.5", Source("org/set", "en", "train[:10%]", 0.5)),
        ("a.jsonl[:10%]:3", Source("a.jsonl", None, "[:10%]", 3.0)),
        ("s3:/x", Source("s3:/x")),
    ],
)
def test_what_follows_a_name_is_read_and_written(text: str, source: Source) -> None:
    assert read_source(text) == source and str(source) == text


def test_a_file_may_have_such_a_name(tmp_path: Path) -> None:
    for name in ("a:3", "a[1].jsonl", "a@b.jsonl"):
        (tmp_path / name).touch()
        assert read_source(f"{tmp_path}/{name}") == Source(f"{tmp_path}/{name}")
    assert read_source(f"{tmp_path}/a[1].jsonl[:5]:2") == Source(f"{tmp_path}/a[1].jsonl", None, "[:5]", 2.0)


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("slice_", "numbers"),
    [("[:10%]", range(2)), ("[train[:10%]]", range(2)), ("[5:7]", range(5, 7)), ("[-10%:]", range(18, 20)),
     ("[-3:-1]", range(17, 19)), ("[50%:60%]", range(10, 12)), ("[:99]", range(20)), ("[:]", range(20))],
)  # fmt: skip
@pytest.mark.parametrize("file", ["a.jsonl", "p.parquet"])
def test_a_slice_of_a_file(file: str, slice_: str, numbers: range) -> None:
    assert texts(file + slice_) == [f"{file[0]}{i}" for i in numbers]


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("streamed", [[], ["--streaming", "--max_steps", "1"]])
def test_weights_mix_datasets_without_repeating_a_row(streamed: list[str]) -> None:
    mixed = texts("a.jsonl:3", "b.jsonl:1", *streamed)
    assert Counter(text[0] for text in mixed) == {"a": 20, "b": 6} and len(set(mixed)) == len(mixed)
    # Any part of the mixture has these proportions.
    assert all(mixed[i : i + 4] and Counter(text[0] for text in mixed[i : i + 4])["a"] == 3 for i in range(0, 24, 4))
    assert Counter(text[0] for text in texts("a.jsonl[:6]", "b.jsonl:0.5", *streamed)) == {"a": 6, "b": 3}
    assert texts("a.jsonl", "b.jsonl[:1]", *streamed) == [*(f"a{i}" for i in range(20)), "b0"]


@pytest.mark.usefixtures("rows")
def test_the_run_reads_its_rows_so_and_says_how_many(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    settings = settings_of(
        "qa.csv[:50%]:2", "a.jsonl", "--eval_dataset", "qa.csv[-10%:]", "--columns", "Question=instruction",
            "Reply=output"
    )  # fmt: skip
    (tmp_path / "read").mkdir()
    read_examples(settings, cpu_runtime(), tmp_path / "read")
    assert (
        capsys.readouterr().out == "Rows mixed by their weights, none repeated: 10 of qa.csv[:50%]:2, 5 of a.jsonl.\n"
    )
    held_out = held_out_examples(tmp_path / "read", 9)
    assert [[message["content"] for message in row.messages] for row in held_out] == [["q18", "a18"], ["q19", "a19"]]


def test_a_yaml_file_may_give_mappings_and_paths_beside_it(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "a"}] * 9)
    datasets = [
        {"path": "./a.jsonl", "split": "train[:3]", "weight": 2},
        "a.jsonl[:1]",
        {"path": "o/r", "subset": "en"},
    ]
    options = {"model": "m", "dataset": datasets, "columns": {"question": "instruction", "answer": "output"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(options, sort_keys=False))
    settings = parse_settings(["--config", str(tmp_path / "run.yaml")])
    assert settings.dataset == [f"{tmp_path}/a.jsonl[train[:3]]:2", f"{tmp_path}/a.jsonl[:1]", "o/r@en"]
    assert settings.columns == ["question=instruction", "answer=output"]
    settings.save(tmp_path / "settings.yaml")
    assert parse_settings(["--config", str(tmp_path / "settings.yaml")]) == settings


@pytest.mark.parametrize(("streaming", "split"), [(False, "train[2:4]"), (True, "train")])
def test_a_slice_of_the_hub_is_taken_by_datasets_or_from_the_stream(
    monkeypatch: pytest.MonkeyPatch, streaming: bool, split: str
) -> None:
    import datasets

    asked: list[Any] = []

    def load_dataset(*args: Any, **given: Any) -> Any:
        asked.append((*args, given["split"]))
        table = datasets.Dataset.from_dict({"text": [f"h{i}" for i in range(9)]})
        return table.to_iterable_dataset() if streaming else table.select(range(2, 4))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = read_source("o/r@en[2:4]")
    found = read_rows(source.name, source.split_of("train"), source.subset, streaming=streaming)
    assert [row.columns["text"] for row in found] == ["h2", "h3"] and asked == [("o/r", "en", split)]


PAGE = (REPO / "docs" / "my-data.md").read_text()


def test_the_commands_of_the_page_read_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (table,) = re.findall(r"```\n(Question,Reply\n.*?)```", PAGE, re.DOTALL)
    Path("faq.csv").write_text(table)
    shutil.copy(REPO / "demo" / "train.jsonl", "my_chats.jsonl")
    read = []
    for command in [command for command in commands_of(PAGE) if "gsm8k" not in command]:
        words = shlex.split(command.split("train_ddp.py")[1])
        settings = parse_settings([str(REPO / word) if word.startswith("recipes/") else word for word in words])
        check_data(settings, 1)
        places = [row.location.split(":")[0] for row in training_rows(settings, {}, streaming=False)]
        read.append(Counter(places))
    assert read == [{"faq.csv": 2}, {"my_chats.jsonl": 684}, {"my_chats.jsonl": 9, "faq.csv": 2}]


def test_the_yaml_of_the_page_parses(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "run.yaml").write_text(f"model: m\n{text}")
    settings = parse_settings(["--config", str(tmp_path / "run.yaml")])
    assert settings.dataset == ["my_chats.jsonl:3", "openai/gsm8k@main[train[:10%]]:1"]
    assert settings.columns == ["question=instruction", "answer=output"]


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("a.jsonl,b.jsonl", "separate datasets by spaces: --dataset a.jsonl b.jsonl."),
        ("a.jsonl:0.75", "a weight mixes several datasets, and there is one; leave :0.75 out, or give a.jsonl[:75%]"),
        ("a.jsonl:75% b.jsonl", "dataset a.jsonl:75%: the weight is 75%, but it takes a number above 0; a slice "
            "stands in brackets"),
        ("a.jsonl:0 b.jsonl", "the weight is 0, but it takes a number above 0"),
        ("a.jsonl[test]", "dataset a.jsonl[test]: a file has no splits"),
        ("a.jsonl[train[1]]", "is no slice that can be read; write one such as [:1000] or [10%:20%]."),
        ("a.jsonl[:200%]", "a slice ends at 100%"),
        ("a.jsonl[:10%", "dataset a.jsonl[:10%: a bracket is not closed; write a slice as in a.jsonl[:10%]."),
        ("a.jsonl[]", "the brackets hold no split"),
        ("a.jsonl[20:]", "dataset a.jsonl[train[20:]] holds no rows; give another slice."),
        ("qa.csv@en", "dataset qa.csv@en: a file has no subset; leave @en out."),
        ("a.jsonl[:10%] --streaming --max_steps 1",
            "the number of streamed rows is not known; give a slice by numbers"),
        (".[:10] --streaming --max_steps 1", "a folder has no slices; name one of its files"),
        ("qa.csv", "give --columns Question=instruction Reply=output."),
        ("qa.csv --columns Question=instruction,Reply=output",
            "is no pair of names; give each as OLD=NEW, with spaces"),
        ("qa.csv --columns Question=instruction Question=input", "renames Question twice; name it once."),
        ("qa.csv --columns Question=instrucion", "instrucion is not a column that is read; give one of chosen, "
            "completion"),
        ("qa.csv --columns Answer=output", "the first rows have no column Answer; they have Question, Reply."),
        ("qa.csv --columns Question=output Reply=output", "the row has two columns output after --columns; rename the "
            "other one"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_before_anything_is_loaded(words: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        settings_of(*words.split())
    assert said in str(refused.value)
