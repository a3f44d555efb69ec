"""Export the result of a run for another program.

    uv run python -m unsloth_ddp.export outputs/RUN --to merged           # a whole 16-bit model for any library
    uv run python -m unsloth_ddp.export outputs/RUN --to gguf --quantize q4_k_m --llama_cpp ~/llama.cpp
    uv run python -m unsloth_ddp.export outputs/RUN --to ollama --llama_cpp ~/llama.cpp
    uv run python -m unsloth_ddp.export outputs/RUN --to vllm             # prints the command that serves the adapter
    uv run python -m unsloth_ddp.export outputs/RUN --to hub              # uploads the result of a finished run

RUN is the folder of a run, or of a checkpoint of a run. For an unfinished run its last complete checkpoint is exported.
The export is written to a temporary folder, loaded and asked a question, and only then moved into place. No GPU is
needed. Exit code: 0, or 2 for a mistake in the options, a missing program, or a run that cannot be exported.
"""

import argparse
import dataclasses
import shlex
import signal
import sys
from pathlib import Path

from unsloth_ddp.config.command_line import Parser, run_command
from unsloth_ddp.data.sources.hub import use_cache_if_hub_is_unreachable
from unsloth_ddp.distributed.runtime import let_idle_threads_sleep, quiet_imports
from unsloth_ddp.export.folder import export_folder
from unsloth_ddp.export.llama_cpp import CONVERTED, QUANTIZED, LlamaCpp, find_llama_cpp
from unsloth_ddp.run.result import RunResult, find_result
from unsloth_ddp.run.upload import check_upload, upload
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.redaction import printable_lines
from unsloth_ddp.utils.streams import protect_streams

