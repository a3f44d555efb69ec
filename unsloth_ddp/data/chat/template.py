"""Choose and render chat templates.

A tokenizer may hold one template or named variants of it. TRL keeps a training variant of common templates, which marks
what the assistant writes; some of these variants also render a chat differently from the tokenizer's own template.
"""

import contextlib
import copy
import functools
import itertools
import json
import re
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, Self

from jinja2 import Environment, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Template, TemplateData
from jinja2.sandbox import ImmutableSandboxedEnvironment

from unsloth_ddp.data.chat.render_limits import TemplateOverrun, check_length, limited_rendering, overrun_sentence
from unsloth_ddp.data.sources.messages import Message
from unsloth_ddp.utils.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"
# --chat_template training: TRL's training variant of the tokenizer's template.
TRAINING = "training"

# Tags of Transformers' own extension, which plain Jinja does not know.
GENERATION_TAGS = re.compile(r"{%[-+]?\s*(end)?generation\s*[-+]?%}")

# What Transformers gives to every template.
GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}

# A template as the value of a key in YAML, or of a variable in code.
ASSIGNED = re.compile(r"\s*\w*template\w*\s*[:=]", re.IGNORECASE)

# Markup that a template looks for in texts has at least and at most so many characters; longer constants are prose.
LEAST_MARKUP, MOST_MARKUP = 3, 60

# Matches a tag that is cut off at the end of a text.
BEGUN_TAG = re.compile(r"[<\[][^<>\[\]\s]*\Z")

# (first, last + 1) character of a part of the rendered chat.
Span = tuple[int, int]


def read_chat_template(name: str) -> str | dict[str, str]:
    """Read the template of a Jinja file, or one of the kit's own by name.

    A JSON file (chat_template.json, tokenizer_config.json) has it as text, or several by name.

    Raises:
        UserError: there is no such file or name, or it cannot be read.
    """
    shipped = {path.stem: path for path in TEMPLATES.glob("*.jinja")}
    try:
        path = shipped.get(name) or Path(name).expanduser()
        if not path.is_file():
            raise UserError(
                f"chat_template {name[:200]}: there is no such file; give a Jinja file, "
                f"{' or '.join(sorted(shipped))}, "
                f"or {TRAINING} (TRL's variant of the tokenizer's template)."
            )
        return _template_in(path.read_text(encoding="utf-8"), name)
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise UserError(f"chat_template {name[:200]} cannot be read: {cause}; give a Jinja file in UTF-8.") from None


def _template_in(text: str, name: str) -> str | dict[str, str]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return text
    content = content.get("chat_template") if isinstance(content, dict) else content
    if isinstance(content, list) and all(
        isinstance(variant, dict) and {"name", "template"} <= variant.keys() for variant in content
    ):
        content = {str(variant["name"]): str(variant["template"]) for variant in content}
    if isinstance(content, str) or (isinstance(content, dict) and content):
        return content
    raise UserError(f"chat_template {name[:200]} is JSON without a chat_template; give a Jinja file.")


def parsed(source: str) -> Template:
    """Return the syntax tree of a template.

    Raises:
        TemplateSyntaxError: it is not valid Jinja.
    """
    return Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True).parse(GENERATION_TAGS.sub("", source))


def variables_of(template: str | dict[str, str] | None) -> frozenset[str]:
    """Return the names that a chat template reads beside the row and the tokenizer's special tokens."""
    names: set[str] = set()
    for source in template.values() if isinstance(template, dict) else [template or ""]:
        with contextlib.suppress(TemplateSyntaxError, RecursionError):
            names |= find_undeclared_variables(parsed(source))
    return frozenset(name for name in names - GIVEN if not name.endswith("_token"))


def check_chat_template(option: str | None) -> None:
    """Refuse a --chat_template that cannot be read or is not Jinja, before rows and model are read."""
    if option in (None, TRAINING):
        return
    template = read_chat_template(str(option))
    for source in template.values() if isinstance(template, dict) else [template]:
        try:
            # What is nested too deeply for the parser is refused when the first row is rendered.
            with contextlib.suppress(RecursionError):
                _check_alone(source, parsed(source))
        except TemplateSyntaxError as error:
            cause = f"{error.message or 'syntax error'} (line {error.lineno})".replace("\n", " ")
            raise UserError(f"chat_template {str(option)[:200]} is not valid Jinja: {cause}; fix the file.") from None
        except ValueError as error:
            raise UserError(
                f"chat_template {str(option)[:200]} {error}; give a file with the template alone."
            ) from None


