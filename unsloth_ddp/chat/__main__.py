"""Talk to the result of a run in the terminal.

    uv run python -m unsloth_ddp.chat outputs/RUN
Print one answer and nothing else to standard output:
    uv run python -m unsloth_ddp.chat outputs/RUN --ask "In which city does Kato Elster live?"
Ask about an image, with a model that was trained on images:
    uv run python -m unsloth_ddp.chat outputs/RUN --image photo.jpg --ask "What is this?"

RUN is the folder of a run, or of a checkpoint of a run. For an unfinished run its last complete checkpoint answers. In
a conversation, /reset starts a new one, and /exit or the end of the input ends it. Exit code: 0, or 2 for a mistake in
the options or a run that cannot be loaded.
"""

import argparse
import contextlib
import math
import sys
from pathlib import Path

from unsloth_ddp.config.command_line import Parser, run_command
from unsloth_ddp.data.images.files import ImageFiles
from unsloth_ddp.data.images.values import image_value
from unsloth_ddp.data.sources.hub import use_cache_if_hub_is_unreachable
from unsloth_ddp.distributed.runtime import let_idle_threads_sleep, quiet_imports
from unsloth_ddp.run.result import find_result
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.streams import protect_streams


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser("python -m unsloth_ddp.chat", __doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a run, or a checkpoint in it")
    parser.add_argument("--ask", metavar="TEXT", help="print the answer to this question, and end")
    parser.add_argument(
        "--compare", action="store_true", help="also print the base model's answer, before the trained model's"
    )
    parser.add_argument(
        "--image", metavar="FILE", nargs="+", default=[], help="show these images before the first question"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt of the conversation [none]")
    parser.add_argument("--plain", action="store_true", help="continue a text, without a chat template or a history")
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        metavar="N",
        help="maximum number of tokens in an answer [the generation config's, else 512]",
    )
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="sampling temperature; 0: no sampling [the generation config's]"
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="run the model's own code, as the run did")
    return parser


def check(options: argparse.Namespace) -> None:
    """Refuse values out of bounds, and options that do not go together."""
    if options.max_new_tokens is not None and options.max_new_tokens <= 0:
        raise UserError(f"--max_new_tokens is {options.max_new_tokens}, but it has to be above 0.")
    if options.temperature is not None and not (0 <= options.temperature < math.inf):
        raise UserError(f"--temperature is {options.temperature:g}, but it has to be 0 or more.")
    for option in ("system", "image"):
        if options.plain and getattr(options, option):
            raise UserError(f"--{option} has no place in --plain, which renders no chat; leave one of them out.")
    if options.ask is not None and not options.ask.strip():
        raise UserError("--ask is empty; give the question.")


def chat(argv: list[str]) -> None:
    """Read the command line, load the run, and answer."""
    arguments = make_parser().parse_args(argv)
    check(arguments)
    images = [ImageFiles([Path()], download=True).checked(image_value(image)) for image in arguments.image]
    result = find_result(arguments.run)
    settings = result.settings
    use_cache_if_hub_is_unreachable(settings)
    quiet_imports()
    # Imported here, so that a mistake above is reported before the seconds that torch takes to load.
    from unsloth_ddp.distributed.backend import import_backend
    from unsloth_ddp.distributed.runtime import single_process
    from unsloth_ddp.model.backend import BackendFacts, choose_backend
    from unsloth_ddp.model.loading.trained import check_trained, check_trust

    check_trust(settings, trusted=arguments.trust_remote_code)
    check_trained(settings, result.folder)
    for sentence in result.sentences(plain=arguments.plain):
        print(sentence, file=sys.stderr, flush=True)
    runtime = single_process(settings)
    # On a CPU a run of Unsloth answers with Transformers.
    runtime.backend = choose_backend(BackendFacts(settings))[0] if runtime.device_type == "cuda" else "transformers"
    with runtime.cleanup:
        # Standard output is for answers; Unsloth and downloads print there too.
        with contextlib.redirect_stdout(sys.stderr):
            import_backend(runtime, settings)
            from unsloth_ddp.chat.session import answer_once, converse, load_speakers
            from unsloth_ddp.run.generation import GenerationOptions

            values = settings.chat_template_kwargs
            options = GenerationOptions(
                arguments.max_new_tokens, arguments.temperature, plain=arguments.plain, template_values=values
            )
            speakers = load_speakers(
                result, runtime, options, system=arguments.system, compare=arguments.compare, images=images
            )
        if arguments.ask is None:
            converse(speakers, terminal=sys.stdin.isatty())
        else:
            answer_once(speakers, arguments.ask)


def main(argv: list[str]) -> int:
    """Chat; return the exit code."""
    return run_command("chat", chat, argv)


if __name__ == "__main__":
    protect_streams()
    let_idle_threads_sleep()
    sys.exit(main(sys.argv[1:]))