TARGETS = ("merged", "gguf", "ollama", "vllm", "hub")
WITH_LLAMA_CPP = ("gguf", "ollama")
QUESTION = "Hello! Who are you?"


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser("python -m unsloth_ddp.export", __doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a run, or a checkpoint in it")
    parser.add_argument("--to", choices=TARGETS, required=True, help="format to write")
    parser.add_argument("--output", metavar="DIR", help="folder to write [a new one in the run's folder]")
    parser.add_argument(
        "--quantize", type=str.lower, choices=(*CONVERTED, *QUANTIZED), metavar="TYPE",
        help=f"weights of a GGUF file: {', '.join(CONVERTED)}; with llama-quantize also {', '.join(QUANTIZED)} [bf16]",
    )  # fmt: skip
    parser.add_argument("--llama_cpp", metavar="DIR", help="llama.cpp's folder [the variable LLAMA_CPP, or the PATH]")
    parser.add_argument("--hub_model_id", metavar="NAME", help="Hub repository [that of the run, or its name]")
    parser.add_argument(
        "--hub_private_repo",
        choices=("true", "false"),
        help="create the Hub repository as private [as the run says: true]",
    )
    parser.add_argument("--ask", metavar="TEXT", default=QUESTION, help=f"question for the exported model [{QUESTION}]")
    parser.add_argument(
        "--plain", action="store_true", help="the run trained on text, so ask without the chat template"
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="run the model's own code, as the run did")
    return parser


def check(options: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    for option in ("quantize", "llama_cpp", "hub_model_id", "hub_private_repo"):
        targets = ("hub",) if option.startswith("hub") else WITH_LLAMA_CPP
        if getattr(options, option) and options.to not in targets:
            names = " and ".join(f"--to {name}" for name in targets)
            raise UserError(f"--{option} is for {names}, but --to is {options.to}; leave it out.")
    if options.output and options.to == "hub":
        raise UserError("--output is for files, and --to hub writes none here; leave it out.")
    if not options.ask.strip():
        raise UserError("--ask is empty; give a question, or leave it out.")


def export(argv: list[str]) -> None:
    """Read the command line and export."""
    options = make_parser().parse_args(argv)
    check(options)
    result = find_result(options.run, in_shards=options.to == "merged")
    if options.to == "merged" and not result.is_adapter and not result.in_shards:
        raise UserError(
            f"{result.folder} holds a complete model already, because the run used --method full; load it from there."
        )
    if options.to == "hub":
        upload_run(result, options)
        return
    tools = None
    if options.to in WITH_LLAMA_CPP:
        tools = find_llama_cpp(options.llama_cpp, quantize=options.quantize in QUANTIZED)
    # Refused at once if it exists; for vLLM a folder is only written where its command line does not hold enough.
    target = None if options.to == "vllm" else export_folder(result, options.to, options.output)
    for sentence in result.sentences(plain=options.plain):
        print(sentence, file=sys.stderr, flush=True)
    use_cache_if_hub_is_unreachable(result.settings)
    quiet_imports()
    # Imported here, so that a mistake above is reported before the seconds that torch takes to load.
    import transformers

    from unsloth_ddp.model.loading.trained import check_trained, check_trust

    transformers.utils.logging.disable_progress_bar()
    check_trust(result.settings, trusted=options.trust_remote_code)
    if not result.in_shards:
        check_trained(result.settings, result.folder)
    if target is not None:
        _convert(result, target, tools, options) if tools else _merge(result, target, options)
    else:
        from unsloth_ddp.export.serve import vllm_command

        print(vllm_command(result, lambda: export_folder(result, "vllm", options.output)), flush=True)


def upload_run(result: RunResult, options: argparse.Namespace) -> None:
    """Upload the result of a finished run as --push_to_hub does.

    Raises:
        UserError: the run is not finished; there is no token or no network; the Hub refuses.
    """
    if result.step is not None:
        raise UserError(
            f"{result.run} is not finished, and a checkpoint holds more than its model; finish it by the same command, "
            "or export the checkpoint with --to merged and upload that folder with hf upload."
        )
    private = (
        result.settings.hub_private_repo if options.hub_private_repo is None else options.hub_private_repo == "true"
    )
    settings = dataclasses.replace(
        result.settings,
        push_to_hub=True,
        run_name=result.run.name,
        hub_model_id=options.hub_model_id or result.settings.hub_model_id,
        hub_private_repo=private,
    )
    check_upload(settings, "--to hub")
    print(f"Uploaded to {upload(settings, result.folder)}", flush=True)


def _merge(result: RunResult, target: Path, options: argparse.Namespace) -> None:
    from unsloth_ddp.export.merged import export_merged

    into = "a whole model" if result.in_shards else result.settings.model
    print(f"Merging {result.folder} into {into} ...", flush=True)
    answer = export_merged(result, target, options.ask, plain=options.plain)
    _report(target, options.ask, answer)


def _convert(result: RunResult, target: Path, tools: LlamaCpp, options: argparse.Namespace) -> None:
    from unsloth_ddp.export.gguf import export_gguf

    weight_type = options.quantize or "bf16"
    print(f"Converting {result.folder} to GGUF ({weight_type}) ...", flush=True)
    ollama = options.to == "ollama"
    answer, missing = export_gguf(
        result, target, tools, weight_type, options.ask, plain=options.plain, modelfile=ollama
    )
    _report(target, options.ask, answer)
    if missing:
        print(missing, flush=True)
    if ollama:
        command = shlex.join(["ollama", "create", result.run.name, "-f", str(target / "Modelfile")])
        print(f"Import it into Ollama with:\n  {command}", flush=True)


def _report(target: Path, question: str, answer: str | None) -> None:
    if answer is None:
        print("The file was not asked a question, because llama-completion was not found.", flush=True)
    else:
        print(f"Loaded again and asked: {question}\nIt answers: {printable_lines(answer) or '(nothing)'}", flush=True)
    print(f"Written to {target}", flush=True)


def main(argv: list[str]) -> int:
    """Export; return the exit code."""
    return run_command("export", export, argv)


if __name__ == "__main__":
    protect_streams()
    let_idle_threads_sleep()
    # What is built aside is removed on the way out, as it is on Ctrl+C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
