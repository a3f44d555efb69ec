"""Refuse misspelt names of schedules, optimizers and trackers, without importing Transformers.

Transformers takes seconds to import and has to be imported after Unsloth, so its names are read from its source.
"""

import ast
import difflib
import functools
import importlib.util
from collections.abc import Collection, Sequence
from pathlib import Path

from unsloth_ddp.config.aliases import OTHER_VALUES
from unsloth_ddp.utils.errors import UserError

# The file of Transformers, and the enum or dict in it.
NAMES = {
    "optim": ("training_args.py", "OptimizerNames"),
    "lr_scheduler_type": ("trainer_utils.py", "SchedulerType"),
    "report_to": ("integrations/integration_utils.py", "INTEGRATION_TO_CALLBACK"),
}
# Packages of trackers that have another name, any of which will do.
PACKAGES_OF_TRACKERS = {
    "tensorboard": ("tensorboard", "tensorboardX"), "azure_ml": ("azureml",), "dvclive": ("dvclive",),
    "flyte": ("flytekit",), "kubeflow": ("kubeflow_trainer",),
}  # fmt: skip
# The types that JSON and YAML have, as a user would call them.
TYPE_NAMES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "dict": "a mapping",
    "list": "a list",
}
# The classes that together hold SFTConfig's fields.
SFT_CONFIG = (
    ("trl", "trainer/sft_config.py", "SFTConfig"),
    ("trl", "trainer/base_config.py", "_BaseConfig"),
    ("transformers", "training_args.py", "TrainingArguments"),
)


@functools.cache
def known_names(option: str) -> tuple[str, ...]:
    """Return the names that the installed Transformers takes for an option; none where they are defined elsewhere."""
    texts = [_text(node) for node in _defined("transformers", *NAMES[option])]
    return tuple(text for text in texts if text.isidentifier())


@functools.cache
def sft_config_fields() -> dict[str, frozenset[str]]:
    """Return the fields of the installed TRL's SFTConfig, each with the types of TYPE_NAMES that it takes.

    Without types a field takes others, such as a class of Transformers.
    """
    nodes = [node for place in reversed(SFT_CONFIG) for node in _defined(*place)]
    return {
        node.target.id: _type_names(node.annotation)
        for node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


@functools.cache
def installed_trackers() -> frozenset[str]:
    """Return the known trackers whose package is installed."""
    packages = {name: PACKAGES_OF_TRACKERS.get(name, (name,)) for name in known_names("report_to")}
    return frozenset(
        name for name, alternatives in packages.items() if any(map(importlib.util.find_spec, alternatives))
    )


@functools.cache
def other_trl_configs() -> dict[str, frozenset[str]]:
    """Return the fields that only configs of other trainers of the installed TRL have, by the config's name."""
    spec = importlib.util.find_spec("trl")
    files = sorted((Path(spec.origin).parent / "trainer").glob("*_config.py")) if spec and spec.origin else []
    classes = [node for file in files for node in _parsed(file).body if isinstance(node, ast.ClassDef)]
    fields = {
        node.name: {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        for node in classes
    }
    shared = fields.pop("ModelConfig", set()) | sft_config_fields().keys()
    return {name: frozenset(names - shared) for name, names in fields.items() if names - shared}


def _type_names(annotation: ast.expr) -> frozenset[str]:
    types = _named_types(annotation) - {"None"}
    # Transformers parses a mapping from JSON text too, and the kit's checks read the mapping.
    types -= {"str"} if "dict" in types else set()
    return frozenset(types if types <= TYPE_NAMES.keys() else ())


def _named_types(node: ast.expr) -> set[str]:
    """Return the names of the types in an annotation such as `str | list[str] | None`."""
    if isinstance(node, ast.BinOp):
        return _named_types(node.left) | _named_types(node.right)
    if isinstance(node, ast.Tuple):
        return {name for item in node.elts for name in _named_types(item)}
    if isinstance(node, ast.Subscript):
        outer = ast.unparse(node.value)
        return _named_types(node.slice) if outer in ("Optional", "Union") else {outer}
    return {ast.unparse(node)}


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _defined(package: str, file: str, name: str) -> list[ast.AST]:
    """Return the syntax nodes of the class, function or dict `name` in a package's file; none where it is not there."""
    spec = importlib.util.find_spec(package)
    path = Path(spec.origin).parent / file if spec and spec.origin else None
    if path is None or not path.is_file():
        return []
    for node in _parsed(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        names = (
            [node.name]
            if isinstance(node, (ast.ClassDef, ast.FunctionDef))
            else [t.id for t in targets if isinstance(t, ast.Name)]
        )
        if name in names:
            return [*ast.walk(node)]
    return []


def check_name(option: str, value: str) -> None:
    """Refuse a schedule or an optimizer that Transformers does not know."""
    names = known_names(option)
    if names and value not in names:
        name = OTHER_VALUES[option].get(value.lower(), value.lower())
        hint = (
            f"give {name}."
            if name in names
            else nearest(value, names, "the documentation of Transformers' TrainingArguments")
        )
        raise UserError(f"{option} {value} is not one that Transformers knows; {hint}")


def choose_trackers(names: Sequence[str], known_trackers: Collection[str], installed: Collection[str]) -> list[str]:
    """Return the trackers that get reports; `all` is every tracker that is installed.

    Raises:
        UserError: one is unknown or not installed, or none or all stands beside others.
    """
    if list(names) in ([], ["none"]):
        return []
    if list(names) == ["all"]:
        return sorted(installed)
    for name in names:
        if name in ("none", "all"):
            raise UserError(f"report_to {' '.join(names)}: {name} stands alone; leave it or the others out.")
        if name not in known_trackers:
            raise UserError(
                f"report_to {name} is not a tracker that Transformers knows; they are "
                f"{', '.join(sorted(known_trackers))}."
            )
        if name not in installed:
            raise UserError(
                f"report_to {name}: its package is not installed; install it with uv pip install {name}, or give "
                "tensorboard."
            )
    return list(names)


def nearest(name: str, names: Collection[str], documentation: str) -> str:
    """Return the end of a sentence that refuses a name: the nearest known one, or the place that lists them."""
    near = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.75)
    near = near or [candidate for candidate in sorted(names) if name and candidate.startswith(name)]
    return f"did you mean {near[0]}?" if near else f"{documentation} lists them."
