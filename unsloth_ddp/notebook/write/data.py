"""Seed splits, shuffles and samples: without a seed, each process would choose other rows."""

from __future__ import annotations

import libcst as cst

from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.arguments import keyword, set_keyword, splats
from unsloth_ddp.notebook.syntax.tree import dotted, full_path

# Method or function -> the keyword that seeds it.
_SEEDED = {"train_test_split": "seed", "shuffle": "seed", "sample": "random_state"}
_GENERATORS = {"random.Random", "numpy.random.default_rng", "numpy.random.RandomState"}


def edit_generator(call: cst.Call, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return the call of a random generator with a seed, where it has none."""
    full = full_path(dotted(call.func), context.imports)
    if full not in _GENERATORS or call.args:
        return call, []
    seeded = call.with_changes(args=[cst.Arg(cst.Integer(str(context.options.seed)))])
    return seeded, [context.edit("seed", "a random generator without a seed: every process must draw the same")]


def edit_seed(call: cst.Call, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return a random choice of a dataset or a data frame with a seed, where it has none."""
    path = dotted(call.func)
    root, tail = path.split(".")[0], path.split(".")[-1]
    name = _SEEDED.get(tail)
    module = context.imports.get(root, "")
    if name is None or splats(call) or ("." not in path and tail != "train_test_split"):
        return call, []
    if module.split(".")[0] in ("random", "numpy", "torch") or "rng" in path.lower() or "random" in path.lower():
        return call, []
    if tail == "shuffle" and any(arg.keyword is None for arg in call.args):
        return call, []  # shuffle(seed), or a generator's shuffle(list)
    if tail == "train_test_split" and "." not in path:
        name = "random_state"  # scikit-learn's
    if tail == "sample" and not _samples_rows(call):
        return call, []
    old = keyword(call, name)
    if old is not None and not (isinstance(old.value, cst.Name) and old.value.value == "None"):
        return call, []
    if keyword(call, "generator") is not None:
        return call, []
    call = set_keyword(call, name, str(context.options.seed))
    return call, [context.edit("seed", f"{tail} had no seed: every process must choose the same rows")]


def _samples_rows(call: cst.Call) -> bool:
    """Return whether a sample() is a data frame's: random.sample takes a population too."""
    if any(arg.keyword and arg.keyword.value in ("n", "frac", "axis") for arg in call.args):
        return True
    return len(call.args) == 1 and isinstance(call.args[0].value, cst.Integer | cst.Name)
