"""Make text safe to print and to keep: hide secrets, and write out characters that a terminal would act on."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

HIDDEN = "[hidden]"
# Environment variables whose values are secrets, such as HF_TOKEN, WANDB_API_KEY and AWS_SECRET_ACCESS_KEY.
SECRET_VARIABLE = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY)$", re.IGNORECASE)
# Field names whose values are secrets; eos_token and similar names are not among them.
PASSWORD = r"(?:password|passwd|secret|api_?key|access_?key|private_?key)"
TOKEN = r"(?:hub_|auth_|access_|api_|bearer_|hf_|use_auth_)?token"
SECRET_FIELD = re.compile(rf"[\w-]*{PASSWORD}|{TOKEN}", re.IGNORECASE)
# Tokens that are recognised by their form.
SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|\bgh[opsur]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"  # GitHub, GitLab
    r"|\bsk-[A-Za-z0-9_-]{20,}|\bAIza[\w-]{35}|\bnpm_[A-Za-z0-9]{20,}"  # OpenAI and Anthropic, Google, npm
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bxox[a-z]-[\w-]{10,}"  # AWS, Slack
    r"|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    # User and password of an address; the password may hold an @. A long name without a password is a token.
    r"""|(?<=://)[^\s/@:"'<>]*:[^\s/"'<>]+(?=@)|(?<=://)[A-Za-z0-9_-]{20,}(?=@)"""
)
# Secrets that are recognised by the name before them. After "token=" or "bearer" ordinary words are common, so the
# value has to be long there and to hold a digit.
LONG_VALUE = r"(?=[\w.~+/=-]*\d)[\w.~+/=-]{16,}"
HEADER = r"\bauthorization[\"']?\s*[:=]\s*[\"']?(?:[a-z]+\s+)?"
NAMED = re.compile(
    rf"""({PASSWORD}(?:["']\s*:|\s*=)\s*["']?|["']{TOKEN}["']\s*:\s*["']?|[?&]{TOKEN}=)[^\s"',}}&]+"""
    rf"""|(\b{TOKEN}\s*=\s*["']?|\b(?:bearer|basic)\s+){LONG_VALUE}"""
    rf"""|({HEADER})(?=[\w.~+/=-]*\d)[\w.~+/=-]{{8,}}""",
    re.IGNORECASE,
)
# Shorter values ("1", "true") are no secrets, and hiding them would garble every text.
SHORTEST = 8
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\u202a-\u202e\u2066-\u2069]")


def hide(text: str, environ: Mapping[str, str] | None = None) -> str:
    """Return `text` without the values of secret environment variables and without what has the form of a secret."""
    for value in _secret_values(os.environ if environ is None else environ):
        text = text.replace(value, HIDDEN)
    return NAMED.sub(lambda match: (match[1] or match[2] or match[3]) + HIDDEN, SHAPES.sub(HIDDEN, text))


def printable(text: str) -> str:
    """Return `text` with control characters and unpaired surrogates written out (as \\x1b) and line ends as spaces."""
    return CONTROL.sub(lambda match: " " if match[0] in "\r\n\t" else repr(match[0])[1:-1], text)


def printable_lines(text: str) -> str:
    """Return `text` as printable does, with its line ends and tabs kept."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


def find_secret(name: str, value: Any, environ: Mapping[str, str] | None = None) -> str | None:
    """Return where an option's value holds a secret, as name.field; None if it holds none."""
    secrets = _secret_values(os.environ if environ is None else environ)
    for place, field, text in _texts(name, field="", value=value):
        named = SECRET_FIELD.fullmatch(field)
        if named or SHAPES.search(text) or NAMED.search(text) or any(secret in text for secret in secrets):
            return place
    return None


def _secret_values(environ: Mapping[str, str]) -> list[str]:
    """Return the values of the secret variables, the longest first, because one may hold another."""
    # Values only of names that are secret: os.environ decodes each value that is read.
    spellings = {spelling for name in environ if is_secret_name(name) for spelling in _spellings(environ.get(name, ""))}
    return sorted(spellings, key=len, reverse=True)


@functools.lru_cache(maxsize=1024)
def is_secret_name(name: str) -> bool:
    """Return whether the value of an environment variable of this name is a secret."""
    return SECRET_VARIABLE.search(name) is not None


@functools.lru_cache(maxsize=256)
def _spellings(value: str) -> tuple[str, ...]:
    """Return a secret as it is and as it stands in an address; nothing if it is too short."""
    value = value.strip()
    return (value, quote(value, safe="")) if len(value) >= SHORTEST else ()


def _texts(place: str, field: str, value: Any) -> Iterator[tuple[str, str, str]]:
    """Yield every text within a plain value, with its place and the name of the field that holds it."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(f"{place}.{name}", str(name), item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(place, field, item)
    elif isinstance(value, str) and value:
        yield place, field, value
