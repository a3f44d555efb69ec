"""Define the command lines: that of train_ddp.py, with one group of options per topic, and those of the commands."""

import argparse
import dataclasses
import difflib
import re
import sys
import typing
from collections.abc import Callable
from typing import Any, Literal, NoReturn

from unsloth_ddp.config.aliases import ALIASES
from unsloth_ddp.config.options import OPTIONS, TOPICS, TYPES, Settings
from unsloth_ddp.config.unknown import unknown_options, unknown_words
from unsloth_ddp.config.values import accepted_values
from unsloth_ddp.utils.errors import UserError

# Numbers that argparse takes for names of options; white space before a number is no part of it.
NEGATIVE = re.compile(r"-[\d.]+e[+-]?\d+", re.IGNORECASE)


class Parser(argparse.ArgumentParser):
    """Raise instead of printing the usage from every rank, and read - and _ in option names alike.

    Args:
        prog: the command, as a user types it.
        description: shown by --help as it is written.
        takes_settings: the options of train_ddp.py may stand beside its own; parse_settings reads them.
    """

    def __init__(
        self, prog: str, description: str | None, *, takes_settings: bool = False, **parser_options: Any
    ) -> None:
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **parser_options,
        )
        self.takes_settings = takes_settings

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; unknown options are refused with the nearest one."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise unknown_options(unknown_words(unknown), "command line", self)
        return options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, with --global-batch-size read as --global_batch_size, and -1e-3 as a value."""
        words = [_with_underscores(word) for word in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args([" " + word if NEGATIVE.fullmatch(word) else word for word in words], namespace)

    def error(self, message: str) -> NoReturn:
        missing = re.fullmatch(r"argument --(\w+): expected .* argument", message)
        if missing and (name := missing[1]) in (*OPTIONS, "config"):
            message = f"no value is given for {name}; {name} takes {accepted_values(name)}"
        raise UserError(f"command line: {message}.")

    @property
    def option_names(self) -> list[str]:
        """Return the names of the command's own options."""
        return [name.lstrip("-") for action in self._actions for name in action.option_strings]


def make_command_parser(prog: str, description: str | None) -> Parser:
    """Return the parser of a command with options of its own; all others are left to parse_settings."""
    return Parser(prog, description, takes_settings=True, epilog="All other options are those of train_ddp.py.")


def run_command(name: str, work: Callable[[list[str]], None], argv: list[str]) -> int:
    """Run a command and return its exit code; a user's mistake is one sentence that begins with the command's name."""
    try:
        work(argv)
    except UserError as error:
        print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        return UserError.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


class TopicHelp(argparse.Action):
    """Print the help of all options, or with `--help TOPIC` of a topic or an option."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option_string: str | None = None) -> None:
        """Print it and exit."""
        if value is None:
            parser.print_help()
            parser.exit()
        topic = value.lstrip("-").replace("-", "_")
        groups = {title: [topic] if topic in names else names for title, names in _groups().items()}
        shown = {title: names for title, names in groups.items() if topic in (title.split()[0].lower(), *names)}
        if not shown:
            alias = ALIASES[topic].option if topic in ALIASES else None
            near = alias or next(iter(difflib.get_close_matches(topic, [*OPTIONS, *_topics()], n=1)), None)
            hint = f"did you mean {near}?" if near else f"the topics are {', '.join(_topics())}."
            raise UserError(f"command line: --help {value} names no topic or option; {hint}")
        only = Parser(parser.prog, None, usage=argparse.SUPPRESS, add_help=False)
        _add_options(only, shown)
        only.print_help()
        parser.exit()


def _groups() -> dict[str, list[str]]:
    """Return the names of the options of each topic, by its title."""
    return {str(topic.__doc__): [f.name for f in dataclasses.fields(topic)] for topic in TOPICS}


def _topics() -> list[str]:
    return [title.split()[0].lower() for title in _groups()]


def make_parser(description: str) -> Parser:
    """Return the parser of train_ddp.py's options, each as text that convert_value reads."""
    # The list of all options by topic follows; their usage alone would fill a screen.
    usage = "train_ddp.py [--config FILE] [--OPTION VALUE ...]"
    parser = Parser("train_ddp.py", description, usage=usage, argument_default=argparse.SUPPRESS, add_help=False)
    parser.add_argument(
        "-h", "--help", nargs="?", action=TopicHelp, metavar="TOPIC",
        help=f"Show all options, those of a topic ({', '.join(_topics())}), or one option, and exit.",
    )  # fmt: skip
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; the command line takes precedence.")
    _add_options(parser, _groups())
    return parser


def _add_options(parser: Parser, groups: dict[str, list[str]]) -> None:
    defaults = Settings()
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in names:
            text = f"{OPTIONS[name].help} [{_shown(getattr(defaults, name))}]".replace("%", "%%")
            value_type, bare = TYPES[name], OPTIONS[name].bare
            if bool in (value_type, *typing.get_args(value_type)):
                metavar, bare = "BOOL" if value_type is bool else "VALUE", "true"
                group.add_argument(
                    f"--no_{name}", dest=name, action="store_const", const="false", help=argparse.SUPPRESS
                )
            elif typing.get_origin(value_type) is list:
                group.add_argument(f"--{name}", nargs="+", action="extend", metavar="NAME", help=text)
                continue
            else:
                values = typing.get_args(value_type) if typing.get_origin(value_type) is Literal else ()
                metavar = "{" + ",".join(values) + "}" if values else "VALUE"
            without_value: dict[str, Any] = {"nargs": "?", "const": bare} if bare else {}
            group.add_argument(f"--{name}", metavar=metavar, help=text, **without_value)


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, list):
        return " ".join(default) or "none"
    return "none" if default is None or default == {} else str(default)


def _with_underscores(word: str) -> str:
    """Return --global-batch-size=8 as --global_batch_size=8."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value
