"""Say what tokenizing a set showed of its rows."""

from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from unsloth_ddp.data.chat.renderer import NOTES
from unsloth_ddp.utils.units import counted

# Names in a sentence on rows.
SHOWN_NAMES = 10


def report(tokenized: datasets.Dataset, purpose: str) -> list[str]:
    """Return a sentence for each note on how rows were rendered, with the number of such rows."""
    sentences = _said_in_notes(tokenized, purpose)
    for column, what in (
        ("unread_keys", f"Keys of {purpose} messages that the chat template does not read"),
        (
            "written_tokens",
            f"Special tokens in {purpose} texts are read as such and not as text; remove them unless that is meant",
        ),
    ):
        if named := most_frequent(column_of(tokenized, column)):
            names = ", ".join(f"{name} ({counted(count, 'row')})" for name, count in named.items())
            sentences.append(f"{what}: {names}.")
    return sentences


def _said_in_notes(tokenized: datasets.Dataset, purpose: str) -> list[str]:
    """Return a sentence for each kind of note, with the number of its rows and the first of them."""
    notes = column_of(tokenized, "notes")
    counts = most_frequent(notes)
    values, rows = pc.list_flatten(notes), pc.list_parent_indices(notes)
    sentences: list[str] = []
    for kind in dict.fromkeys(note.partition("\t")[0] for note in counts):
        named = {note: note.partition("\t")[2] for note in counts if note.partition("\t")[0] == kind}
        of_kind = rows.filter(pc.is_in(values, pa.array(list(named)))).unique()
        said = NOTES[kind].replace("{}", _listed({what: counts[note] for note, what in named.items()}))
        first = column_of(tokenized, "location")[pc.min(of_kind).as_py()]
        sentences.append(
            f"{len(of_kind):,} of {counted(len(tokenized), f'{purpose} row')}: {said}. The first is {first}."
        )
    return sentences


def _listed(counts: dict[str, int]) -> str:
    """Return the most frequent names, with the number of their rows if there are several."""
    shown = list(counts.items())[:SHOWN_NAMES]
    more = f" and {len(counts) - SHOWN_NAMES} more" if len(counts) > SHOWN_NAMES else ""
    return ", ".join(f"{name} ({counted(count, 'row')})" if len(counts) > 1 else name for name, count in shown) + more


def most_frequent(lists: pa.ChunkedArray) -> dict[Any, int]:
    """Count the values in a column of lists, the most frequent first."""
    counted = pc.value_counts(pc.list_flatten(lists)).to_pylist()
    return {item["values"]: item["counts"] for item in sorted(counted, key=lambda one: (-one["counts"], one["values"]))}


def column_of(rows: datasets.Dataset, name: str) -> Any:
    """Return a column as an Arrow array, since iterating over a million rows takes minutes."""
    assert rows._indices is None, "the rows are a selection, and the table holds more"
    return rows.data.column(name)
