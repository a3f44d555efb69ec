"""Print what a notebook displays: the value of the last line of a cell."""

import libcst as cst

from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.lines import lead

# Calls whose value is what one looks at. Others may return nothing, or much that nobody wants to see.
_METHODS = {"head", "tail", "describe", "value_counts", "apply_chat_template", "decode", "batch_decode", "tokenize"}
_METHODS |= {"convert_ids_to_tokens", "isnull", "sum", "keys", "items", "values"}
_FUNCTIONS = {"len", "type", "list", "dict", "sorted", "str", "int", "float", "round", "min", "max", "sum", "repr"}


def is_bare_value(node: cst.BaseStatement) -> bool:
    """Return whether a statement is a bare expression without a call at its top, which only a notebook displays."""
    match node:
        case cst.SimpleStatementLine(body=[cst.Expr(value=value)]):
            silent = cst.Call | cst.Await | cst.Yield | cst.SimpleString | cst.Ellipsis | cst.NamedExpr
            return not isinstance(value, silent)
    return False


def print_value(node: cst.BaseStatement, context: ConversionContext) -> cst.BaseStatement:
    """Return the last line of a cell, in `print(...)` if the notebook displays its value. A `;` at its end hides it."""
    if not isinstance(node, cst.SimpleStatementLine) or len(node.body) != 1 or "print" in context.bound:
        return node
    small = node.body[0]
    if not isinstance(small, cst.Expr) or isinstance(small.semicolon, cst.Semicolon):
        return node
    if not is_bare_value(node) and not _is_looked_at(small.value, context):
        return node
    value = small.value
    if isinstance(value, cst.Tuple) and not value.lpar:  # `a, b` stands without parentheses: print takes both
        values = [element.value for element in value.elements if isinstance(element, cst.Element)]
        if len(values) < len(value.elements) or any(_shows_itself(shown) for shown in values):
            return node
    else:
        values = [value]
    call = cst.Call(func=cst.Name("print"), args=[cst.Arg(value) for value in values])
    note = context.edit("print", "print what the notebook displays")
    return lead(node.with_changes(body=[small.with_changes(value=call)]), [note])


def _shows_itself(value: cst.BaseExpression) -> bool:
    return isinstance(value, cst.Call) and isinstance(value.func, cst.Name) and value.func.value in ("display", "print")


def _is_looked_at(value: cst.BaseExpression, context: ConversionContext) -> bool:
    match value:
        case cst.Call(func=cst.Attribute(attr=cst.Name(value=name))):
            return name in _METHODS
        case cst.Call(func=cst.Name(value=name)):
            return name in _FUNCTIONS and name not in context.bound
    return False
