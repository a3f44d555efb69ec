"""Read the commands in `get_ipython()` calls: which ones install packages, and which notebook names they use."""

import ast
import re
from dataclasses import dataclass
from functools import cache

import libcst as cst
from IPython.utils.text import DollarFormatter

from unsloth_ddp.notebook.syntax.arguments import code
from unsloth_ddp.notebook.syntax.tree import BUILTINS

_INSTALLERS = re.compile(
    r"""^\s*(?:sudo\s+(?:-\S+\s+)*)?(?:[A-Z_]+=\S+\s+)*
    (?: (?:\S*python[\d.]*|\{sys\.executable\}|"\{sys\.executable\}")\s+-m\s+(?:ensurepip\b|(?:uv\s+)?pip[\d.]*\s)
      | (?:\S*/|\{\}\s+)?(?:uv\s+)?pip[\d.]*(?:-autoremove)?\s
      | uv\s+(?:add|sync|venv|self|python|tool\s+install)\b
      | (?:apt|apt-get|aptitude|dpkg|brew|yum|dnf|apk|snap)\s
      | (?:\S*/)?(?:conda|mamba|micromamba)\s+(?:install|update|create|env|activate|remove|uninstall)\b
      | (?:poetry|pdm|rye|pixi|pipx)\s+(?:add|install|remove|uninstall|sync|update)\b
      | npm\s+(?:install|i)\b | gem\s+install\b | cargo\s+install\b
      | (?:curl|wget)\s.*\|\s*(?:sudo\s+)?(?:ba|z)?sh\b
    )""",
    re.VERBOSE,
)
_PIP_INSTALL = re.compile(r"\bpip[\d.]*\s+install\b(.*)", re.DOTALL)
_TAKES_VALUE = {
    *("-r", "-c", "-i", "-f", "-e", "-t", "--requirement", "--constraint", "--index-url", "--extra-index-url"),
    *("--find-links", "--editable", "--target", "--python", "--prefix", "--index-strategy", "--index", "--cache-dir"),
    *("--progress-bar", "--timeout", "--default-timeout", "--retries", "--proxy", "--trusted-host", "--platform"),
    *("--python-version", "--no-binary", "--only-binary", "--upgrade-strategy", "--root", "--log", "--torch-backend"),
}


# Cell magics that give their body to another program.
PROGRAMS = {name: name for name in ("python3", "python2", "perl", "ruby", "pypy")} | {"python": "python3"}
FILE_CELLS = {"writefile", "file"}
SHELL_CELLS = {"bash", "sh", "script", "shell", "system", "sx", "!", *PROGRAMS}

_MANAGERS = ("pip", "conda", "mamba", "uv")  # of packages, whose magics run a command


@dataclass(frozen=True)
class IPythonCall:
    """A `get_ipython().method(...)` call with its arguments, in which `{}` stands for what only the run knows."""

    method: str
    args: tuple[str, ...]
    computed: str = ""  # the source of the command, line or body, if it is no literal

    @property
    def command(self) -> str:
        """Return the shell command it runs, or ""."""
        first = self.args[0] if self.args else ""
        if self.method in ("system", "getoutput", "getoutput_list", "sx"):
            return first
        if self.method == "run_cell_magic" and first in SHELL_CELLS:
            return self.program or self.args[2]
        if self.method == "run_line_magic" and first in ("system", "sx", "sc", "bash", "sh", "!"):
            return self.args[1]
        return f"{first} {self.args[1]}" if first in _MANAGERS else ""

    @property
    def program(self) -> str:
        """Return the program that a cell magic gives its body to, or "" if that is bash."""
        if self.method != "run_cell_magic":
            return ""
        if self.args[0] in PROGRAMS:
            return f"{PROGRAMS[self.args[0]]} {self.args[1]}".strip()
        if self.args[0] == "script" and self.args[1].split()[:1] not in ([], ["bash"], ["sh"]):
            return self.args[1]
        return ""

    @property
    def interpolated(self) -> str:
        """Return the text into which IPython puts names of the notebook: of a cell magic, its first line only."""
        return self.args[1] if self.method == "run_cell_magic" else self.command or " ".join(self.args)


# Methods of IPython's shell that a magic or a shell line becomes.
SHELL_METHODS = {"system", "getoutput", "getoutput_list", "sx", "magic", "run_line_magic", "run_cell_magic"}


def ipython_call(node: cst.BaseExpression) -> IPythonCall | None:
    """Return `node` as an IPython call, or None if it is none."""
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return None
    base = node.func.value
    if not isinstance(base, cst.Call) or not isinstance(base.func, cst.Name) or base.func.value != "get_ipython":
        return None
    method = node.func.attr.value
    words = tuple(_word(arg.value) for arg in node.args)
    computed = [index for index, arg in enumerate(node.args) if not _is_literal(arg.value)]
    at = {"run_line_magic": 1, "run_cell_magic": 2}.get(method, 0)
    if at == 2 and computed not in ([], [2]):
        return None
    source = code(node.args[at].value) if at in computed else ""
    if method == "magic" and words:
        # Its older form has name and line in one text.
        name, _, line = words[0].removeprefix("%").partition(" ")
        return IPythonCall("run_line_magic", (name, line), source)
    if source and words[0] in _MANAGERS:
        source = f'"{words[0]} " + ({source})'
    return IPythonCall(method, words, source)


