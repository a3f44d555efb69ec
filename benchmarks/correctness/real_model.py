"""Fine-tune a real model on invented facts, and compare what the run, its exports and real servers answer.

    python -m benchmarks.correctness.real_model --work DIR --json FILE
    python -m benchmarks.correctness.real_model --work DIR --json FILE --only vllm --vllm V/bin/vllm
    python -m benchmarks.correctness.real_model --work DIR --json FILE --only gguf --llama_cpp llama.cpp

The weights come from the package registry (benchmarks/common/real_model.py). Runs that DIR holds are not made again, and
results that FILE holds stay.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.real_model import GENERAL, RECIPE, Answer, PlainModel, fetch_model, held_out
from benchmarks.common.runs import REPO, launch_command, losses, train, update_difference
from unsloth_ddp.parity.processes import kill_tree
from unsloth_ddp.utils.files.json import write_json

FULL = ("--method", "full", "--learning_rate", "1e-4")
DPO = (
    "--task",
    "dpo",
    "--dataset",
    str(REPO / "demo/towns_pairs.jsonl"),
    "--learning_rate",
    "1e-4",
    "--max_steps",
    "12",
)
SHORT = ("--max_steps", "4", "--compare_answers", "0")
# The options of each run besides those of the recipe, and the number of its processes.
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "lora": (1, ()),
    "lora_two": (2, ()),
    "full": (1, FULL),
    "short": (1, SHORT),
    "short_two": (2, (*SHORT, "--per_device_train_batch_size", "4")),
    "short_full": (1, (*SHORT, *FULL)),
    "short_full_two": (2, (*SHORT, *FULL, "--per_device_train_batch_size", "4")),
    "dpo": (1, (*DPO, "--compare_answers", "0")),
}
# Asked of servers: some that the run learned, and some that it knew.
SERVED = [*list(held_out())[:12], *list(GENERAL)[:8]]
LENGTH = 32


def run(work: Path, name: str, *more: str) -> Path:
    """Return the folder of a finished run, which is made if it is not there."""
    folder = work / "outputs" / name
    if (folder / "summary.json").is_file():
        return folder
    processes, options = RUNS[name]
    script = [sys.executable] if processes == 1 else launch_command("cpu.yaml", processes)
    base = export(run(work, "lora"), "merged") if name == "dpo" else fetch_model(work / "model")
    command = [*script, "train_ddp.py", "--config", str(RECIPE), "--model", str(base), *options, *more]
    result = train(command, name, work, limit=7200)
    if result["exit_code"]:
        raise SystemExit(f"{name} failed:\n{result['log']}")
    return folder


def export(folder: Path, target: str, *options: str) -> Path:
    """Return the folder of an export, which is made if it is not there; what the command prints is kept in LAST.txt."""
    written = folder / target
    if not written.exists() or target == "vllm":
        shutil.rmtree(written, ignore_errors=True)
        command = [sys.executable, "-m", "unsloth_ddp.export", str(folder), "--to", target, *options]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"export --to {target} failed: {done.stderr}")
        (folder.parent / f"{folder.name}-{target}.txt").write_text(done.stdout)
    return written


def scores(model: PlainModel) -> dict[str, Any]:
    """Return the share of held-out questions that are answered, and of those that the base model answers."""
    return {"held_out": model.share_right(held_out()), "general": model.share_right(GENERAL)}


def difference(answers: list[Answer], others: list[Answer]) -> dict[str, Any]:
    """Return how many answers are the same, and by how much the log-probabilities of these differ."""
    pairs = [(one, other) for one, other in zip(answers, others, strict=True) if one.text == other.text]
    apart = [
        abs(a - b) for one, other in pairs for a, b in zip(one.log_probabilities, other.log_probabilities, strict=False)
    ]
    return {
        "questions": len(answers),
        "same_answer": len(pairs),
        "same_prompt_length": sum(
            len(one.prompt) == len(other.prompt) for one, other in zip(answers, others, strict=True)
        ),
        "log_probability_apart": {"largest": max(apart, default=0.0), "mean": sum(apart) / max(len(apart), 1)},
        "other_answers": [
            [one.text, other.text] for one, other in zip(answers, others, strict=True) if one.text != other.text
        ],
    }


def trained(work: Path) -> dict[str, Any]:
    """Train in every way, and measure what was learned, what stays known, and what the number of processes changes."""
    base = fetch_model(work / "model")
    results: dict[str, Any] = {"base": scores(PlainModel(base))}
    for name in ("lora", "lora_two", "full", "dpo"):
        folder = run(work, name)
        over = {"lora": base, "lora_two": base, "full": None, "dpo": work / "outputs/lora/merged"}[name]
        results[name] = {**scores(PlainModel(folder, over)), "losses": losses(folder)}
        print(name, {key: value for key, value in results[name].items() if key != "losses"}, flush=True)
    history = json.loads((work / "outputs/dpo/trainer_state.json").read_text())["log_history"]
    results["dpo"]["accuracies"] = [line["rewards/accuracies"] for line in history if "rewards/accuracies" in line]
    for name, initial in (("short", None), ("short_full", base)):
        run(work, name), run(work, f"{name}_two")
        results[f"{name}_two"] = {"update_apart": update_difference(work, f"{name}_two", name, initial)}
    return results


def merged(work: Path) -> dict[str, Any]:
    """Compare the merged model with the adapter, and the kit's chat with generate() of Transformers."""
    folder, base = run(work, "lora"), work / "model"
    adapter = list(PlainModel(folder, base).answers(SERVED, LENGTH))
    whole = list(PlainModel(export(folder, "merged")).answers(SERVED, LENGTH))
    chats = []
    for question in SERVED[:3] + SERVED[-2:]:
        options = ["--ask", question, "--temperature", "0", "--max_new_tokens", str(LENGTH)]
        command = [sys.executable, "-m", "unsloth_ddp.chat", str(folder), *options]
        chats.append(subprocess.run(command, cwd=REPO, capture_output=True, text=True).stdout.strip())
    return {"merged": difference(adapter, whole), "chat": [chats, [a.text for a in adapter[:3] + adapter[-2:]]]}


