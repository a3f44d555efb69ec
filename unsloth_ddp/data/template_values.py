"""Take from a row what its chat template is given beside messages and tools, such as enable_thinking."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from unsloth_ddp.data.sources.formats import Example
from unsloth_ddp.data.sources.values import check_plain, from_json, is_missing, kind_of
from unsloth_ddp.utils.errors import UserError

COLUMN = "chat_template_kwargs"
# What the row and the kit give to a template.
RESERVED = {
    "messages", "conversation", "conversations", "tools", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "return_assistant_tokens_mask", "strftime_now",
}  # fmt: skip
# A longer text, or one with spaces, is no switch: a column thinking may hold reasoning, which a variable turns on.
LONGEST_WORD = 20


@dataclass
class TemplateColumns:
    """Take the values for the chat template from rows.

    Args:
        of_run: --chat_template_kwargs, over which those of a row take precedence.
        variables: the names that the template reads.
        rows_of_column: counts the columns that values were taken from.
    """

    of_run: Mapping[str, Any] = field(default_factory=dict)
    variables: Collection[str] = ()
    rows_of_column: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.of_run = check_template_values(dict(self.of_run), COLUMN)

    def take(self, example: Example, columns: Mapping[str, Any]) -> None:
        """Give an example the values of its row.

        Raises:
            UserError: chat_template_kwargs is not an object, or has a value of the row itself.
        """
        if example.text is not None:
            return
        read = {n: columns[n] for n in example.unread if n in self.variables and _is_switch(columns.get(n))}
        values = {**self.of_run, **{name: _flag_of_text(value) for name, value in read.items()}}
        if COLUMN in example.unread:
            kwargs = read.setdefault(COLUMN, columns[COLUMN])
            values |= check_template_values(from_json(kwargs, COLUMN) if isinstance(kwargs, str) else kwargs, COLUMN)
        example.unread = [name for name in example.unread if name not in read]
        self.rows_of_column.update(read.keys())
        for half in filter(None, (example, example.rejected)):
            half.template_values = values


def check_template_values(values: Any, what: str) -> dict[str, Any]:
    """Return the values for a template without nulls.

    Raises:
        UserError: they are not an object, or have a value of the row itself.
    """
    if not isinstance(values, dict):
        raise UserError(f"{what} is {kind_of(values)}, not an object with values for the chat template.")
    check_plain(values, what)
    if reserved := RESERVED.intersection(values):
        fix = "give tools as a column" if "tools" in reserved else "leave it out"
        raise UserError(f"{what} has {min(reserved)}, which the chat template is given anyway; {fix}.")
    return {str(name): _flag_of_text(value) for name, value in values.items() if not is_missing(value)}


def _flag_of_text(value: Any) -> Any:
    """Return the flag that CSV and JSON text hold as a word: any word is true for a template."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _is_switch(value: Any) -> bool:
    if isinstance(value, str):
        return 0 < len(value) <= LONGEST_WORD and not any(map(str.isspace, value))
    return isinstance(value, bool | int | float | list | dict)
