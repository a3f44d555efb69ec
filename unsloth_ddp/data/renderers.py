"""Hold the renderers of a run: for rows with and without tools, and for rows that give values to their template."""

import json
from datetime import date
from typing import Any

from unsloth_ddp.data.chat.renderer import ChatRenderer
from unsloth_ddp.data.chat.template import TemplatePair, template_pair, variables_of
from unsloth_ddp.data.sources.formats import Example
from unsloth_ddp.data.template_values import COLUMN

# Rows may all give their templates other values, such as tools.
MOST_RENDERERS = 100


class Renderers:
    """Choose the renderer of a row."""

    def __init__(self, tokenizer: Any, day: date, options: dict[str, Any]) -> None:
        """Prepare the renderers of the tokenizer's templates.

        Args:
            day: the date that templates print.
            options: of ChatRenderer.
        """
        self._tokenizer = tokenizer
        self._day = day
        self._options = options
        without_tools = self._renderer(with_tools=False)
        named = isinstance(tokenizer.chat_template, dict)
        self._by_tools = without_tools, self._renderer(with_tools=True) if named else without_tools
        self._with_values: dict[str, ChatRenderer] = {}

    @property
    def plain(self) -> ChatRenderer | None:
        """Return the renderer of rows without tools; None if the tokenizer has no template for them."""
        return self._by_tools[0]

    def of(self, example: Example) -> ChatRenderer | None:
        """Return the renderer of a row; None if the tokenizer has no template for it."""
        renderer, values = self._by_tools[bool(example.tools)], example.template_values
        if renderer is None or not values:
            return renderer
        key = json.dumps([bool(example.tools), values], sort_keys=True)
        if key not in self._with_values:
            if len(self._with_values) >= MOST_RENDERERS:
                self._with_values.clear()
            self._with_values[key] = self._renderer_with(renderer.pair.with_values(values))
        return self._with_values[key]

    def unread_values(self, example: Example) -> tuple[str, ...]:
        """Return the names of the values that a row gives to its template and the template does not read."""
        renderer = self._by_tools[bool(example.tools)]
        read = (
            variables_of(renderer.pair.template.source) | {"documents"}
            if renderer and example.template_values
            else set()
        )
        return tuple(f"{COLUMN}.{name[:100]}" for name in sorted(example.template_values.keys() - read))

    def _renderer(self, *, with_tools: bool) -> ChatRenderer | None:
        pair = template_pair(self._tokenizer, self._day, with_tools=with_tools)
        return self._renderer_with(pair) if pair else None

    def _renderer_with(self, pair: TemplatePair) -> ChatRenderer:
        return ChatRenderer(pair, self._tokenizer.eos_token, **self._options)