def _is_literal(node: cst.BaseExpression) -> bool:
    # One with an f-string in it has no value.
    return isinstance(node, cst.SimpleString | cst.ConcatenatedString) and isinstance(node.evaluated_value, str)


RUNNERS = {"run", "call", "check_call", "check_output", "system", "Popen"}


def command_of(node: cst.BaseExpression) -> str:
    """Return the command of a shell line or of a subprocess call written as strings; "" if there is none."""
    magic = ipython_call(node)
    if magic is not None:
        return magic.command
    if not isinstance(node, cst.Call) or not node.args or not isinstance(node.func, cst.Attribute | cst.Name):
        return ""
    name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
    if name.value not in RUNNERS:
        return ""
    first = node.args[0].value
    if isinstance(first, cst.Call) and isinstance(first.func, cst.Attribute) and first.func.attr.value == "split":
        first = first.func.value  # "pip install x".split()
    return _words(first)


def _words(node: cst.BaseExpression) -> str:
    """Return the command that a list of words makes, or a text."""
    match node:
        case cst.List(elements=elements) | cst.Tuple(elements=elements):
            return " ".join(_word(element.value) for element in elements)
        case cst.BinaryOperation(left=cst.List() as left, operator=cst.Add(), right=right):
            return f"{_words(left)} {_words(right)}"
    return _word(node)


def _word(node: cst.BaseExpression) -> str:
    """Return the text of a string, with `{}` for its parts that only the run knows."""
    match node:
        case cst.SimpleString() | cst.ConcatenatedString() if isinstance(node.evaluated_value, str):
            return node.evaluated_value
        case cst.FormattedString(parts=parts):
            return "".join(part.value if isinstance(part, cst.FormattedStringText) else "{}" for part in parts)
        case (
            cst.BinaryOperation(left=left, operator=cst.Add(), right=right)
            | cst.ConcatenatedString(left=left, right=right)
        ):
            return _word(left) + _word(right)
        case cst.Attribute(attr=cst.Name("executable")):
            return "python"
    return "{}"


def references(command: str) -> set[str]:
    """Return the names that IPython would put into `command` if they are bound."""
    return {name for piece in _pieces(command) or [] if piece.expression for name in _names(piece.expression)}


@dataclass(frozen=True)
class _Piece:
    """Text as it stands, or an expression with its conversion."""

    text: str
    expression: str = ""
    conversion: str = ""


@cache
def _pieces(command: str) -> list[_Piece] | None:
    """Split a command as IPython's formatter does; None where it would leave the command as it stands."""
    if "{" not in command and "$" not in command:
        return None  # what IPython would leave, and its formatter takes long over
    pieces: list[_Piece] = []
    try:
        for literal, field, spec, conversion in DollarFormatter().parse(command):
            pieces.append(_Piece(literal))
            if field is not None:
                expression = f"{field}:{spec}" if spec else field  # IPython evaluates both: a slice
                ast.parse(expression.strip(), mode="eval")
                pieces.append(_Piece("", expression.strip(), conversion or ""))
    except (SyntaxError, ValueError):
        return None
    return [piece for piece in pieces if piece.text or piece.expression]


def _names(expression: str) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)]
    return {node.id for node in nodes} - {node.id for node in nodes if isinstance(node.ctx, ast.Store)}


def as_python_string(command: str, bound: set[str]) -> str:
    """Return the source of a string for `command`, with the expressions in it that IPython would evaluate.

    IPython evaluates `{any expression}` and `$name`, or leaves the whole command as it stands if one of them fails.
    """
    pieces = _pieces(command) if bound else None
    if pieces is None:
        return _quote(command)
    expressions = [piece.expression for piece in pieces if piece.expression]
    if not set().union(*(_names(text) for text in expressions)) <= bound | BUILTINS:
        return _quote(command)
    literal = "".join(piece.text for piece in pieces)
    if not expressions:
        return _quote(literal)
    quote = "'" if '"' in literal and "'" not in literal else '"'
    other = "'" if quote == '"' else '"'
    if any("\\" in text or (quote in text and other in text) for text in expressions):
        return " + ".join(f"str({piece.expression})" if piece.expression else _quote(piece.text) for piece in pieces)
    text = ""
    for piece in pieces:
        if piece.expression:
            # Python before 3.12 has no f-string with its own quote inside.
            expression = piece.expression.replace(quote, other)
            gap = " " if expression.startswith("{") else ""
            text += "{" + gap + expression + (f"!{piece.conversion}" if piece.conversion else "") + "}"
        else:
            escaped = repr('"' + piece.text)[2:-1].replace("\\'", "'")
            text += escaped.replace("{", "{{").replace("}", "}}").replace(quote, "\\" + quote)
    return f"f{quote}{text}{quote}"


