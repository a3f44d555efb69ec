"""Read the images that a row names, and put them into their places in its messages. Pure functions of plain values.

An image is a path, or a data URI for bytes that come with the row. It stands in a message as a content part, as the
marker <image> in a text beside a column of images, or before the first user message if no place is named. In an answer
the marker is text.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from typing import Any

from unsloth_ddp.data.sources.values import as_list, is_empty, is_missing, kind_of, quoted
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.units import counted

# The marker of LLaVA and LLaMA-Factory.
MARKER = "<image>"
DATA = "data:"
COLUMNS = ("images", "image")
# Types of content parts, and the keys that may hold their image.
PART_TYPES = ("image", "image_url", "input_image")
PART_KEYS = ("image", "image_url", "url", "path", "bytes", "base64", "data", "source")
ADDRESS = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*://", re.IGNORECASE)
# More characters cannot name a file.
LONGEST_NAME, LONGEST_PATH = 255, 4095


class JoinedText(str):
    """The text of several content parts, which it keeps for templates that read a list of them.

    An image among the parts is None; `images` has one item for each: its value, or its number in the row's column,
    which is None if it is the next one.
    """

    parts: list[str | None]
    images: list[str | int | None]

    def __new__(cls, parts: list[str | None], images: Sequence[str | int | None] = ()) -> JoinedText:
        """Join the parts."""
        joined = super().__new__(cls, "".join(part for part in parts if part is not None))
        joined.parts = parts
        joined.images = list(images)
        return joined


def is_web_address(value: str) -> bool:
    """Return whether an image is to be downloaded."""
    return value[:8].lower().startswith(("http://", "https://"))


def without_query(address: str) -> str:
    """Return an address to be printed, without what may hold a signature."""
    return address.partition("?")[0][:200]


def is_image_part(part: Any) -> bool:
    """Return whether a content part is an image."""
    return isinstance(part, dict) and (part.get("type") in PART_TYPES or ("type" not in part and "image" in part))


def image_of_part(part: dict[str, Any]) -> str | int | None:
    """Return the image of a content part; if the part only marks its place, its number in the row's column, or None.

    Raises:
        UserError: it names two images, or something that is no image.
    """
    named = {key: part[key] for key in PART_KEYS if not is_missing(part.get(key)) and not is_empty(part[key])}
    if len(named) > 1 and "bytes" not in named:
        raise UserError(f"an image part has {' and '.join(named)}; keep one of them.")
    if not named:
        # Tables of pandas hold whole numbers as floating point.
        index = part.get("index")
        if is_missing(index):
            return None
        if isinstance(index, int | float) and float(index).is_integer():
            return int(index)
        raise UserError(f"the index of an image part is {quoted(index)}, not a number; number the parts from 0.")
    key = "bytes" if "bytes" in named else next(iter(named))
    return _of_key(key, named[key])


def image_value(value: Any) -> str:
    """Return an image as a path, an http(s) address or a data URI.

    Accepted are a path, an address, bytes, a data URI, a PIL image, and objects that hold one of these: Datasets'
    {"bytes", "path"}, OpenAI's {"url"}, Anthropic's {"type": "base64", "data"}.

    Raises:
        UserError: it is none of these.
    """
    if isinstance(value, (bytes, bytearray)):
        return _data_uri(bytes(value))
    if hasattr(value, "save") and hasattr(value, "convert"):
        written = io.BytesIO()
        value.save(written, "PNG")
        return _data_uri(written.getvalue())
    if isinstance(value, dict):
        return _of_object(value)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"an image is {quoted(value)}, not a path or bytes; give one of them, or remove the row.")
    if is_web_address(value):
        return value
    if ADDRESS.match(value):
        raise UserError(
            f"the image {without_query(value)} is an address of another kind than http(s); download it and give its "
            "path."
        )
    if value[: len(DATA)].lower() == DATA:
        return _from_base64(value.partition(",")[2])
    # A slash is a digit of base64 too.
    if len(value) > LONGEST_PATH or max(map(len, value.split("/"))) > LONGEST_NAME:
        raise UserError(
            f"the image {value[:40]}... of {len(value):,} characters is no path; put {DATA}image/png;base64, before "
            "base64."
        )
    return value.removeprefix("file://")


def _of_key(key: str, value: Any) -> str:
    """Return the image under a key of a part or an object; bytes are base64 in JSON, or a data URI."""
    in_base64 = key in ("bytes", "base64", "data") and isinstance(value, str) and not value.lower().startswith(DATA)
    return _from_base64(value) if in_base64 else image_value(value)


def _of_object(value: dict[str, Any]) -> str:
    if value.get("type") == "base64" and "data" in value:
        return _from_base64(value["data"])
    for key in ("bytes", "url", "path"):
        if not is_missing(value.get(key)) and not is_empty(value[key]):
            return _of_key(key, value[key])
    raise UserError(f"an image is an object with {', '.join(map(str, value))[:100]}; it needs bytes, or a path.")


def _data_uri(content: bytes) -> str:
    return f"{DATA};base64," + base64.b64encode(content).decode()


def _from_base64(text: Any) -> str:
    try:
        return _data_uri(base64.b64decode("".join(text.split()), validate=True))
    except (ValueError, AttributeError):
        raise UserError("an image in base64 cannot be decoded; write it again, or give a path.") from None


def images_of_row(row: dict[str, Any]) -> list[str] | None:
    """Return the images in the columns of a row; None if it has no such column.

    Raises:
        UserError: both columns have images, or one is no list of images.
    """
    if not any(name in row for name in COLUMNS):
        return None
    filled = [name for name in COLUMNS if not is_missing(row.get(name)) and not is_empty(row[name])]
    if len(filled) > 1:
        raise UserError("the row has images and image; keep one of these columns.")
    if not filled:
        return []
    name, value = filled[0], row[filled[0]]
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = as_list(value, name)
    if isinstance(value, (str, bytes, dict)) or hasattr(value, "convert"):
        value = [value]
    if not isinstance(value, list):
        raise UserError(f"{name} is {kind_of(value)}, not an image or a list of images.")
    return [image_value(image) for image in value]


def take_images(message: dict[str, Any]) -> None:
    """Move the images beside the content of a message (Ollama's form) into it, at its markers or before its text.

    Raises:
        UserError: see images_of_row and place_images.
    """
    images = images_of_row(message)
    for name in COLUMNS:
        message.pop(name, None)
    if images:
        alone = {**message, "role": "user"}
        shown = iter(place_images([alone], images))
        message["content"] = JoinedText(alone["content"].parts, list(shown))


def place_images(messages: list[dict[str, Any]], column: list[str] | None) -> list[str]:
    """Return the images of a row in the order of their places; contents that hold some become JoinedText.

    Args:
        column: the images of the row's columns, None without such a column.

    Raises:
        UserError: there are more or fewer places than images.
    """
    inline = [image for message in messages for image in _images_in(message)]
    numbers = [image for image in inline if not isinstance(image, str)]
    places, images_of_column = len(numbers), column or []
    marked = sum(message["content"].count(MARKER) for message in messages if may_hold_markers(message))
    if inline and marked == len(inline):
        raise UserError(
            f"the row has {counted(marked, 'image part')} and as often {MARKER} in its texts; keep one of the two."
        )
    if inline and not places and images_of_column:
        raise UserError(
            "the content parts name their images, and the row has a column of images too; keep one of them."
        )
    if not inline:
        if images_of_column and not marked:
            return _before_first_question(messages, images_of_column)
        places = marked if column is not None else 0
    if places != len(images_of_column):
        where = "image parts in its messages" if inline else f"{MARKER} outside its answers"
        raise UserError(
            f"the row has {counted(len(images_of_column), 'image')} for {counted(places, 'place')} "
            f"({where}); give as many images "
            "as places, in image parts or the column images."
        )
    if not inline and places:
        for message in filter(may_hold_markers, messages):
            _split_at_markers(message)
    images = [image for message in messages for image in _images_in(message)]
    order: list[Any] = list(range(len(images_of_column))) if None in numbers or not inline else numbers
    if sorted(order) != list(range(len(images_of_column))):
        raise UserError(
            f"the image parts have the index {order[:20]} for {counted(len(images_of_column), 'image')}; "
            f"number them from 0."
        )
    following = iter(order)
    return [image if isinstance(image, str) else images_of_column[next(following)] for image in images]


def may_hold_markers(message: dict[str, Any]) -> bool:
    """Return whether the marker stands for an image in a message: in an answer it is text, such as a tag of XML."""
    return isinstance(message["content"], str) and message["role"] != "assistant"


def _images_in(message: dict[str, Any]) -> list[str | int | None]:
    return getattr(message["content"], "images", [])


def _before_first_question(messages: list[dict[str, Any]], images: list[str]) -> list[str]:
    first = next((message for message in messages if message["role"] == "user"), None)
    if first is None:
        raise UserError("the row has images and no user message to show them in; add one or remove the row.")
    content = first["content"]
    texts = list(content.parts) if isinstance(content, JoinedText) else [content]
    first["content"] = JoinedText([*[None] * len(images), *texts], [None] * len(images))
    return images


def _split_at_markers(message: dict[str, Any]) -> None:
    content = message["content"]
    if MARKER not in content:
        return
    parts: list[str | None] = []
    for number, text in enumerate(content.split(MARKER)):
        parts += [None] if number else []
        parts += [text] if text else []
    message["content"] = JoinedText(parts, [None] * parts.count(None))