def _check_alone(source: str, tree: Template) -> None:
    """Find a file that is valid Jinja and no chat template, or that has more around one.

    Raises:
        ValueError: with the reason.
    """
    if "messages" not in find_undeclared_variables(tree):
        raise ValueError("does not read messages")
    if assigned := ASSIGNED.match(source):
        raise ValueError(f"begins with {assigned[0].strip()!r}")
    texts = [text.data for text in tree.find_all(TemplateData)]
    if "\n" not in source.strip() and any("\\n" in text for text in texts):
        raise ValueError(r"is escaped as in JSON: it has \n in place of line ends")
    chat = [{"role": role, "content": f"Zq{role}qZ"} for role in ("user", "assistant")]
    names = {"messages": chat, "bos_token": "", "eos_token": "", "strftime_now": datetime.now().strftime}
    try:
        with limited_rendering():
            template = ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
            ).from_string(GENERATION_TAGS.sub("", source))
            whole, prompted = (template.render(**names, add_generation_prompt=prompt) for prompt in (False, True))
    except (Exception, TemplateOverrun):
        # A template for other messages, or one that needs more: rows show what it does.
        return
    begun, ended = _common(whole, prompted), _common(whole[::-1], prompted[::-1])
    if begun < len(whole) <= begun + ended and (behind := whole[-ended:].strip()):
        raise ValueError(f"writes {behind[:40]!r} behind the generation prompt")


def _common(text: str, other: str) -> int:
    """Return how many characters two texts have in common at their begin."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))


def set_chat_template(tokenizer: Any, option: str | None) -> None:
    """Set the tokenizer's template to the one that --chat_template names; without the option it keeps its own."""
    if option not in (None, TRAINING):
        tokenizer.chat_template = read_chat_template(str(option))


def use_template_of_processor(tokenizer: Any, processor: Any, option: str | None) -> None:
    """Set the tokenizer's template to the processor's, with places for images, unless --chat_template names one."""
    if option in (None, TRAINING) and getattr(processor, "chat_template", None):
        tokenizer.chat_template = processor.chat_template


def prints_date(template: str | dict[str, str] | None) -> bool:
    """Return whether a chat template, or a variant of it, prints the date of the day on which it is rendered."""
    variants = template.values() if isinstance(template, dict) else [template or ""]
    return any("strftime_now" in variant for variant in variants)


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A Jinja template with the values that it is rendered with.

    Args:
        source: the Jinja text.
        marked: whether the template marks what the assistant writes with {% generation %}.
        special_tokens: the tokenizer's, by name.
        day: the date that `strftime_now` gives, which is the same for all rows of a run.
    """

    source: str
    marked: bool
    special_tokens: dict[str, Any]
    day: date

    def render(self, messages: list[Message], tools: list[Any] | None, *, prompt: bool = False) -> str:
        """Render a chat; with `prompt`, add the generation prompt."""
        text = self._render(messages, tools, prompt)[0]
        return text if prompt else text.removesuffix(self.unasked_prompt)

    def render_marked(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[Span]]:
        """Render a chat, and return also the spans that the template marks."""
        # Not apply_chat_template, which returns a token mask that is wrong if a span begins with trimmed white space.
        text, spans = self._render(messages, tools, False, marked=True)
        return text.removesuffix(self.unasked_prompt), spans

    @functools.cached_property
    def unasked_prompt(self) -> str:
        """The generation prompt that the template writes behind every chat, as that of Command R7B does; "" if none.

        Trained as a part of the answer, it would be what the model writes and stops at.
        """
        turns: list[Message] = [{"role": role, "content": "Yes."} for role in ("user", "assistant", "user")]
        try:
            question, chat, followed = (self._render(turns[:count], None, False)[0] for count in (1, 2, 3))
            prompted = self._render(turns[:1], None, True)[0]
        except Exception:
            return ""
        end = _common(chat, followed)
        end = begun.start() if (begun := BEGUN_TAG.search(chat, 0, end)) else end
        if prompted != question or not question.endswith(chat[end:]) or not chat[end:].strip():
            return ""
        # What begins a chat begins turns, so it is a part of the prompt where it stands behind the answer.
        begin = chat.removeprefix(str(self.special_tokens.get("bos_token", ""))).lstrip()
        behind = chat[chat.rfind("Yes.", 0, end) + len("Yes.") : end]
        prompt = next(behind[n:] for n in range(len(behind) + 1) if begin.startswith(behind[n:])) + chat[end:]
        # An answer goes on where the prompt stood, or within it; what only ends chats, such as EOS, is no prompt.
        answer = chat.removeprefix(question.removesuffix(prompt))
        agreed = BEGUN_TAG.sub("", answer[: _common(answer, prompt)])
        return prompt if answer != chat and agreed.strip() else ""

    @functools.cached_property
    def _prints_text_bare(self) -> bool:
        def call(value: Any) -> str:
            function = {"name": "add", "arguments": {"a": value}}
            turn: Message = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "id": "Zq00000qZ", "function": function}],
            }
            return self.render([{"role": "user", "content": "Hi"}, turn], None)

        try:
            return call(731) == call("731")
        except Exception:
            return False

    def prints_bare(self) -> bool:
        """Return whether the template prints a text in a call's arguments without quotation marks, as a number."""
        return self._prints_text_bare

    def literals(self) -> set[str]:
        """Return the markup that the template looks for in texts, such as </think>."""
        return set(_literals(self.source))

    def _render(
        self, messages: list[Message], tools: list[Any] | None, prompt: bool, *, marked: bool = False
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        with limited_rendering():
            rendered: Any = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.source,
                add_generation_prompt=prompt,
                strftime_now=datetime.combine(self.day, time()).strftime,
                return_assistant_tokens_mask=marked,
                **self.special_tokens,
            )
        texts, spans = rendered
        return check_length(texts[0]), list(spans[0]) if spans else []


