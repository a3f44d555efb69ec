"""Recognise commands that start a training, and variables that a launcher sets for its processes."""

import re

import libcst as cst

from unsloth_ddp.notebook.syntax.tree import dotted

_LAUNCHER = re.compile(
    r"((LOCAL|NODE|GROUP|ROLE)_)?(RANK|WORLD_SIZE)$|ROLE_NAME$|MASTER_(ADDR|PORT)$|(TORCHELASTIC|PET)_"
)
_TRAINS = re.compile(
    r"""(?:^|[;&|(!%'"])\s*(?:[A-Z_]+=\S+\s+|nohup\s+|sudo\s+|env\s+|time\s+)*(
      torchrun\s | accelerate\s+launch\s | deepspeed\s+\S
      | (llamafactory-cli|swift|axolotl|trl|tune|autotrain|litgpt)\s+
      (train|sft|dpo|grpo|pt|rlhf|run|llm|finetune\w*)\b | python[\d.]*\s+(-u\s+)?-m\s+(torch\.distributed|axolotl)\S*
      | python[\d.]*\s+(-u\s+)?\S*(train|finetune|fine_tune|sft|dpo|grpo|run_\w+)\w*\.py\b
      | (nsys|ncu|rocprof\w*)\s.*?\bpython[\d.]*\s+.*\.py\b )""",
    re.VERBOSE,
)

# Ends processes by the GPU that they use, or by the name of Python.
_ENDS = re.compile(r"(?:^|[;&|]|sudo\s)\s*(?:fuser\s.*-\w*k|(?:p?kill|killall)\b.*(?:nvidia|python))")


def is_launcher_variable(name: str) -> bool:
    """Return whether an environment variable is one by which processes of a job find each other."""
    return bool(_LAUNCHER.match(name))


def variable_of(node: cst.BaseExpression) -> str:
    """Return the environment variable that an item of `os.environ`, or a call of one of its methods, names; or ""."""
    match node:
        case cst.Subscript(value=value, slice=[cst.SubscriptElement(slice=cst.Index(value=cst.SimpleString() as key))]):
            owner = dotted(value)
        case cst.Call(func=cst.Attribute(value=value, attr=cst.Name(value=method)), args=[cst.Arg(key), *_]) if (
            isinstance(key, cst.SimpleString) and method in ("pop", "setdefault", "unsetenv", "putenv", "__delitem__")
        ):
            owner = dotted(value)
        case _:
            return ""
    return str(key.evaluated_value) if owner.split(".")[-1] in ("environ", "os") else ""


def training_line(command: str, scripts: frozenset[str] = frozenset()) -> str:
    """Return the line of a command that starts a training by itself, one of these scripts too; or ""."""
    starts = re.compile("|".join(rf"\bpython[\d.]*\s+(-\w\s+)*{re.escape(name)}\b" for name in sorted(scripts)) or "$^")
    return _line(command, _TRAINS) or _line(command, starts)


def ending_line(command: str) -> str:
    """Return the line of a command that ends all processes of Python or on a GPU, or ""."""
    return _line(command, _ENDS)


def _line(command: str, pattern: re.Pattern[str]) -> str:
    for line in command.replace("\\\n", " ").splitlines():
        if pattern.search(line.strip()) and not line.lstrip().startswith("#"):
            return " ".join(line.split())
    return ""