@contextlib.contextmanager
def server(command: list[str], log: Path) -> Iterator[str]:
    """Start a server on the loopback; yield its address once it answers.

    Raises:
        SystemExit: it ends before.
    """
    port = str(20000 + os.getpid() % 10000)
    address = f"http://127.0.0.1:{port}"
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as file:
        command = [*command, "--host", "127.0.0.1", "--port", port]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environ, start_new_session=True)
        try:
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5) as reply:
                    if reply.status == 200:
                        break
                if process.poll() is not None:
                    raise SystemExit(f"the server ended:\n{log.read_text()[-3000:]}")
                time.sleep(1)
            yield address
        finally:
            kill_tree(process)


def ask(address: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post a request to a server and return its answer."""
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


def served(address: str, name: str, questions: list[str]) -> list[Answer]:
    """Return a server's answers in a chat, without sampling."""
    answers = []
    for question in questions:
        chat = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": LENGTH}
        reply = ask(address, "/v1/chat/completions", {"model": name, "logprobs": True, **chat})
        choice = reply["choices"][0]
        values = [token["logprob"] for token in choice["logprobs"]["content"]]
        answers.append(Answer(choice["message"]["content"].strip(), [0] * reply["usage"]["prompt_tokens"], [], values))
    return answers


def vllm(work: Path, program: str) -> dict[str, Any]:
    """Serve base, adapter and merged model with vLLM as `export --to vllm` says, and compare their answers."""
    folder, base, results = run(work, "lora"), work / "model", {}
    export(folder, "vllm")
    printed = shlex.split((work / "outputs/lora-vllm.txt").read_text().splitlines()[-1])
    for command, cases in (
        (
            printed,
            {str(base): PlainModel(base, None, torch.bfloat16), "lora": PlainModel(folder, base, torch.bfloat16)},
        ),
        (["vllm", "serve", str(export(folder, "merged"))], {}),
    ):
        cases = cases or {command[-1]: PlainModel(Path(command[-1]), None, torch.bfloat16)}
        with server(
            [program, *command[1:], "--max-model-len", "1024", "--enforce-eager"], work / "vllm.log"
        ) as address:
            for name, model in cases.items():
                expected, answers = list(model.answers(SERVED, LENGTH)), served(address, name, SERVED)
                key = {str(base): "base", "lora": "adapter"}.get(name, "merged")
                results[key] = {**difference(expected, answers), "command": shlex.join(command)}
                print(key, results[key], flush=True)
    return results


def gguf(work: Path, llama_cpp: str) -> dict[str, Any]:
    """Convert the run to GGUF, and compare what llama.cpp's server answers with it."""
    folder, results = run(work, "lora"), {}
    expected = list(PlainModel(folder, work / "model").answers(SERVED, LENGTH))
    program = str(Path(llama_cpp) / "build/bin/llama-server")
    for kind in ("f32", "q8_0"):
        target = folder / f"gguf-{kind}"
        if not target.exists():
            export(
                folder,
                "gguf",
                "--llama_cpp",
                llama_cpp,
                "--quantize",
                kind,
                "--ask",
                SERVED[0],
                "--output",
                str(target),
            )
        (file,) = target.glob("*.gguf")
        with server([program, "-m", str(file), "--jinja", "-c", "1024"], work / "llama.log") as address:
            results[kind] = difference(expected, served(address, "run", SERVED))
            print(kind, results[kind], flush=True)
    return results


def main() -> None:
    """Run the parts that are asked for, and add their results to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the model, runs and exports")
    parser.add_argument("--json", type=Path, required=True, help="where to write the results")
    parser.add_argument("--only", choices=("trained", "merged", "vllm", "gguf"), action="append", help="part to run")
    parser.add_argument("--vllm", help="vLLM's program, of an environment of its own")
    parser.add_argument("--llama_cpp", help="llama.cpp's folder, with llama-server built")
    options = parser.parse_args()
    work = options.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    results = json.loads(options.json.read_text()) if options.json.is_file() else {}
    for part in options.only or ("trained", "merged"):
        made = {
            "trained": lambda: trained(work),
            "merged": lambda: merged(work),
            "vllm": lambda: vllm(work, options.vllm),
            "gguf": lambda: gguf(work, options.llama_cpp),
        }[part]()
        results[part] = json.loads(json.dumps(made).replace(str(work), "WORK"))
        write_json(options.json, results)


if __name__ == "__main__":
    main()