def _quote(text: str) -> str:
    """Return a literal for `text`: over several lines where it has several, raw where it has backslashes."""
    if "\n" in text.strip("\n") and '"""' not in text and not text.startswith('"') and not text.endswith(('"', "\\")):
        if "\\" not in text:
            return f'"""{text}"""'
        if "\r" not in text:
            return f'r"""{text}"""'
    if '"' not in text and "\\" not in text and text.isprintable():
        return f'"{text}"'
    return repr(text)


def split_commands(command: str) -> list[tuple[str, str]]:
    """Split a shell line into its commands, each with the operator (&&, ||, ;, newline or "") that follows."""
    return [(text, operator) for text, operator in _parts(command) if text.strip()]


def _parts(command: str) -> list[tuple[str, str]]:
    """Split as split_commands does but keep blank parts, so that joining them gives the command back."""
    parts: list[tuple[str, str]] = []
    quote, start, index, depth = "", 0, 0, 0
    while index < len(command):
        char = command[index]
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (index == 0 or command[index - 1].isspace()):
            end = command.find("\n", index)
            index = len(command) if end < 0 else end
            continue
        elif char == "\\":
            index += 1
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif depth <= 0:
            operator = next((op for op in ("&&", "||", ";", "\n") if command.startswith(op, index)), "")
            if operator:
                parts.append((command[start:index], operator))
                index += len(operator)
                start = index
                continue
        index += 1
    parts.append((command[start:], ""))
    return parts


def is_install(command: str) -> bool:
    """Return whether one simple command installs, removes or updates packages."""
    group = re.match(r"^\s*\((.*)\)[^()]*$", command, re.DOTALL)
    if group:
        return all(is_install(text) for text, _ in split_commands(group.group(1)))
    return bool(_INSTALLERS.match(command.strip() + " "))


@cache
def without_installs(command: str) -> tuple[str, list[str]]:
    """Return a shell command without its installs, and the requirements that those named."""
    others: list[tuple[str, str]] = []
    requirements: list[str] = []
    parts = split_commands(command)
    for text, operator in parts:
        if is_install(text):
            requirements += requirement_names(text)
        else:
            others.append((text, operator))
    if len(others) == len(parts):
        return command, []
    if _COMPOUND.search(command):
        return _script_without_installs(command), requirements
    if all(text.lstrip().startswith("#") or (op in ("&&", "||") and _TEST.match(text)) for text, op in others):
        return "", requirements
    joined = "".join(text + operator for text, operator in others[:-1]) + others[-1][0]
    return joined.strip("\n "), requirements


# What only decides whether the install after `&&` or `||` is needed.
_TEST = re.compile(r"\s*(?:command\s+-v|which|type|hash|test|true|false|\[)\s")

# What leaves nothing behind when its shell ends: choosing a wheel, testing for a program, saying so.
_LEAVES_NOTHING = re.compile(
    r"""\s*(?: \w+= | (?:case|esac|if|then|elif|else|fi|for|while|until|do|done|exit|set|export|true|test)\b
      | \[ | : | \# | [{}] | command\s+-v\b | (?:echo|printf)\b[^>]*$ | [^\s()]+\)\s*\w+= )""",
    re.VERBOSE,
)


_COMPOUND = re.compile(r"^\s*(?:case|if|for|while|until)\b.*\n", re.MULTILINE)


def _script_without_installs(script: str) -> str:
    """Return a script of compound commands with `:` for each install, or "" if the rest only served the installs."""
    parts = _parts(script)
    rest = [text for text, _ in parts if text.strip() and not is_install(text)]
    if all(_LEAVES_NOTHING.match(text) for text in rest):
        return ""
    blank = [(re.sub(r"\S.*", ":", text, flags=re.DOTALL) if is_install(text) else text) for text, _ in parts]
    return "".join(text + operator for text, (_, operator) in zip(blank, parts, strict=True)).strip("\n ")


def requirement_names(command: str) -> list[str]:
    """Return the requirements that a pip command names, as a requirements file has them."""
    install = _PIP_INSTALL.search(command.replace("\\\n", " "))
    if install is None:
        return []
    names: list[str] = []
    skip = False
    for token in re.findall(r"\"[^\"]*\"|'[^']*'|\S+", install.group(1)):
        if token.startswith(("#", ">", "2>", "|", "&")):
            break
        text = token.strip("\"'")
        if skip or text.startswith("-"):
            skip = not skip and text in _TAKES_VALUE
        elif text and "{" not in text and "$" not in text and text != "\\":
            names.append(text)
    return names
