"""Read and check the rows of a run, and store them as examples in a folder of the node."""

import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import datasets

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.images import downloads
from unsloth_ddp.data.images.files import stored
from unsloth_ddp.data.node_folder import room_for_rows
from unsloth_ddp.data.selection import mixed
from unsloth_ddp.data.sources.checked_rows import checked_rows
from unsloth_ddp.data.sources.formats import SHOWN_COLUMNS, Example
from unsloth_ddp.data.sources.revisions import dataset_revisions
from unsloth_ddp.data.sources.rows import checked_files, is_file, left_out, of_other_splits
from unsloth_ddp.data.template_values import TemplateColumns
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.sources import Source
from unsloth_ddp.utils.redaction import printable
from unsloth_ddp.utils.units import counted

# Rows of a stream that are read in advance; plans are made from them.
STREAM_HEAD = 1000
# A large set takes minutes to read, which should not look like a hang.
ROWS_BETWEEN_LINES = 50_000
EXAMPLE_FEATURES = datasets.Features(
    {"location": datasets.Value("string"), "example": datasets.Value("string"), "images": datasets.Value("int32")}
)


def read_examples(settings: Settings, runtime: Runtime, folder: Path, variables: Collection[str] = ()) -> None:
    """Read every row of the run into `folder`; refuse the first bad row by file and line.

    If training rows are streamed, read only the first STREAM_HEAD of them.

    Args:
        variables: the names that the chat template reads beside messages and tools; it is given columns of these names.
    """
    template = TemplateColumns(settings.chat_template_kwargs, variables)
    datasets.disable_progress_bars()

    @room_for_rows(folder)
    def read() -> None:
        if settings.download_images:
            print(
                f"Images that rows name by addresses are downloaded once, and kept in {downloads.folder()}.", flush=True
            )
        trained = settings.dataset, settings.dataset_split
        train = _examples(settings, *trained, folder, template, streaming=settings.streaming)
        if settings.eval_dataset:
            evaluation = _examples(settings, settings.eval_dataset, settings.eval_dataset_split, folder, template)
            evaluation.save_to_disk(folder / "examples_eval")
        elif settings.eval_fraction:
            train, evaluation = split_rows(train, settings.eval_fraction, settings.seed)
            evaluation.save_to_disk(folder / "examples_eval")
        train.save_to_disk(folder / "examples_train")
        if template.rows_of_column:
            names = ", ".join(
                f"{name} ({counted(count, 'row')})" for name, count in template.rows_of_column.most_common()
            )
            print(printable(f"Columns that are given to the chat template: {names}."), flush=True)

    runtime.on_main(read, per_node=True)


def held_out_examples(folder: Path, limit: int) -> list[Example]:
    """Return the first `limit` evaluation examples, without answers that are labelled as undesirable."""
    path = folder / "examples_eval"
    if not limit or not path.exists():
        return []
    read = (Example.from_json(row["example"]) for row in datasets.load_from_disk(path))
    return list(itertools.islice((example for example in read if example.desirable is not False), limit))


def have_images(folder: Path) -> bool:
    """Return whether a training or evaluation row has an image."""
    sets = (folder / f"examples_{name}" for name in ("train", "eval"))
    return any(any(datasets.load_from_disk(path)["images"]) for path in sets if path.exists())


def trains_on_text(folder: Path) -> bool:
    """Return whether the first training row is plain text, without messages."""
    first = datasets.load_from_disk(folder / "examples_train")[0]
    return json.loads(first["example"])["text"] is not None


def split_rows(rows: datasets.Dataset, fraction: float, seed: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Split off a fraction of the rows, drawn with a seed, for evaluation."""
    aside = round(len(rows) * fraction)
    if not 0 < aside < len(rows):
        raise UserError(
            f"eval_fraction {fraction} of {counted(len(rows), 'row')} is {counted(aside, 'row')}; choose one that "
            "leaves rows on both sides."
        )
    parts = rows.train_test_split(test_size=aside, seed=seed)
    return parts["train"], parts["test"]


def _examples(
    settings: Settings,
    sources: list[str],
    split: str,
    folder: Path,
    template: TemplateColumns,
    *,
    streaming: bool = False,
) -> datasets.Dataset:
    revisions = dataset_revisions(settings)
    checked = checked_files(sources, streaming=streaming)
    names = [source.name for source, _ in checked]
    empty = [file for _, files in checked for file in files if file not in names and Path(file).stat().st_size == 0]
    if streaming and (lists := left_out(names)):
        print(f"{_said_of(lists, 'is', 'are')} not read: of a folder, only .jsonl, .parquet and .csv files are read.")
    if streaming and (others := of_other_splits(names)):
        print(
            f"{_said_of(others, 'is', 'are')} trained too, although the name is that of another split; to leave it "
            "out, name the files to train on."
        )

    unread: Counter[str] = Counter()
    rows_of_source: Counter[Source] = Counter()
    numbers = itertools.count(1)

    def rows(source: Source, files: list[str]) -> Iterator[dict[str, Any]]:
        for file in files:
            location = ""
            for location, example in checked_rows(
                file,
                source.split_of("train" if is_file(file) else split),
                source.subset or settings.dataset_config,
                revisions.get(file),
                task=settings.task,
                column_names=settings.columns,
                images=settings,
                template=template,
                streaming=streaming,
                # A folder may hold empty shards, but a file that the user names should hold rows.
                may_be_empty=file not in names,
            ):
                rows_of_source[source] += 1
                unread.update(example.unread)
                if (number := next(numbers)) % ROWS_BETWEEN_LINES == 0:
                    print(f"{number:,} rows read.", flush=True)
                example.unread = []
                example.images = [stored(image, folder / "images") for image in example.images]
                yield {"location": location, "example": example.to_json(), "images": len(example.images)}
            if not location and file not in empty:
                empty.append(file)

    read = mixed([rows(*dataset) for dataset in checked], [source.weight for source, _ in checked])
    examples = _from_rows(itertools.islice(read, STREAM_HEAD) if streaming else read, folder, sources)
    if any(source.weight for source in rows_of_source) and not streaming:
        counts = ", ".join(f"{count:,} of {source}" for source, count in rows_of_source.items())
        print(printable(f"Rows mixed by their weights, none repeated: {counts}."), flush=True)
    if empty:
        what = _said_of(empty, "holds no rows and adds", "hold no rows and add")
        print(f"{what} nothing to the stream; check them if they should hold rows.")
    if unread:
        columns = ", ".join(f"{name} ({counted(count, 'row')})" for name, count in unread.most_common(SHOWN_COLUMNS))
        print(printable(f"Columns of {', '.join(sources)[:200]} that are not read: {columns}."), flush=True)
    return examples


def _said_of(files: list[str], singular: str, plural: str) -> str:
    """Return the first of the files, how many more there are, and what is said of one or of several."""
    return (
        f"{files[0]} and {counted(len(files) - 1, 'more file')} {plural}"
        if len(files) > 1
        else f"{files[0]} {singular}"
    )


def _from_rows(rows: Iterator[dict[str, Any]], folder: Path, sources: list[str]) -> datasets.Dataset:
    path = Path(tempfile.mkdtemp(dir=folder)) / "rows.arrow"
    with datasets.arrow_writer.ArrowWriter(features=EXAMPLE_FEATURES, path=str(path)) as writer:
        for row in rows:
            writer.write(row)
        count, _ = writer.finalize()
    if not count:
        raise UserError(f"dataset {', '.join(sources)} holds no rows.")
    return datasets.Dataset.from_file(str(path))
