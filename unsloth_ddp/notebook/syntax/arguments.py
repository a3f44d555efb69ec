"""Set keyword arguments of a call in the call's own style of lines and spacing."""

import re

import libcst as cst

_BLANK = cst.Module(body=[])

# What a trainer's arguments are called, but not an adapter's or a model's configuration.
_ARGUMENTS = re.compile(r"^(?!.*(peft|lora|model|bnb|quant)).*(args|arguments|config|cfg)\b")


def code(node: cst.CSTNode) -> str:
    """Return the source of a node, without the whitespace around it."""
    return _BLANK.code_for_node(node)


def keyword(call: cst.Call, name: str) -> cst.Arg | None:
    """Return the keyword argument of that name, or None."""
    return next((arg for arg in call.args if arg.keyword is not None and arg.keyword.value == name), None)


def splats(call: cst.Call) -> bool:
    """Return whether a call takes arguments from a dict (`**options`)."""
    return any(arg.star == "**" for arg in call.args)


def set_keyword(call: cst.Call, name: str, source: str) -> cst.Call:
    """Return `call` with keyword `name` set to the expression `source`, in place or before the other keywords."""
    value = cst.parse_expression(source)
    old = keyword(call, name)
    if old is not None:
        return with_value(call, old, value)
    return _insert(call, cst.Arg(value=value, keyword=cst.Name(name), equal=_equal_style(call)))


def with_value(call: cst.Call, argument: cst.Arg, value: cst.BaseExpression) -> cst.Call:
    """Return `call` with another value for one of its arguments."""
    return call.with_changes(args=[arg.with_changes(value=value) if arg is argument else arg for arg in call.args])


def add_splat(call: cst.Call, source: str) -> cst.Call:
    """Return `call` with `**source` before its keyword arguments."""
    return _insert(call, cst.Arg(value=cst.parse_expression(source), star="**"))


def _insert(call: cst.Call, new: cst.Arg) -> cst.Call:
    """Put an argument before the keyword arguments."""
    index = next((i for i, arg in enumerate(call.args) if arg.keyword is not None or arg.star == "**"), len(call.args))
    args = list(call.args)
    if index == len(args):
        if not args:
            return call.with_changes(args=[new], whitespace_before_args=cst.SimpleWhitespace(""))
        comma = args[-1].comma
        tail = new if isinstance(comma, cst.MaybeSentinel) else new.with_changes(comma=comma)
        args[-1] = args[-1].with_changes(comma=cst.Comma(whitespace_after=_between(call, index)))
        return call.with_changes(args=[*args, tail])
    earlier = args[index - 1].comma if index else None
    leading = earlier.whitespace_after if isinstance(earlier, cst.Comma) else call.whitespace_before_args
    between = _between(call, index)
    if isinstance(leading, cst.ParenthesizedWhitespace) and isinstance(between, cst.ParenthesizedWhitespace):
        between = between.with_changes(empty_lines=leading.empty_lines)  # comments stay above their argument
        leading = leading.with_changes(empty_lines=[])
    args.insert(index, new.with_changes(comma=cst.Comma(whitespace_after=between)))
    if not isinstance(earlier, cst.Comma):
        return call.with_changes(args=args, whitespace_before_args=leading)
    args[index - 1] = args[index - 1].with_changes(comma=earlier.with_changes(whitespace_after=leading))
    return call.with_changes(args=args)


def take_comment(call: cst.Call, name: str) -> tuple[cst.Call, str]:
    """Return a call without the comment behind one of its keyword arguments, and the comment, or ""."""
    arg = keyword(call, name)
    if arg is None:
        return call, ""
    space = arg.comma.whitespace_after if isinstance(arg.comma, cst.Comma) else arg.whitespace_after_arg
    if not isinstance(space, cst.ParenthesizedWhitespace) or space.first_line.comment is None:
        return call, ""
    plain = space.with_changes(first_line=cst.TrailingWhitespace())
    bare = (
        arg.with_changes(comma=arg.comma.with_changes(whitespace_after=plain))
        if isinstance(arg.comma, cst.Comma)
        else arg.with_changes(whitespace_after_arg=plain)
    )
    return call.with_changes(args=[bare if a is arg else a for a in call.args]), space.first_line.comment.value


def remove_keyword(call: cst.Call, name: str) -> cst.Call:
    """Return `call` without that keyword."""
    return call.with_changes(args=[arg for arg in call.args if arg.keyword is None or arg.keyword.value != name])


def _equal_style(call: cst.Call) -> cst.AssignEqual:
    blanks = ("", "")
    for arg in call.args:
        match arg.equal:
            case cst.AssignEqual(cst.SimpleWhitespace(before), cst.SimpleWhitespace(after)):
                # Notebooks align equal signs with runs of blanks; one is enough for a new argument.
                blanks = (" " if before else "", " " if after else "")
                break
    return cst.AssignEqual(*map(cst.SimpleWhitespace, blanks))


def _between(call: cst.Call, index: int) -> cst.BaseParenthesizableWhitespace:
    """Return the whitespace before the argument at `index`, as its neighbours have it, without their comments."""
    commas = [arg.comma.whitespace_after for arg in call.args[:index] if isinstance(arg.comma, cst.Comma)]
    for whitespace in (*reversed(commas), call.whitespace_before_args):
        if isinstance(whitespace, cst.ParenthesizedWhitespace):
            return cst.ParenthesizedWhitespace(
                first_line=cst.TrailingWhitespace(), indent=whitespace.indent, last_line=whitespace.last_line
            )
    return cst.SimpleWhitespace(" ")


def names_arguments(arg: cst.Arg) -> bool:
    """Return whether an argument given by position holds a trainer's arguments, by its name."""
    match = _ARGUMENTS.search(code(arg.value).lower())
    return arg.keyword is None and not arg.star and match is not None
