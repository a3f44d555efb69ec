"""Convert a YAML file of axolotl, LLaMA-Factory or TRL to one of this kit, and list what was left out and why.

    uv run python -m unsloth_ddp.port their.yaml > mine.yaml
    uv run accelerate launch --config_file accelerate_configs/ddp.yaml train_ddp.py --config mine.yaml

Options that the file leaves out get the other tool's default where the kit's differs. The other tool need not be
installed.
"""

import sys
from pathlib import Path

import yaml

from unsloth_ddp.config.checks import check_settings
from unsloth_ddp.config.command_line import Parser, run_command
from unsloth_ddp.config.options import OPTIONS, Settings
from unsloth_ddp.port.convert import PORTED_TOOLS, detect_tool, port
from unsloth_ddp.port.ported import Ported
from unsloth_ddp.utils.errors import UserError, os_reason
from unsloth_ddp.utils.files.yaml import read_mapping
from unsloth_ddp.utils.redaction import printable


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser("python -m unsloth_ddp.port", __doc__)
    parser.add_argument("file", type=Path, metavar="FILE", help="the other tool's YAML file")
    parser.add_argument(
        "--tool", choices=sorted(PORTED_TOOLS), help="the tool that the file is for [recognised by its keys]"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result there [print it]")
    return parser


def problem_of(ported: Ported) -> str | None:
    """Return the sentence with which the kit refuses the result, or None."""
    try:
        check_settings(Settings(**ported.options))
    except UserError as refused:
        return str(refused)
    return None


def render(ported: Ported, source: Path, output: Path | None = None) -> str:
    """Return the kit's YAML file, with what was left out and the command that starts it as comments."""
    lines = [f"# Ported from {printable(source.name)} ({ported.tool})."]
    problem = None if ported.to_do else problem_of(ported)
    to_do = dict.fromkeys([*ported.to_do, *([problem] if problem else [])])
    if to_do:
        lines += ["#", "# To do before it runs:", *(f"#   {printable(text)}" for text in to_do)]
    if ported.left_out:
        lines += ["#", "# Left out or changed:"]
        by_reason: dict[str, list[str]] = {}
        for name, why in ported.left_out.items():
            by_reason.setdefault(why, []).append(name)
        lines += [f"#   {printable(', '.join(names))}: {printable(why)}." for why, names in by_reason.items()]
    lines += [
        "#",
        "# Start it with: uv run accelerate launch --config_file "
        f"accelerate_configs/{ported.launch_config}.yaml train_ddp.py --config {output or 'THIS_FILE'}",
    ]
    ordered = {name: ported.options[name] for name in OPTIONS if name in ported.options}
    return "\n".join(lines) + "\n" + yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True)


def port_file(argv: list[str]) -> None:
    """Read the file, port it, and print or write the result."""
    arguments = make_parser().parse_args(argv)
    content = read_mapping(arguments.file, str(arguments.file))
    if content and set(content) <= set(OPTIONS):
        raise UserError(f"{arguments.file} is a file of this kit already; give it as --config.")
    try:
        tool = PORTED_TOOLS[arguments.tool] if arguments.tool else detect_tool(content)
        ported = port(content, tool, arguments.file.parent)
    except UserError as refused:
        raise UserError(f"{arguments.file}: {refused}") from None
    text = render(ported, arguments.file, arguments.output)
    if arguments.output is None:
        print(text, end="")
        return
    if arguments.output.exists():
        raise UserError(f"--output {arguments.output} already exists; give another name.")
    try:
        arguments.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {arguments.output} cannot be written: {os_reason(error)}.") from None
    print("\n".join(line for line in text.splitlines() if line.startswith("#")))


def main(argv: list[str]) -> int:
    """Port a file; return the exit code."""
    return run_command("port", port_file, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
