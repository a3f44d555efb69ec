"""Edit a trainer's arguments: batch size, gradient accumulation and the settings that DDP needs."""

import re

import libcst as cst

from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.arguments import (
    add_splat,
    code,
    keyword,
    names_arguments,
    remove_keyword,
    set_keyword,
    splats,
    take_comment,
    with_value,
)
from unsloth_ddp.notebook.syntax.tree import dotted, full_path

CONFIG_NAME = re.compile(
    r"^(\w*TrainingArguments|\w*(SFT|GRPO|DPO|KTO|ORPO|CPO|BCO|GKD|RLOO|PPO|PRM|XPO|NashMD|Reward|GSPO|GOLD)Config"
    r"|SFTScriptArguments)$"
)
# A batch of one has nothing to contrast with: in-batch negatives, and KTO's mismatched pairs.
_CONTRASTIVE = re.compile(r"SentenceTransformer|SparseEncoder|KTO")
_GENERATES = re.compile(r"GRPO|RLOO|GSPO")
_BATCH, _STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"


def is_config_call(call: cst.Call, context: ConversionContext) -> bool:
    """Return whether a call makes a trainer's arguments."""
    path = dotted(call.func)
    return bool(CONFIG_NAME.match(path.split(".")[-1])) or path in context.config_classes


def _is_contrastive(family: str, context: ConversionContext) -> bool:
    """Return whether a loss takes several rows of a batch together, by what the notebook shows or by its trainer."""
    return bool(context.batch_term) or (bool(_CONTRASTIVE.search(family)) and not context.by_row)


