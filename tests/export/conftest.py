"""A llama.cpp whose programs write down what they were given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

CONVERTER = """
import json, os, sys
from pathlib import Path
model, out = Path(sys.argv[1]), Path(sys.argv[sys.argv.index("--outfile") + 1])
if os.environ.get("CONVERTER_SAYS"):
    out.write_text("half")
    sys.exit(os.environ["CONVERTER_SAYS"])
read = lambda name: json.loads((model / name).read_text())
given = {"type": sys.argv[-1], "eos": read("tokenizer_config.json")["eos_token"]}
given |= {"template": (model / "chat_template.jinja").is_file()}
given |= {"weights": (model / "model.safetensors").is_file(), "stops": read("generation_config.json")["eos_token_id"]}
out.write_text(json.dumps(given))
"""
QUANTIZER = """
import sys
from pathlib import Path
Path(sys.argv[2]).write_text(sys.argv[3] + " of " + Path(sys.argv[1]).read_text())
"""
ANSWERER = """
import os, sys
if os.environ.get("ANSWERER_FAILS"):
    print("loading", "unknown tensor", sep="\\n", file=sys.stderr)
    sys.exit(3)
print("I was asked:", sys.argv[sys.argv.index("-p") + 1], "[end of text]\\n\\n")
"""


@pytest.fixture
def llama_cpp(tmp_path: Path) -> Path:
    """A folder laid out as llama.cpp's with a build in it."""
    folder = tmp_path / "llama.cpp"
    programs = folder / "build" / "bin"
    programs.mkdir(parents=True)
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER)
    for name, text in (("llama-quantize", QUANTIZER), ("llama-completion", ANSWERER)):
        (programs / name).write_text(f"#!{sys.executable}\n{text}")
        (programs / name).chmod(0o755)
    return folder
