"""The key tables of docs/keys.md are those of the code; `python -m tests.port.test_page` writes them anew."""

from __future__ import annotations

import re

from tests.conftest import REPO
from unsloth_ddp.config.aliases import ALIASES, OTHER_VALUES, TOOLS, Alias
from unsloth_ddp.port.convert import DEFAULTS

PAGE = REPO / "docs" / "keys.md"
BEGIN, END = "<!-- key tables: begin -->\n", "<!-- key tables: end -->\n"
TITLES = {
    "A": "axolotl",
    "L": "LLaMA-Factory",
    "T": "TRL and Transformers",
    "S": "ms-swift",
    "G": "Scripts of guides and model pages",
}


def meaning(alias: Alias) -> str:
    """Return the table row of one alias."""
    if alias.option:
        return f"`{alias.option}`"
    translations = []
    for value, options in alias.values.items():
        if not options:
            continue
        here = ", ".join(
            f"`{name}: {' '.join(item) if isinstance(item, list) else item}`" for name, item in options.items()
        )
        translations.append(f"{value}: {here}")
    if translations and alias.note.startswith("give"):
        return "; ".join(translations)
    return "; ".join([*translations, f"otherwise {alias.note}" if translations else alias.note])


def tables() -> str:
    """The section of each tool: its defaults, and its keys grouped by what they mean here."""
    parts = []
    for letter, title in TITLES.items():
        groups: dict[str, list[str]] = {}
        for name, alias in ALIASES.items():
            if letter in alias.tools:
                groups.setdefault(meaning(alias), []).append(name)
        defaults = DEFAULTS.get(TOOLS[letter], {})
        shown = ", ".join(f"`{name}: {value}`" for name, value in defaults.items())
        lines = [f"## {title}", ""]
        lines += [f"Its defaults where they differ from the kit's: {shown}.", ""] if shown else []
        lines += [f"| {title} | here |", "|---|---|"]
        lines += [f"| {', '.join(f'`{name}`' for name in sorted(names))} | {text} |" for text, names in groups.items()]
        parts.append("\n".join(lines) + "\n")
    lines = ["## Values", "", "| option | elsewhere | here |", "|---|---|---|"]
    for name, values in OTHER_VALUES.items():
        for here in dict.fromkeys(values.values()):
            elsewhere = ", ".join(f"`{value}`" for value in values if values[value] == here)
            lines.append(f"| `{name}` | {elsewhere} | `{here}` |")
    return "\n".join([*parts, "\n".join(lines) + "\n"])


def with_tables(page: str) -> str:
    """The page with the tables of the code."""
    return re.sub(
        re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: f"{BEGIN}\n{tables()}\n{END}", page, flags=re.DOTALL
    )


def test_the_key_tables_are_those_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert BEGIN in page and END in page
    assert page == with_tables(page), "run python -m tests.port.test_page"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
