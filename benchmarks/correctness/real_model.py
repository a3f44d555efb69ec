"""Fine-tune a real model on invented facts, and compare what the run, its exports and real servers answer.

    python -m benchmarks.correctness.real_model --work DIR --json FILE
    python -m benchmarks.correctness.real_model --work DIR --json FILE --only vllm --vllm V/bin/vllm
    python -m benchmarks.correctness.real_model --work DIR --json FILE --only gguf --llama_cpp llama.cpp

The weights come from the package registry (benchmarks/common/real_model.py). Runs that DIR holds are not made again,
and results that FILE holds stay.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.real_model import GENERAL, LENGTH, RECIPE, Answer, PlainModel, fetch_model, held_out
from benchmarks.common.runs import REPO, launch_command, losses, run_logged, train, update_difference
from unsloth_ddp.parity.processes import kill_tree
from unsloth_ddp.utils.files.json import write_json

FULL = "--method full --learning_rate 1e-4"
SHORT = "--max_steps 2 --compare_answers 0 --eval_dataset none"
DPO = "--task dpo --dataset demo/towns_pairs.jsonl --learning_rate 1e-4 --max_steps 8 --logging_steps 1"
# The number of processes of each run, and its options besides those of the recipe.
RUNS = {
    "lora": (1, ""),
    "full": (1, FULL),
    "dpo": (1, f"{DPO} --compare_answers 0 --eval_dataset none"),
    "short": (1, SHORT),
    "short_two": (2, SHORT),
    "short_full": (1, f"{SHORT} {FULL}"),
    "short_full_two": (2, f"{SHORT} {FULL}"),
}
# Asked of servers: some that the run learned, and some that it knew.
SERVED = [*list(held_out())[:8], *list(GENERAL)[:4]]


def run(work: Path, name: str) -> Path:
    """Return the folder of a finished run, which is made if it is not there."""
    folder = work / "outputs" / name
    if (folder / "summary.json").is_file():
        return folder
    processes, options = RUNS[name]
    script = [sys.executable] if processes == 1 else launch_command("cpu.yaml", processes)
    base = merge(run(work, "lora")) if name == "dpo" else fetch_model(work / "model")
    command = [*script, "train_ddp.py", "--config", str(RECIPE), "--model", str(base), *options.split()]
    result = train(command, name, work, limit=7200)
    if result["exit_code"]:
        raise SystemExit(f"{name} failed:\n{result['log']}")
    return folder


def export(folder: Path, options: str, name: str) -> Path:
    """Return the folder `name` of a run's export, which is made if it is not there, with its output beside the run."""
    target, log = folder / name, folder.parent / f"{folder.name}-{name}.log"
    if not log.is_file():
        command = [sys.executable, "-m", "unsloth_ddp.export", str(folder), *options.split(), "--output", str(target)]
        if run_logged(command, aside := log.with_suffix(".partial"), limit=1800):
            raise SystemExit(f"{options} failed:\n{aside.read_text()}")
        aside.rename(log)
    return target


def merge(folder: Path) -> Path:
    """Return the merged model of a run."""
    return export(folder, "--to merged", "merged")


def scores(model: PlainModel) -> dict[str, Any]:
    """Return the share of held-out questions that are answered, and of those that the base model answers."""
    return {"held_out": model.share_right(held_out()), "general": model.share_right(GENERAL)}


def difference(answers: list[Answer], others: list[Answer]) -> dict[str, Any]:
    """Return which answers are not the same, and by how much the log-probabilities of the others differ."""
    pairs = list(zip(answers, others, strict=True))
    same = [(a.log_probabilities, b.log_probabilities) for a, b in pairs if a.text == b.text]
    apart = [abs(a - b) for pair in same for a, b in zip(*pair, strict=False)] or [0.0]
    return {
        "questions": len(pairs),
        "same_answer": len(same),
        "same_prompt_length": sum(len(a.prompt) == len(b.prompt) for a, b in pairs),
        "log_probability_apart": {"largest": max(apart), "mean": sum(apart) / len(apart)},
        "other_answers": [[a.text, b.text] for a, b in pairs if a.text != b.text],
    }