def edit_config(call: cst.Call, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return the call with the arguments that DDP needs, and the comments for the script."""
    path = dotted(call.func)
    kind = path.split(".")[-1]
    family = " ".join({kind, *context.trainers_of_config.get(path, ())})
    contrastive, generates = _is_contrastive(family, context), bool(_GENERATES.search(family))
    keywords = {arg.keyword.value for arg in call.args if arg.keyword is not None}
    notes: list[str] = []
    if context.options.tensorboard and not splats(call):
        call = set_keyword(call, "report_to", '"tensorboard"')
        notes.append(context.edit("report", "report_to set to tensorboard (--tensorboard)"))
    shared: cst.Call | None = call
    if splats(call) or _BATCH in keywords or not keywords & {"batch_size", "mini_batch_size"}:
        shared = None if splats(call) else _edit_batch(call, path, contrastive, generates, context, notes)
        if contrastive:
            notes.append(context.warn("contrastive", f"{whole_batch(context)}: several processes change the loss"))
    else:
        whole = "every process takes a whole batch_size: divide it by the number of processes"
        notes.append(context.warn("sizing", whole))
    call = call if shared is None else shared
    settings = {"average_tokens_across_devices": "True"}
    settings |= {} if context.search is None else {"ddp_find_unused_parameters": "False"}
    for name, value in settings.items():
        old = keyword(call, name)
        call = remove_keyword(call, name)
        if old is not None and code(old.value) != value:
            notes.append(context.edit("arguments", f"{name} was {code(old.value)}"))
    if keyword(call, "auto_find_batch_size") is not None:
        changes = "auto_find_batch_size changes the batch, which then no longer matches the plan"
        notes.append(context.warn("sizing", changes))
    if generates and (keyword(call, "steps_per_generation") or keyword(call, "generation_batch_size")):
        by_hand = "generations are sized by hand; check them against the number of processes"
        notes.append(context.warn("sizing", by_hand))
    if shared is None:
        call, note = _configured(call, contrastive, context)
        return call, [*notes, note]
    notes.append(context.edit("arguments", f"count every token alike on all processes; {_search(call, context)}"))
    return add_splat(call, f"{context.names['ddp_settings']}({path}{searches(context)})"), notes


def searches(context: ConversionContext) -> str:
    """Return the argument by which `ddp_settings` leaves the search for unused weights to Transformers, or ""."""
    return ", search=None" if context.search is None else ""


def _search(call: cst.Call, context: ConversionContext) -> str:
    """Return what decides whether DDP searches for unused weights."""
    if context.search is not None:
        return f"no search for unused weights, since {context.search}"
    by = "Transformers" if keyword(call, "ddp_find_unused_parameters") is None else "the notebook"
    return f"{by} decides whether to search for unused weights"


def edit_trainer(call: cst.Call, full: str, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return a trainer's call with what DDP needs set on arguments that come from elsewhere: a parser, a file."""
    argument = keyword(call, "args") or next((arg for arg in call.args if names_arguments(arg)), None)
    if argument is None or not isinstance(argument.value, cst.Name | cst.Attribute):
        return call, []
    if dotted(argument.value).split(".")[-1] in context.known_arguments or code(argument.value) == "None":
        return call, []
    configured, note = _configured(argument.value, _is_contrastive(dotted(call.func), context), context)
    return with_value(call, argument, configured), [note]


def _configured(arguments: cst.BaseExpression, contrastive: bool, context: ConversionContext) -> tuple[cst.Call, str]:
    """Return a trainer's arguments with what DDP needs set on them when the script runs."""
    size = None if contrastive else context.rows_at_once
    shown = isinstance(arguments, cst.Call) and not splats(arguments)
    tensorboard = ', report_to=["tensorboard"]' if context.options.tensorboard and not shown else ""
    at_least = ", least=2" if contrastive else ""
    source = f"{context.names['ddp_configured']}(_, {size}{searches(context)}{at_least}{tensorboard})"
    call = cst.ensure_type(cst.parse_expression(source), cst.Call)
    note = "batch and DDP settings are set when it runs: the notebook does not show all of its numbers"
    return with_value(call, call.args[0], arguments), context.edit("arguments", note)


def _edit_batch(
    call: cst.Call, path: str, contrastive: bool, generates: bool, context: ConversionContext, notes: list[str]
) -> cst.Call | None:
    """Return the call with the batch shared among the processes; None where only the run knows the batch."""
    batch = _value(call, _BATCH, path, 8, context)
    steps = _value(call, _STEPS, path, 1, context)
    group = _value(call, "num_generations", path, 8, context) if generates else "1"
    if batch is None or steps is None or group is None:
        return None
    if context.processes > 1:  # the notebook's launcher gave each of them such a batch
        steps = _product(str(context.processes), steps)
    whole = _product(batch, steps)
    names = context.names
    multiple = raised = ""
    if generates:
        if not (batch.isdigit() and steps.isdigit() and group.isdigit()):
            return None
        if int(batch) * int(steps) % int(group):
            whole = _product(group, steps)
            raised = f" (Unsloth raises a batch of {batch} to num_generations)"
        multiple = f", multiple={group}"
    size = None if contrastive else context.rows_at_once
    at_least = ", least=2" if contrastive else ""
    notebook_batch = f"{names['batch_per_process']}({batch}, {steps}{at_least})"
    per_device = notebook_batch if size is None else str(size)
    if size is not None and batch != str(size):
        for name, was in ((_BATCH, batch), (_STEPS, steps)):
            call, comment = take_comment(call, name)
            notes += [context.edit("batch", f"was {name} = {was}, {comment}")] if comment else []
    call = set_keyword(call, _STEPS, f"{names['accumulation_steps']}({whole}, {per_device}{multiple})")
    call = set_keyword(call, _BATCH, per_device)
    product = whole if len(whole) < 40 else "of the notebook"
    how = ""
    if size == 1 and batch != "1":
        keep = batch if batch.isdigit() else "as the notebook"
        how = f", one row at a time (--per-device-batch-size keep: {keep}, the same and faster)"
    notes.append(context.edit("batch", f"share the global batch {product} among the processes{how}{raised}"))
    return call


def whole_batch(context: ConversionContext) -> str:
    """Return what happens to a loss that takes the rows of a batch together."""
    what = f"({context.batch_term}) " if context.batch_term else ""
    return f"the loss {what}takes the rows of a batch together, and each process has its share of them only"


def _value(call: cst.Call, name: str, path: str, default: int, context: ConversionContext) -> str | None:
    """Return the source of an argument's value, or Transformers' default; None where the class may have another."""
    argument = keyword(call, name)
    if argument is not None and code(argument.value) != "None":
        return code(argument.value)
    library = full_path(path, context.imports).split(".")[0]
    inherits = not context.unsloth and library in ("transformers", "trl", "sentence_transformers")
    return str(default) if inherits else None


def _product(first: str, second: str) -> str:
    if second == "1":
        return first
    return " * ".join(
        text if re.fullmatch(r"[\w.]+(\(.*\))?", text, re.DOTALL) else f"({text})" for text in (first, second)
    )
