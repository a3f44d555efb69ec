"""Read the rows of a source as examples, each checked, and check the first rows of all files of a run."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.task_options import ImageSettings
from unsloth_ddp.data.images.files import ImageFiles
from unsloth_ddp.data.images.values import COLUMNS
from unsloth_ddp.data.sources.formats import Example
from unsloth_ddp.data.sources.preference import READ_COLUMNS, converter
from unsloth_ddp.data.sources.rows import checked_files, is_file, read_rows
from unsloth_ddp.data.sources.values import is_empty
from unsloth_ddp.data.template_values import TemplateColumns
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.sources import read_source

# Rows of each file whose columns --columns is compared with.
ROWS_OF_COLUMNS = 100


def checked_rows(
    source: str,
    split: str,
    config: str | None = None,
    revision: str | None = None,
    *,
    task: str,
    column_names: Sequence[str] = (),
    images: ImageSettings | None = None,
    template: TemplateColumns | None = None,
    decode_images: bool = True,
    streaming: bool = False,
    may_be_empty: bool = False,
) -> Iterator[tuple[str, Example]]:
    """Yield the location of each row of one source, and its example.

    Args:
        task: --task, which says how a row is read.
        column_names: --columns, which says how columns are renamed.
        images: where the images of the rows are; by default beside the file.
        template: what the chat template is given beside messages and tools.
        decode_images: see ImageFiles.

    Raises:
        UserError: see read_rows; a row has none of the accepted formats, or an image of it cannot be read; there are no
            rows, unless `may_be_empty`.
    """
    location, convert = "", converter(task, column_names)
    files = ImageFiles.of(images or ImageSettings(), [source] if is_file(source) else [], decode=decode_images)
    for location, columns in read_rows(source, split, config, revision, streaming=streaming):
        try:
            # Before a text, which has no place for them, is refused as such.
            named = isinstance(columns, dict) and any(not is_empty(columns.get(name)) for name in COLUMNS)
            example = None if task != "sft" and named else convert(columns)
            if example is None or (task != "sft" and example.images):
                raise UserError(
                    f"the row has images, which task {task} does not take; remove them, or give --task sft and rows "
                    "with the good answers as messages."
                )
            example.images = [files.checked(image) for image in example.images]
            (template or TemplateColumns()).take(example, columns)
        except UserError as error:
            raise UserError(f"{location}: {error}") from None
        yield location, example
    if not location and not may_be_empty:
        raise UserError(f"dataset {source} holds no rows; leave it out, or check why it is empty.")


def check_column_names(settings: Settings) -> None:
    """Refuse --columns with a new name that is not read, or an old one that no column of the first rows has.

    Raises:
        UserError: naming the pair; rows on the Hub are not looked at.
    """
    names = [read_source(text).name for text in (*settings.dataset, *settings.eval_dataset)]
    files = [name for name in names if Path(name).expanduser().is_file()]
    for pair in settings.columns:
        old, new = pair.split("=")
        if new not in READ_COLUMNS:
            raise UserError(
                f"columns {pair}: {new} is not a column that is read; give one of {', '.join(READ_COLUMNS)}."
            )
        if len(files) == len(names):
            rows = (
                row.columns for file in files for row in itertools.islice(read_rows(file, "train"), ROWS_OF_COLUMNS)
            )
            titles = list(dict.fromkeys(str(name) for row in rows if isinstance(row, dict) for name in row))
            if old not in titles:
                raise UserError(
                    f"columns {pair}: the first rows have no column {old}; they have {', '.join(titles)[:200]}."
                )


@dataclass
class FirstRows:
    """Count the rows and files that check_first_rows has read, and the Hub datasets that it has left out.

    Args:
        images: whether one of the rows has an image.
    """

    rows: int = 0
    files: int = 0
    hub: int = 0
    images: bool = False


def check_first_rows(settings: Settings, count: int) -> FirstRows:
    """Read the first `count` rows of every local file of a run; missing files are skipped.

    Raises:
        UserError: the run would refuse one of these rows, or a file.
    """
    first_rows = FirstRows()
    for sources, streaming in ((settings.dataset, settings.streaming), (settings.eval_dataset, False)):
        names = {text: read_source(text).name for text in sources}
        existing = [text for text, name in names.items() if not is_file(name) or Path(name).expanduser().exists()]
        for source, files in checked_files(existing, streaming=streaming):
            if not is_file(source.name):
                first_rows.hub += 1
                continue
            # A slice by percentages or from the end takes a count of all rows, which the ranks leave to the run.
            split = "train" if re.search("[%-]", source.split or "") else source.split_of("train")
            for file in files:
                rows = checked_rows(
                    file,
                    split,
                    task=settings.task,
                    column_names=settings.columns,
                    images=settings,
                    template=TemplateColumns(settings.chat_template_kwargs),
                    # Every rank reads these rows, and the images of all rows are decoded when they are read.
                    decode_images=False,
                    # A folder may hold empty shards, but a file that the user names should hold rows.
                    may_be_empty=file != source.name,
                )
                for _, example in itertools.islice(rows, count):
                    first_rows.rows += 1
                    first_rows.images |= bool(example.images)
                first_rows.files += 1
    return first_rows
