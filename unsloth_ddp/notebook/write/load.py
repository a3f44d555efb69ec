"""Edit model loading and GPU numbers, so that every process uses its own device."""

import re

import libcst as cst

from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.arguments import code, keyword, remove_keyword, set_keyword, splats, with_value
from unsloth_ddp.notebook.syntax.effects import is_loader_call
from unsloth_ddp.notebook.syntax.tree import dotted

_MODEL_CLASS = re.compile(r"^Fast[A-Z]|Model|For[A-Z]")
_SPREADS = {"auto", "balanced", "balanced_low_0", "sequential"}
_ON_CPU = re.compile(r"""(\{\s*["']{2}\s*:\s*)?(torch\.device\()?["']cpu["']\)?(\s*,?\s*\})?""")


# What a script asks for the number of GPUs.
DEVICE_COUNTS = ("torch.cuda.device_count", "torch.accelerator.device_count")


def edit_load(call: cst.Call, full: str, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return a from_pretrained call that loads on this process's GPU; other calls are returned unchanged."""
    path = dotted(call.func)
    if not path.endswith(".from_pretrained"):
        return call, []
    old = keyword(call, "device_map")
    ours = is_loader_call(path) or _loads_model(full)
    if not ours and (old is None or code(old.value) == "None"):
        return call, []
    if old is not None and _ON_CPU.fullmatch(code(old.value)):
        return call, []  # on the CPU on purpose: to merge it, or to look at its layers
    call, note = _bind(call, old, context)
    notes = [note]
    offload = keyword(call, "offload_embedding")
    if offload is not None and code(offload.value) not in ("False", "None"):
        value = code(offload.value)
        alone = f"{context.names['WORLD_SIZE']} == 1"
        call = set_keyword(call, "offload_embedding", alone if value == "True" else f"({value}) and {alone}")
        notes.append(context.edit("load", f"offload_embedding was {value}; DDP cannot train with weights on the CPU"))
    return call, notes


def _loads_model(full: str) -> bool:
    """Return whether a from_pretrained is that of a model class of Unsloth's, whatever the notebook calls it."""
    kind = full.split(".")[-2]
    return full.startswith("unsloth.") and ".dataprep." not in full and bool(_MODEL_CLASS.search(kind))


def _bind(call: cst.Call, old: cst.Arg | None, context: ConversionContext) -> tuple[cst.Call, str]:
    target = _this_gpu(context)
    if splats(call):
        source = ", **".join(code(arg.value) for arg in call.args if arg.star == "**")
        value = cst.parse_expression(f'{{**{source}, "device_map": {target}}}')
        args = [arg for arg in remove_keyword(call, "device_map").args if arg.star != "**"]
        note = context.edit("load", "load the whole model on this process's GPU, whatever the dict says")
        return call.with_changes(args=[*args, cst.Arg(value=value, star="**")]), note
    was = code(old.value) if old is not None else ""
    return set_keyword(call, "device_map", target), _note(was, call, context)


def _note(was: str, call: cst.Call | None, context: ConversionContext) -> str:
    if _spreads(was, call, context):
        return context.warn(
            "model parallel", f"device_map was {was}, which spreads this model: it must now fit on one GPU"
        )
    replaced = f" (device_map was {was})" if was else ""
    return context.edit("load", f"load the whole model on this process's GPU{replaced}")


# "auto" takes one GPU where the model fits on it.
_SIZE = re.compile(r"(?<![\d.])(?:(\d+)x)?(\d+(?:\.\d+)?)b(?![a-z])", re.IGNORECASE)
_LARGEST_GPU = 80  # GB


def _spreads(was: str, call: cst.Call | None, context: ConversionContext) -> bool:
    """Return whether a device map puts a model that training uses on several GPUs: by its name or the model's size."""
    if was.strip("\"'") not in _SPREADS or context.on_one_process:
        return False
    if "auto" not in was:
        return True
    if call is None or not call.args:
        return False
    argument = keyword(call, "pretrained_model_name_or_path") or keyword(call, "model_name") or call.args[0]
    name = context.texts.get(code(argument.value), code(argument.value))
    sizes = [float(count or 1) * float(billions) for count, billions in _SIZE.findall(name)]
    text = name + code(call)
    bytes_each = 0.6 if re.search("4bit|quantization_config|awq|gptq|int4", text, re.IGNORECASE) else 2
    return keyword(call, "max_memory") is not None or max(sizes, default=0) * bytes_each > _LARGEST_GPU


def edit_data_parallel(call: cst.Call, full: str, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return the call of torch's DataParallel with this process's GPU as the only one."""
    if not (full.startswith("torch.") and full.endswith(".DataParallel")):
        return call, []
    gpus = f"[{context.names['LOCAL_RANK']}]"
    note = context.edit("device", "DataParallel takes this process's GPU: each process trains on one of its own")
    if len(call.args) > 1 and call.args[1].keyword is None:
        return with_value(call, call.args[1], cst.parse_expression(gpus)), [note]
    return set_keyword(call, "device_ids", gpus), [note]


def edit_dict_call(call: cst.Call, full: str, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Edit `dict(device_map=...)`: a trainer may load the model by itself with such arguments."""
    old = keyword(call, "device_map") if dotted(call.func) == "dict" else None
    if old is None or _stays(code(old.value)):
        return call, []
    return set_keyword(call, "device_map", _this_gpu(context)), [_note(code(old.value), None, context)]


def edit_dict_element(element: cst.DictElement, context: ConversionContext) -> tuple[cst.DictElement, list[str]]:
    """Edit `"device_map": ...` in a dict, as in `dict(device_map=...)`."""
    was = code(element.value)
    if code(element.key) not in ('"device_map"', "'device_map'") or _stays(was):
        return element, []
    return element.with_changes(value=cst.parse_expression(_this_gpu(context))), [_note(was, None, context)]


def _stays(device_map: str) -> bool:
    return device_map == "None" or bool(_ON_CPU.fullmatch(device_map))


def _this_gpu(context: ConversionContext) -> str:
    return f'{{"": {context.names["LOCAL_RANK"]}}}'


def edit_device_number(call: cst.Call, full: str, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Put the local rank into `.cuda(0)`, `torch.cuda.set_device(0)` and `torch.device("cuda", 0)`."""
    path = dotted(call.func)
    index = 1 if path == "torch.device" else 0
    if path not in ("torch.device", "torch.cuda.set_device", "torch.cuda.device") and not path.endswith(".cuda"):
        return call, []
    if len(call.args) <= index or not isinstance(call.args[index].value, cst.Integer):
        return call, []
    note = context.edit("device", "this process's GPU instead of a fixed one")
    return with_value(call, call.args[index], cst.Name(context.names["LOCAL_RANK"])), [note]
