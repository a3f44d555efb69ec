"""Find which part of ChatML keeps the demo's model from answering, by templates that differ in one part each.

    uv run python -m benchmarks.correctness.demo_templates --out DIR --json FILE

Runs that DIR holds already are not repeated. Eleven runs of the demo; on an idle CPU core a run takes under a minute,
those of ten epochs five.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.runs import REPO

OWN_END, CHATML_END = "<|end|>", "<|im_end|>"


class Variant(NamedTuple):
    """A chat template of the demo and the options of its run.

    Args:
        marks: of the turns: "own", one token each, or "chatml", which the demo's tokenizer splits.
        before_answer: text between the mark of the assistant's turn and the answer.
        end: text that ends an answer.
    """

    marks: str
    before_answer: str
    end: str
    max_length: int = 128
    epochs: int = 3


VARIANTS = {
    "own": Variant("own", "", OWN_END),
    "own_newline": Variant("own", "\n", OWN_END),
    "own_newline_space": Variant("own", "\n ", OWN_END),
    "own_im_end": Variant("own", "", CHATML_END),
    "chatml": Variant("chatml", "\n", CHATML_END),
    "chatml_own_end": Variant("chatml", "\n", OWN_END),
    "chatml_512": Variant("chatml", "\n", CHATML_END, 512),
    "chatml_space": Variant("chatml", "\n ", CHATML_END),
    "chatml_space_512": Variant("chatml", "\n ", CHATML_END, 512),
    "own_im_end_10ep": Variant("own", "", CHATML_END, 128, 10),
    "chatml_10ep": Variant("chatml", "\n", CHATML_END, 512, 10),
}


def template(variant: Variant) -> str:
    """Return the variant's template in Jinja; a space before an answer is supervised with it."""
    own_marks = variant.marks == "own"
    mark = "'<|' + message['role'] + '|>'" if own_marks else "'<|im_start|>' + message['role'] + '\\n'"
    behind = "" if own_marks else "\\n"
    turn_end = variant.end if own_marks else CHATML_END + behind
    assistant = "<|assistant|>" if own_marks else "<|im_start|>assistant"
    space = " " if variant.before_answer.endswith(" ") else ""
    begin = assistant + variant.before_answer.rstrip(" ").replace("\n", "\\n")
    return (
        ("{{- bos_token }}" if own_marks else "")
        + "{%- for message in messages %}{%- if message['role'] == 'assistant' %}"
        + f"{{{{- '{begin}' }}}}{{%- generation %}}{{{{- '{space}' + message['content'] + '{variant.end}' }}}}"
        + f"{{%- endgeneration %}}{{{{- '{behind}' }}}}"
        + f"{{%- else %}}{{{{- {mark} + message['content'] + '{turn_end}' }}}}{{%- endif %}}{{%- endfor %}}"
        + f"{{%- if add_generation_prompt %}}{{{{- '{begin}' }}}}{{%- endif %}}"
    )


def train(name: str, variant: Variant, out: Path) -> dict[str, Any]:
    """Train the demo with one template and return what its summary says."""
    summary = out / name / "summary.json"
    if not summary.is_file():
        path = out / f"{name}.jinja"
        path.write_text(template(variant))
        command = [sys.executable, "train_ddp.py", "--config", "recipes/demo.yaml", "--use_cpu"]
        command += ["--chat_template", str(path), "--output_dir", str(out), "--run_name", name]
        command += ["--max_length", str(variant.max_length), "--num_train_epochs", str(variant.epochs)]
        subprocess.run(command, cwd=REPO, check=True)
    summary_values = json.loads(summary.read_text())
    names = ("demo_accuracy_before", "demo_accuracy_after", "eval_loss", "train_loss")
    return {**variant._asdict(), **{key: summary_values.get(key) for key in names}}


def main() -> None:
    """Run every variant and write the answers to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the runs")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=[*VARIANTS], metavar="NAME", help="[all]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="result")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = {name: train(name, VARIANTS[name], options.out) for name in options.only}
    for name, result in results.items():
        print(f"{name:<18} {result['demo_accuracy_after']:.1%}")
    if options.json:
        options.json.write_text(json.dumps({"device": "CPU, one process, fp32", "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
