"""Text made safe to print and to keep: secrets hidden, one line, nothing that a terminal would act on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "[hidden]"
# Environment variables whose values are secrets, such as HF_TOKEN, WANDB_API_KEY and AWS_SECRET_ACCESS_KEY.
SECRET_VARIABLE = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY)$", re.IGNORECASE)
# Fields whose values are; eos_token and its kind are none.
SECRET_FIELD = (
    r"(?:[\w-]*(?:password|passwd|secret|api_?key|access_?key|private_?key)"
    r"|(?:hub_|auth_|access_|api_|bearer_|hf_|use_auth_)?token)"
)
# What a secret looks like wherever it stands: tokens of the Hub, GitHub and OpenAI, and an address with a password.
SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:ghp|gho|ghs)_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bsk-[A-Za-z0-9_-]{20,}"
    r"|(?<=://)[^\s/@:]*:[^\s/@]+(?=@)"
)
NAMED = re.compile(rf"""(["']{SECRET_FIELD}["']\s*:\s*["']?|[?&]{SECRET_FIELD}=)[^\s"',}}&]+""", re.IGNORECASE)
# A value as short as this ("1", "true") is no secret, and hiding it would garble every text.
SHORTEST = 8
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def hide(text: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` without the values of secret environment variables and without what looks like a secret."""
    for value in _secret_values(os.environ if environ is None else environ):
        text = text.replace(value, HIDDEN)
    return NAMED.sub(lambda match: match[1] + HIDDEN, SHAPES.sub(HIDDEN, text))


def printable(text: str) -> str:
    """`text` with every control character and half character written out (as \\x1b), line ends as spaces."""
    return CONTROL.sub(lambda match: " " if match[0] in "\r\n\t" else repr(match[0])[1:-1], text)


def find_secret(name: str, value: Any, environ: Mapping[str, str] | None = None) -> str | None:
    """Where in an option's value a secret stands, as name.field; None if nowhere."""
    known = list(_secret_values(os.environ if environ is None else environ))
    for place, field, text in _texts(name, field="", value=value):
        named = bool(field) and re.fullmatch(SECRET_FIELD, field, re.IGNORECASE)
        if named or SHAPES.search(text) or NAMED.search(text) or any(secret in text for secret in known):
            return place
    return None


def _secret_values(environ: Mapping[str, str]) -> Iterator[str]:
    for name, value in environ.items():
        if len(value.strip()) >= SHORTEST and SECRET_VARIABLE.search(name):
            yield value.strip()


def _texts(place: str, field: str, value: Any) -> Iterator[tuple[str, str, str]]:
    """Every text within a plain value, with the place and the name of the field that it stands in."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(f"{place}.{name}", str(name), item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(place, field, item)
    elif isinstance(value, str) and value:
        yield place, field, value