@functools.cache
def _literals(source: str) -> frozenset[str]:
    """Return the constants that a template tests with `in`, gives to a method or a filter, or names.

    Words and punctuation are left out, because they stand in every text.
    """
    from jinja2 import nodes

    try:
        tree = parsed(source)
    except (TemplateSyntaxError, RecursionError):
        return frozenset()
    tested: list[nodes.Node] = [node.expr for node in tree.find_all(nodes.Compare)]
    for call in tree.find_all((nodes.Call, nodes.Filter)):
        assert isinstance(call, (nodes.Call, nodes.Filter))
        tested += call.args
    tested += [node.node for node in tree.find_all(nodes.Assign)]
    texts = {node.value.strip() for node in tested if isinstance(node, nodes.Const) and isinstance(node.value, str)}
    return frozenset(t for t in texts if LEAST_MARKUP <= len(t) <= MOST_MARKUP and re.search(r"[^\w\s]", t))


@dataclass(frozen=True)
class TemplatePair:
    """The tokenizer's own template for a row, and TRL's training variant of it, if it has one and needs one."""

    template: ChatTemplate
    training: ChatTemplate | None

    def with_values(self, values: dict[str, Any]) -> Self:
        """Return the templates with values that they are rendered with beside the special tokens."""
        with_values = [
            template and replace(template, special_tokens=template.special_tokens | values)
            for template in (self.template, self.training)
        ]
        assert with_values[0] is not None
        return replace(self, template=with_values[0], training=with_values[1])


def template_pair(tokenizer: Any, day: date, *, with_tools: bool) -> TemplatePair | None:
    """Return the templates for rows with or without tools; None if the tokenizer has no template for them.

    Of named variants, take the one that apply_chat_template takes: tool_use for rows with tools if there is one, and
    default otherwise.

    Raises:
        UserError: the template is not valid Jinja, or exceeds a limit of time or memory.
    """
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    source = tokenizer.chat_template
    if isinstance(source, dict):
        source = source.get("tool_use", source.get("default")) if with_tools else source.get("default")
    if source is None:
        return None
    special_tokens = dict(tokenizer.special_tokens_map)
    try:
        template = ChatTemplate(source, has_generation_markers(source), special_tokens, day)
    except TemplateSyntaxError as error:
        raise UserError(f"the chat template is not valid Jinja ({error}); fix it.") from None
    if template.marked:
        return TemplatePair(template, None)
    one_variant = copy.copy(tokenizer)
    one_variant.chat_template = source
    try:
        # TRL renders test rows to examine the template.
        with limited_rendering():
            training = get_training_chat_template(one_variant)
    except TemplateOverrun as error:
        raise UserError(overrun_sentence(error)) from None
    except Exception:
        # TRL knows no training variant of this template, or cannot render its own test rows with it.
        training = None
    return TemplatePair(template, ChatTemplate(training, True, special_tokens, day) if training else None)