def trained(work: Path) -> dict[str, Any]:
    """Train in every way, and measure what was learned, what stays known, and what the number of processes changes."""
    base = fetch_model(work / "model")
    results: dict[str, Any] = {"base": scores(PlainModel(base))}
    for name in ("lora", "full", "dpo"):
        folder = run(work, name)
        over = {"lora": base, "full": None, "dpo": work / "outputs/lora/merged"}[name]
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
    adapter = PlainModel(folder, base).answers(SERVED)
    whole = PlainModel(merge(folder)).answers(SERVED)
    chats = []
    for question in SERVED[:3] + SERVED[-2:]:
        options = ["--ask", question, "--temperature", "0", "--max_new_tokens", str(LENGTH)]
        command = [sys.executable, "-m", "unsloth_ddp.chat", str(folder), *options]
        chats.append(subprocess.run(command, cwd=REPO, capture_output=True, text=True).stdout.strip())
    return {"merged": difference(adapter, whole), "chat": [chats, [a.text for a in adapter[:3] + adapter[-2:]]]}


@contextlib.contextmanager
def server(command: list[str], log: Path) -> Iterator[int]:
    """Start a server on the loopback; yield its port once it answers.

    Raises:
        SystemExit: it ends before.
    """
    port = 20000 + os.getpid() % 10000
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as file:
        command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environ, start_new_session=True)
        try:
            while not is_up(port):
                if process.poll() is not None:
                    raise SystemExit(f"the server ended:\n{log.read_text()[-3000:]}")
                time.sleep(1)
            yield port
        finally:
            kill_tree(process)


def is_up(port: int) -> bool:
    """Return whether a server says that it is ready."""
    with contextlib.suppress(OSError, HTTPException):
        return request(port, "GET", "/health").status == 200
    return False


def request(port: int, method: str, path: str, body: Any = None) -> HTTPResponse:
    """Return the reply of a server on the loopback."""
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def served(port: int, name: str) -> list[Answer]:
    """Return a server's answers in chats of one question, without sampling."""

    def answer(question: str) -> Answer:
        chat = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": LENGTH}
        reply = json.load(request(port, "POST", "/v1/chat/completions", {"model": name, "logprobs": True, **chat}))
        choice = reply["choices"][0]
        values = [token["logprob"] for token in choice["logprobs"]["content"]]
        return Answer(choice["message"]["content"].strip(), [0] * reply["usage"]["prompt_tokens"], [], values)

    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(answer, SERVED))


def vllm(work: Path, program: str) -> dict[str, Any]:
    """Serve base, adapter and merged model with vLLM as `export --to vllm` says, and compare their answers."""
    folder, base, results = run(work, "lora"), work / "model", {}
    export(folder, "--to vllm", "vllm")
    printed = shlex.split((work / "outputs/lora-vllm.log").read_text().splitlines()[-1])
    whole = str(merge(folder))
    for command, names in (
        (printed, {str(base): "base", "lora": "adapter"}),
        (["vllm", "serve", whole], {whole: "merged"}),
    ):
        with server([program, *command[1:], "--max-model-len", "1024", "--enforce-eager"], work / "vllm.log") as port:
            answers = {name: served(port, name) for name in names}
        for name, kind in names.items():
            model = (
                PlainModel(folder, base, torch.bfloat16)
                if kind == "adapter"
                else PlainModel(Path(name), None, torch.bfloat16)
            )
            results[kind] = {"command": shlex.join(command), **difference(model.answers(SERVED), answers[name])}
            print(kind, results[kind], flush=True)
    return results


def gguf(work: Path, llama_cpp: str) -> dict[str, Any]:
    """Convert the run to GGUF, and compare what llama.cpp's server answers with it."""
    folder, results = run(work, "lora"), {}
    expected = PlainModel(folder, work / "model").answers(SERVED)
    program = str(Path(llama_cpp) / "build/bin/llama-server")
    for kind in ("f32", "bf16", "q8_0"):
        target = export(folder, f"--to gguf --llama_cpp {llama_cpp} --quantize {kind}", f"gguf-{kind}")
        (file,) = target.glob("*.gguf")
        with server([program, "-m", str(file), "--jinja", "-c", "1024"], work / "llama.log") as port:
            results[kind] = difference(expected, served(port, "run"))
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
        outcome = {
            "trained": lambda: trained(work),
            "merged": lambda: merged(work),
            "vllm": lambda: vllm(work, options.vllm),
            "gguf": lambda: gguf(work, options.llama_cpp),
        }[part]()
        results[part] = json.loads(json.dumps(outcome).replace(str(work), "WORK"))
        write_json(options.json, results)


if __name__ == "__main__":
    main()
