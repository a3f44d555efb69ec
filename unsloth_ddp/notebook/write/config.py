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
    other = _BATCH not in keywords and bool(keywords & {"batch_size", "mini_batch_size"})
    unknown = _BATCH not in keywords and not other and not _is_of_transformers(path, context)
    if splats(call) or unknown:
        return _edit_splatted(call, contrastive, context, notes)
    if other:
        whole = "every process takes a whole batch_size: divide it by the number of processes"
        notes.append(context.warn("sizing", whole))
    else:
        call = _edit_batch(call, path, contrastive, generates, context, notes)
    settings = {"average_tokens_across_devices": "True"}
    settings |= {} if context.search is None else {"ddp_find_unused_parameters": "False"}
    for name, value in settings.items():
        old = keyword(call, name)
        call = remove_keyword(call, name)
        if old is not None and code(old.value) != value:
            notes.append(context.edit("arguments", f"{name} was {code(old.value)}"))
    call = add_splat(call, f"{context.names['ddp_settings']}({path}{searches(context)})")
    notes.append(context.edit("arguments", f"count every token alike on all processes; {_search(call, context)}"))
    if keyword(call, "auto_find_batch_size") is not None:
        changes = "auto_find_batch_size changes the batch, which then no longer matches the plan"
        notes.append(context.warn("sizing", changes))
    if generates and (keyword(call, "steps_per_generation") or keyword(call, "generation_batch_size")):
        by_hand = "generations are sized by hand; check them against the number of processes"
        notes.append(context.warn("sizing", by_hand))
    return call, notes


def searches(context: ConversionContext) -> str:
    """Return the argument by which `ddp_settings` leaves the search for unused weights to Transformers, or ""."""
    return ", search=None" if context.search is None else ""


def _search(call: cst.Call, context: ConversionContext) -> str:
    """Return what decides whether DDP searches for unused weights."""
    if context.search is not None:
        return f"no search for unused weights, since {context.search}"
    by = "Transformers" if keyword(call, "ddp_find_unused_parameters") is None else "the notebook"
    return f"{by} decides whether to search for unused weights"


# Whose arguments have the batch, the accumulation and the settings of DDP under the names of Transformers.
_FAMILY = ("transformers", "trl", "unsloth", "sentence_transformers")


def _is_of_transformers(path: str, context: ConversionContext) -> bool:
    """Return whether a class of arguments is one of Transformers' family, or not known to be another library's."""
    root = path.split(".")[0]
    return root not in context.imports or context.imports[root].split(".")[0] in _FAMILY


def edit_trainer(call: cst.Call, full: str, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return a trainer's call whose arguments come from elsewhere (a parser, a file) with what DDP needs set on them."""
    argument = keyword(call, "args") or next((arg for arg in call.args if names_arguments(arg)), None)
    if argument is None or not isinstance(argument.value, cst.Name | cst.Attribute):
        return call, []
    if dotted(argument.value).split(".")[-1] in context.known_arguments or code(argument.value) == "None":
        return call, []
    size = "None" if _is_contrastive(dotted(call.func), context) else str(context.rows_at_once)
    note = context.edit("arguments", "the arguments come from elsewhere: batch and DDP settings are set when it runs")
    configured = cst.parse_expression(
        f"{context.names['ddp_configured']}({code(argument.value)}, {size}{searches(context)})"
    )
    return with_value(call, argument, configured), [note]


def _edit_batch(
    call: cst.Call, path: str, contrastive: bool, generates: bool, context: ConversionContext, notes: list[str]
) -> cst.Call:
    batch = _value(call, _BATCH, path, 8, context)
    steps = _value(call, _STEPS, path, 1, context)
    if context.processes > 1:  # the notebook's launcher gave each of them such a batch
        steps = _product(str(context.processes), steps)
    whole = _product(batch, steps)
    names = context.names
    multiple = raised = ""
    if generates:
        group = _value(call, "num_generations", path, 8, context)
        numbers = [_integer(text) for text in (batch, steps, group)]
        if None in numbers:
            whole = f"{names['generation_batch']}({batch}, {steps}, {group})"
        elif numbers[0] * numbers[1] % numbers[2]:  # type: ignore[operator]
            whole = _product(group, steps)
            raised = f" (Unsloth raises a batch of {batch} to num_generations)"
        multiple = f", multiple={group}"
    size = None if contrastive else context.rows_at_once
    minimum = ", least=2" if contrastive else ""
    notebook_batch = f"{names['batch_per_process']}({batch}, {steps}{minimum})"
    per_device = notebook_batch if size is None else str(size)
    if size is not None and batch != str(size):
        for name, was in ((_BATCH, batch), (_STEPS, steps)):
            call, comment = take_comment(call, name)
            notes += [context.edit("batch", f"was {name} = {was}, {comment}")] if comment else []
    call = set_keyword(call, _STEPS, f"{names['accumulation_steps']}({whole}, {per_device}{multiple})")
    call = set_keyword(call, _BATCH, per_device)
    product = whole if len(whole) < 40 else "of the notebook"
    how = ""
    if size == 1 and (_integer(batch) or 2) > 1:
        keep = batch if batch.isdigit() else "as the notebook"
        how = f", one row at a time (--per-device-batch-size keep: {keep}, the same and faster)"
    notes.append(context.edit("batch", f"share the global batch {product} among the processes{how}{raised}"))
    if contrastive:
        notes.append(context.warn("contrastive", f"{whole_batch(context)}: several processes change the loss"))
    return call


def whole_batch(context: ConversionContext) -> str:
    """Return what happens to a loss that takes the rows of a batch together."""
    what = f"({context.batch_term}) " if context.batch_term else ""
    return f"the loss {what}takes the rows of a batch together, and each process has its share of them only"


def _value(call: cst.Call, name: str, path: str, otherwise: int, context: ConversionContext) -> str:
    """Return the source of an argument's value, or of a look-up of the config's default where it is not given."""
    argument = keyword(call, name)
    if argument is None or code(argument.value) == "None":
        if not context.unsloth and full_path(path, context.imports).split(".")[0] in ("transformers", "trl"):
            return str(otherwise)
        return f'{context.names["default_of"]}({path}, "{name}", {otherwise})'
    return code(argument.value)


def _product(first: str, second: str) -> str:
    if second == "1":
        return first
    return " * ".join(
        text if re.fullmatch(r"[\w.]+(\(.*\))?", text, re.DOTALL) else f"({text})" for text in (first, second)
    )


def _integer(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _edit_splatted(
    call: cst.Call, contrastive: bool, context: ConversionContext, notes: list[str]
) -> tuple[cst.Call, list[str]]:
    """Complete arguments from a dict when the script runs: they are known only then."""
    size = None if contrastive else context.rows_at_once
    rest = [arg for arg in call.args if arg.star == "" and arg.keyword is None]
    named = [arg for arg in call.args if arg not in rest]
    source = code(cst.Call(func=cst.Name("dict"), args=named))
    if context.options.tensorboard:
        source = f'{{**{source}, "report_to": "tensorboard"}}'
    completed = f"{context.names['ddp_arguments']}({code(call.func)}, {size}, {source}{searches(context)})"
    splat = cst.Arg(value=cst.parse_expression(completed), star="**")
    notes.append(
        context.edit("batch", "arguments from a dict: batch, accumulation and DDP settings are set when it runs")
    )
    return call.with_changes(args=[*rest, splat]), notes
