"""Find the programs of llama.cpp, and run them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unsloth_ddp.utils.errors import UserError, one_line, os_reason

CONVERTER, QUANTIZER = "convert_hf_to_gguf.py", "llama-quantize"
# Programs that answer one question and end; newer releases have the first, all have had the second.
ANSWERERS = ("llama-completion", "llama-cli")
# Where a build leaves its programs, below llama.cpp's folder.
BUILT = ("", "build/bin", "bin")
# Data types that the converter writes itself; llama-quantize makes the others from bf16.
CONVERTED = ("bf16", "f16", "f32", "q8_0")
QUANTIZED = (
    "q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_0", "q4_1", "q4_k_s", "q4_k_m", "q5_0", "q5_1", "q5_k_s", "q5_k_m",
    "q6_k", "iq4_nl", "iq4_xs",
)  # fmt: skip
CLONE = "git clone --depth 1 https://github.com/ggml-org/llama.cpp"


@dataclass(frozen=True)
class LlamaCpp:
    """The programs of llama.cpp that an export needs; None for what is not there."""

    converter: Path
    quantizer: Path | None
    answerer: Path | None


def find_llama_cpp(named: str | None, *, quantize: bool) -> LlamaCpp:
    """Return llama.cpp's programs in the folder `named`, in that of the variable LLAMA_CPP, or on the PATH.

    Raises:
        UserError: the converter is missing, or the quantizer that `quantize` needs; with how to get it.
    """
    location = named or os.environ.get("LLAMA_CPP")
    folder = Path(location).expanduser().resolve() if location else None
    if folder is not None and not folder.is_dir():
        origin = "--llama_cpp" if named else "LLAMA_CPP"
        raise UserError(f"{origin} {location}: there is no such folder; {CLONE}, and give the folder that it makes.")

    def find(name: str) -> Path | None:
        places = [str(folder / place) for place in BUILT] if folder else []
        program = shutil.which(name, path=os.pathsep.join([*places, os.environ.get("PATH", "")]))
        # The script need not be executable.
        script = folder / name if folder else None
        return Path(program) if program else script if script and script.is_file() else None

    converter, quantizer = find(CONVERTER), find(QUANTIZER)
    if converter is None:
        where = f"not in {folder}" if folder else "not on the PATH"
        raise UserError(
            f"GGUF files are made by llama.cpp's {CONVERTER}, which is {where}; {CLONE}, and give its folder with "
            "--llama_cpp or in LLAMA_CPP."
        )
    if quantize and quantizer is None:
        raise UserError(
            f"--quantize needs {QUANTIZER}, which is not there; build it in llama.cpp's folder with cmake -B build && "
            "cmake --build build --target llama-quantize llama-completion, or take bf16, f16, f32 or q8_0, which need "
            "no build."
        )
    return LlamaCpp(converter, quantizer, next((path for path in map(find, ANSWERERS) if path), None))


def run_converter(tools: LlamaCpp, model: Path, target: Path, weight_type: str) -> None:
    """Convert a whole model to a GGUF file; raise a UserError with the converter's reason if it refuses the model."""
    _run(
        [sys.executable, str(tools.converter), str(model), "--outfile", str(target), "--outtype", weight_type],
        "llama.cpp's converter refuses the model",
        "if it lacks a package, install requirements/requirements-convert_hf_to_gguf.txt of its folder; otherwise "
        "serve the merged model (--to merged) with vLLM or Transformers",
    )


def run_quantizer(tools: LlamaCpp, source: Path, target: Path, weight_type: str) -> None:
    """Quantize a GGUF file; raise a UserError with the quantizer's reason if it fails."""
    command = [str(tools.quantizer), str(source), str(target), weight_type.upper()]
    _run(command, f"{QUANTIZER} {weight_type} failed", "try another --quantize")


def ask_gguf(tools: LlamaCpp, model: Path, question: str, length: int, *, plain: bool) -> str | None:
    """Return the answer of a GGUF file, with the chat template that it holds; None if no program here can ask it.

    Raises:
        UserError: llama.cpp does not load the file.
    """
    if tools.answerer is None:
        return None
    command = [str(tools.answerer), "-m", str(model), "-p", question, "-n", str(length), "-c", "2048", "--temp", "0"]
    command += ["--no-display-prompt", "--simple-io", *(["-no-cnv"] if plain else ["--jinja", "-st"])]
    failed = f"{tools.answerer.name} does not answer with the GGUF file that was made, so it is not kept"
    # Repacking the weights for speed takes longer than one answer, and crashes on matrices that are very small.
    environ = {**os.environ, "LLAMA_ARG_REPACK": "0"}
    output = _run(command, failed, "try another --quantize, or a newer llama.cpp", environ)
    # It marks the end of an answer by words of its own.
    return output.strip().removesuffix("[end of text]").removesuffix("> EOF by user").strip()


def _run(command: list[str], failed: str, fix: str, environ: Mapping[str, str] | None = None) -> str:
    """Return what a program prints; if it fails, raise a UserError with the last line of its errors."""
    try:
        process = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise UserError(f"{command[0]} cannot be run: {os_reason(error)}.") from None
    if process.returncode != 0:
        lines = (process.stderr.strip() or process.stdout.strip() or "it says nothing").splitlines()
        raise UserError(f"{failed} (exit code {process.returncode}: {one_line(lines[-1]).rstrip('.')}); {fix}.")
    return process.stdout
