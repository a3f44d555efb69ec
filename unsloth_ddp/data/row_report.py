"""Say what tokenizing a set showed of its rows."""

from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc

from unsloth_ddp.utils.units import counted

# Remarks on how a row was rendered. What stands behind a tab in a note of a row is told in place of {}.
NOTES: dict[str, str] = {
    "own": "TRL's training template would render them differently; the tokenizer's own chat template is used, as at "
    "inference (--chat_template training takes TRL's)",
    "training": "TRL's training template is used, because the tokenizer's own leaves out the reasoning of the answer "
    "or rewrites earlier turns",
    "reasoning": "the chat template leaves out the reasoning of earlier turns, as at inference, so these turns are "
    "not supervised; to train them, end a row at each of them, or give --chat_template training",
    "plain": "prompt and answer are texts, which are joined without the chat template and with nothing between them; "
    "to use the template, give lists of messages, or Alpaca's columns (instruction and output; in pairs, "
    "instruction in place of prompt)",
    "empty": "an answer is empty or only white space, so training teaches the model when to answer nothing; remove "
    "such rows unless that is meant",
    "reasoning supervised": "the chat template leaves out the reasoning of earlier turns, as at inference",
    "text": "the chat template leaves out the text of turns that call tools, so these turns are not supervised; to "
    "train their calls, remove the text, or give a template that renders both",
    "text supervised": "the chat template leaves out the text of turns that call tools",
    "unprompted": "the generation prompt opens a block of reasoning, which these answers do not have, so generation "
    "never begins as they do; give the answers their reasoning, or a template that does not open the block with "
    "--chat_template",
    "identical": "chosen and rejected are the same tokens, so there is nothing to prefer; remove such rows",
    "repeated": "the answer begins with its prompt, so the model reads it twice and learns to repeat it; take it out "
    "of one of them unless that is meant",
    "cut": "an answer opens a block of reasoning with {} and does not close it, so the model learns to stop inside "
    "it; close the block, or remove such rows",
    "unopened": "an answer closes with {} a block of reasoning that it does not open, so the chat template reads the "
    "text before it as reasoning; remove it from answers that only mention it",
    "second block": "the chat template adds an empty block of reasoning before the block in the answer; remove the "
    "reasoning of such answers, or give a template that reads it with --chat_template",
    "twice": "{} is rendered twice, because the rows hold it and the chat template adds it; remove it from the rows",
    "taken": "the chat template removes {} from texts, because it reads it as a directive; reword texts that mean it "
    "as text",
    "prompt": "the generation prompt ends with {}, which the trained text lacks before these answers, so generation "
    "and training differ; give rows for the mode of the generation prompt, or a matching template with "
    "--chat_template",
    "unwritten": "the tokenizer cannot encode {}, so the model is trained on other text in its place; replace it, or "
    "use a model whose tokenizer covers it",
    "unindented": "the chat template takes the spaces off with which answers begin, such as the indentation of code; "
    "begin the answer with the line before it, give prompt and completion as texts, which no template changes, or "
    "a template that keeps them with --chat_template (chatml does)",
    "untrained": "the embedding or the output head has nothing learned for {}, and an adapter does not train it; to "
    "train it, give --lora_trainable_tokens with these tokens, or --lora_modules_to_save with the embedding and "
    "the head",
    "python": "the chat template prints values in the arguments of tool calls as Python does (True, None), not as "
    "JSON; give a template that uses tojson with --chat_template, or write these values as text",
}
# Names in a sentence on rows.
SHOWN_NAMES = 10


def report(tokenized: datasets.Dataset, locations: pa.ChunkedArray, purpose: str) -> list[str]:
    """Return a sentence for each note on how rows were rendered, with the number of such rows.

    Args:
        locations: file and line of each row.
    """
    sentences = _said_in_notes(tokenized, locations, purpose)
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


def _said_in_notes(tokenized: datasets.Dataset, locations: pa.ChunkedArray, purpose: str) -> list[str]:
    """Return a sentence for each kind of note, with the number of its rows and the first of them."""
    notes = column_of(tokenized, "notes")
    counts = most_frequent(notes)
    values, rows = pc.list_flatten(notes), pc.list_parent_indices(notes)
    sentences: list[str] = []
    for kind in dict.fromkeys(note.partition("\t")[0] for note in counts):
        named = {note: note.partition("\t")[2] for note in counts if note.partition("\t")[0] == kind}
        of_kind = rows.filter(pc.is_in(values, pa.array(list(named)))).unique()
        sentence = NOTES[kind].replace("{}", _listed({what: counts[note] for note, what in named.items()}))
        first = locations[pc.min(of_kind).as_py()]
        sentences.append(
            f"{len(of_kind):,} of {counted(len(tokenized), f'{purpose} row')}: {sentence}. The first is {first}."
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
    return {
        item["values"]: item["counts"] for item in sorted(counted, key=lambda item: (-item["counts"], item["values"]))
    }


def column_of(rows: datasets.Dataset, name: str) -> Any:
    """Return a column as an Arrow array, since iterating over a million rows takes minutes."""
    assert rows._indices is None, "the rows are a selection, and the table holds more"
    return rows.data.column(name)
