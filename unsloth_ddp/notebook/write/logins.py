"""Replace logins that ask: a launched script has nobody who could answer, and a widget ends it."""

from __future__ import annotations

import re

import libcst as cst

from unsloth_ddp.notebook.context import ConversionContext

_HUB = re.compile(r"^huggingface_hub\.(\w+\.)*(notebook_login|login|interpreter_login)$")


def edit_login(call: cst.Call, full: str, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return a login that takes the token it finds and never asks.

    Args:
        full: the callee's path with imports resolved.
    """
    if _HUB.match(full):
        note = context.edit("login", "logs in with the token given or found; never asks for one")
        return call.with_changes(func=cst.Name(context.names["hub_login"])), [note]
    if full == "wandb.login":
        note = context.edit("login", "logs in with the key given or found; never asks for one")
        return call.with_changes(func=cst.Name(context.names["wandb_login"])), [note]
    return call, []
