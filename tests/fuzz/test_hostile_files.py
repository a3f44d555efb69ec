"""Hostile datasets, model folders, settings and options, each given to a whole run."""

import gzip
import io
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import DEMO_MODEL, demo_rows, write_jsonl
from tests.fuzz.hostile import BROKEN, TRAINS, Act, ended
from tests.unpickled import Touch

# Whole runs, over a minute of them.
pytestmark = pytest.mark.slow

CHAT = b'{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}\n'
SAFE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Make a folder with rows and a model; code that is run would make the folder `ran` in it."""
    write_jsonl(tmp_path / "rows.jsonl", demo_rows()[:4])
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    return tmp_path


# ---- rows ----


def parquet(**columns: Any) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def text(value: str) -> bytes:
    return b'{"text": ' + value.encode() + b"}\n"


GOOD_PARQUET = parquet(text=["a story of a fox"] * 50)
FILES: dict[str, tuple[str, bytes, str]] = {
    "gzip under another name": ("a.jsonl", gzip.compress(CHAT), "a.jsonl"),
    "gzip cut off": ("a.jsonl.gz", gzip.compress(CHAT * 500)[:40], "a.jsonl.gz"),
    "zip bomb": ("a.json.gz", gzip.compress(b"[" + b" " * 30_000_000), "a.json.gz"),
    "parquet cut off": ("a.parquet", GOOD_PARQUET[:-9], "a.parquet"),
    "parquet without its head": ("a.parquet", GOOD_PARQUET[9:], "a.parquet is not readable Parquet after row 0"),
    "parquet whose footer is said to be huge": ("a.parquet", GOOD_PARQUET[:-8] + b"\xff\xff\xff\x7fPAR1", "a.parquet"),
    "parquet with a page overwritten": ("a.parquet", b"PAR1" + b"\xff" * 60 + GOOD_PARQUET[64:], "a.parquet is not "
        "readable Parquet after row 0"),
    "parquet without a row": ("a.parquet", parquet(text=pyarrow.array([], pyarrow.string())), "a.parquet"),
    "parquet of bytes": ("a.parquet", parquet(text=[b"\xff\xfe"] * 3), "a.parquet"),
    "jsonl under the name of a parquet": ("a.parquet", CHAT, "a.parquet"),
    "parquet under the name of a jsonl": ("a.jsonl", GOOD_PARQUET, "a.jsonl"),
    "nothing": ("a.jsonl", b"", "a.jsonl"),
    "lines without anything": ("a.jsonl", b"\n" * 100_000, "a.jsonl"),
    "only a byte order mark": ("a.jsonl", b"\xef\xbb\xbf", "a.jsonl"),
    "a byte order mark": ("a.jsonl", b"\xef\xbb\xbf" + CHAT * 4, TRAINS),
    "a byte order mark in the middle": ("a.jsonl", CHAT + b"\xef\xbb\xbf" + CHAT, "a.jsonl:2"),
    "NUL bytes alone": ("a.jsonl", b"\0" * 1_000_000, "a.jsonl:1"),
    "NUL bytes in a row": ("a.jsonl", CHAT + b'{"text": "a\0b"}\n', "a.jsonl:2"),
    "UTF-16": ("a.jsonl", CHAT.decode().encode("utf-16"), "a.jsonl"),
    "UTF-32": ("a.jsonl", CHAT.decode().encode("utf-32"), "a.jsonl"),
    "Latin-1 in the third row": ("a.jsonl", CHAT * 2 + '{"text": "é"}\n'.encode("latin-1"), "a.jsonl:3"),
    "two encodings in a row": ("a.jsonl", '{"text": "é'.encode() + 'é"}\n'.encode("latin-1"), "a.jsonl:1"),
    "overlong UTF-8": ("a.jsonl", b'{"text": "\xc0\xaf"}\n', "a.jsonl:1"),
    "half of a character": ("a.jsonl", text('"\\ud83d"'), "a.jsonl:1"),
    "nested 100,000 deep": ("a.jsonl", text("[" * 100_000 + "]" * 100_000), "a.jsonl:1"),
    "objects nested 100,000 deep": ("a.json", b'[{"text": ' * 100_000, "a.json"),
    "never closed": ("a.json", b"[" * 100_000, "a.json"),
    "a number of 100,000 digits": ("a.jsonl", text("1" * 100_000), "a.jsonl:1"),
    "a number beyond a double": ("a.jsonl", text("1e999999"), "a.jsonl:1"),
    "NaN for a text": ("a.jsonl", text("NaN"), "a.jsonl:1"),
    "infinity for a role": ("a.jsonl", b'{"messages": [{"role": Infinity, "content": "x"}]}\n', "a.jsonl:1"),
    "a key twice": ("a.jsonl", b'{"text": "a", "text": "b"}\n', "a.jsonl:1"),
    "a key twice in a turn": ("a.jsonl", CHAT.replace(b'"role": "user"', b'"role": "user", "role": "system"'),
        "a.jsonl:1"),
    "100,000 keys": ("a.jsonl", json.dumps({f"k{n}": n for n in range(100_000)}).encode(), "a.jsonl:1"),
    "a key of a megabyte": ("a.jsonl", json.dumps({"k" * 1_000_000: 1}).encode(), "a.jsonl:1"),
    "a role of a megabyte": ("a.jsonl", CHAT.replace(b"assistant", b"r" * 1_000_000), "a.jsonl:1"),
    "escape sequences in a key": ("a.jsonl", json.dumps({"\x1b[2J\r\n": 1}).encode(), "a.jsonl:1"),
    "a pickle": ("a.jsonl", pickle.dumps(Touch(Path("ran"))), "a.jsonl:1"),
    "turns in a list of lists": ("a.jsonl", b'{"messages": [[[]]]}\n', "a.jsonl:1"),
    "100,000 turns without content": ("a.jsonl", json.dumps({"messages": [{}] * 100_000}).encode(), "a.jsonl:1"),
    "one unclosed quote": ("a.csv", b'prompt,completion\na,b\nc,"d\n' + b"e,f\n" * 300_000, r"a\.csv:3"),
    "one quote in the header": ("a.csv", b'prompt,"completion\n' + b"a,b\n" * 1000, r"a\.csv"),
    "a column twice": ("a.csv", b"text,text\na,b\n", r"a\.csv"),
    "too many cells": ("a.csv", b"text\n" + b"," * 1_000_000 + b"\n", r"a\.csv"),
    "NUL bytes in a table": ("a.csv", b"text\na\0b\n", r"a\.csv"),
    "a cell of 300,000 characters": ("a.csv", b"text\n" + b"x" * 300_000 + b"\n", TRAINS),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_rows(place: Path, name: str) -> None:
    file, content, said = FILES[name]
    (place / file).write_bytes(content)
    ended(place, f"--dataset {file}", said)


def mode(path: Path, bits: int) -> None:
    path.chmod(bits)


def truncate_to_a_terabyte(path: Path) -> None:
    os.truncate(path, 1 << 40)  # takes no room on the disk


PLACES: dict[str, tuple[Act, str]] = {
    "a device without end": (lambda at: (at / "a.jsonl").symlink_to("/dev/zero"), "a.jsonl"),
    "a device without bytes": (lambda at: (at / "a.jsonl").symlink_to("/dev/null"), "a.jsonl"),
    "memory of the process": (lambda at: (at / "a.jsonl").symlink_to("/proc/self/mem"), "a.jsonl"),
    "a pipe nobody writes": (lambda at: os.mkfifo(at / "a.jsonl"), "a.jsonl"),
    "a link to itself": (lambda at: (at / "a.jsonl").symlink_to("a.jsonl"), "a.jsonl"),
    "a link to nothing": (lambda at: (at / "a.jsonl").symlink_to("b.jsonl"), "a.jsonl"),
    "a folder without a file": (lambda at: (at / "a.jsonl").mkdir(), "a.jsonl"),
    "a folder that holds itself": (lambda at: ((at / "a.jsonl").mkdir(), (at / "a.jsonl" / "b").symlink_to(at)),
        "a.jsonl"),
    "a file nobody may read": (lambda at: ((at / "a.jsonl").write_bytes(CHAT), mode(at / "a.jsonl", 0)),
        "a.jsonl.*[Pp]ermission"),
    "a folder nobody may enter": (lambda at: ((at / "a.jsonl").mkdir(), mode(at / "a.jsonl", 0)),
        "a.jsonl is a folder"),
    "a line of a terabyte": (lambda at: ((at / "a.jsonl").write_bytes(b'{"'), truncate_to_a_terabyte(at / "a.jsonl")),
        "a.jsonl:1"),
    "not there": (lambda at: None, "a.jsonl: there is no such file"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_what_stands_in_the_place_of_rows(place: Path, name: str) -> None:
    act, said = PLACES[name]
    act(place)
    try:
        ended(place, "--dataset a.jsonl", said)
    finally:
        if not (place / "a.jsonl").is_symlink() and (place / "a.jsonl").is_dir():
            mode(place / "a.jsonl", 0o700)


CHANGES = {
    "rm rows.jsonl": "rows.jsonl",
    "truncate -s 0 rows.jsonl": "rows.jsonl",
    "truncate -s 300 rows.jsonl": "rows.jsonl:3",
    "truncate -s 1T rows.jsonl": "rows.jsonl:5",
    "rm rows.jsonl && mkfifo rows.jsonl": "rows.jsonl",
    "rm rows.jsonl && ln -s /dev/zero rows.jsonl": "rows.jsonl",
    "rm model/model.safetensors": "model",
    "truncate -s 5000 model/model.safetensors": "model",
    "rm model/tokenizer.json": "tokenizer",
    "truncate -s 900 model/tokenizer.json": "tokenizer",
    "echo [] >model/config.json": "model",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_looks(place: Path, change: str) -> None:
    ended(place, "", CHANGES[change], change)


# ---- models ----


def config(**changes: Any) -> Act:
    return json_file("config.json", **changes)


def json_file(name: str, **changes: Any) -> Act:
    """Change keys of a JSON file of the model; None removes the key."""

    def act(place: Path) -> None:
        path = place / "model" / name
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return act


def put(name: str, content: bytes | str) -> Act:
    return lambda place: (place / "model" / name).write_bytes(content.encode() if isinstance(content, str) else content)


def header(change: Callable[[dict[str, Any]], object], said: int | None = None) -> Act:
    """Change the header of the weights, or the length that is said of it."""

    def act(place: Path) -> None:
        path = place / "model" / SAFE
        whole = path.read_bytes()
        (length,) = struct.unpack("<Q", whole[:8])
        held = json.loads(whole[8 : 8 + length])
        change(held)
        made = json.dumps(held).encode()
        path.write_bytes(struct.pack("<Q", len(made) if said is None else said) + made + whole[8 + length :])

    return act


def each(held: dict[str, Any]) -> list[dict[str, Any]]:
    return [value for key, value in held.items() if key != "__metadata__"]


def index(name: str) -> Act:
    """Put the weights in a shard, and give an index that names another file for each."""

    def act(place: Path) -> None:
        weights = load_file(place / "model" / SAFE)
        (place / "model" / SAFE).rename(place / "outside.safetensors")
        save_file(weights, place / "model" / "model-00001-of-00001.safetensors")
        (place / "model" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights, name)}))

    return act


def damaged_tokenizer(change: Callable[[dict[str, Any]], object]) -> Act:
    def act(place: Path) -> None:
        path = place / "model" / "tokenizer.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return act


def template(content: str) -> Act:
    return put("chat_template.jinja", content)


ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
LOOP = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
MODELS: dict[str, tuple[Act, str]] = {
    "config is a list": (put("config.json", "[]"), "config.json"),
    "config is nothing": (put("config.json", ""), "config.json"),
    "config nested too deep": (put("config.json", "[" * 100_000), "config.json"),
    "config of bytes": (put("config.json", b"\xff\xfe\0"), "config.json"),
    "config is a pipe": (lambda at: ((at / "model/config.json").unlink(), os.mkfifo(at / "model/config.json")),
        "config.json"),
    "config is a device": (lambda at: ((at / "model/config.json").unlink(),
        (at / "model/config.json").symlink_to("/dev/zero")), "config.json"),
    "config is a folder": (lambda at: ((at / "model/config.json").unlink(), (at / "model/config.json").mkdir()),
        "config.json"),
    "no config": (lambda at: (at / "model/config.json").unlink(), "config.json"),
    "no kind": (config(model_type=None), "model"),
    "no such kind": (config(model_type="no such kind"), "no such kind"),
    "kind is a number": (config(model_type=7), "model"),
    "no architecture": (config(architectures=None), f"{TRAINS}|model"),
    "no such architecture": (config(architectures=["No"]), f"{TRAINS}|model"),
    "size is a text": (config(hidden_size="wide"), "model model cannot be loaded: .*hidden_size.*; correct the "
        "model's files"),
    "size is negative": (config(hidden_size=-128), "model model cannot be loaded: .*-128.*; correct the model's files"),
    "size is zero": (config(hidden_size=0), "model"),
    "size is a fraction": (config(hidden_size=128.5), "model model cannot be loaded: .*hidden_size.*; correct the "
        "model's files"),
    "size is enormous": (config(hidden_size=10**9), "sizes of its weights differ"),
    "inner size is enormous": (config(intermediate_size=10**12), "intermediate_size|model"),
    "heads are enormous": (config(num_attention_heads=10**9), "model"),
    "no heads": (config(num_attention_heads=0), "model model cannot be loaded"),
    "layers are negative": (config(num_hidden_layers=-1), "model"),
    "layers are enormous": (config(num_hidden_layers=10**9), "num_hidden_layers 1,000,000,000"),
    "vocabulary is enormous": (config(vocab_size=10**10), "vocab_size"),
    "vocabulary is negative": (config(vocab_size=-5), "model"),
    "positions are enormous": (config(max_position_embeddings=10**12), f"{TRAINS}|max_position_embeddings|model"),
    "positions are a text": (config(max_position_embeddings="far"), "model model cannot be loaded: "
        ".*max_position_embeddings"),
    "rope of another type": (config(rope_parameters={"rope_type": "no", "rope_theta": 1}), "model"),
    "rope is a list": (config(rope_parameters=[1]), "model"),
    "dtype of no torch": (config(dtype="float7"), "model"),
    "activation is code": (config(hidden_act="__import__('os').mkdir('ran')"), "model model cannot be loaded: .*; "
        "correct the model's files"),
    "quantized in a way nobody knows": (config(quantization_config={"quant_method": "no"}), "model"),
    "quantized by a list": (config(quantization_config=[1]), "model"),
    "its own code": (lambda at: (config(model_type="evil", auto_map={"AutoConfig": "evil.C"})(at),
        put("evil.py", "import "
        "os; os.mkdir('ran')")(at)), "trust_remote_code"),
    "weights are nothing": (put(SAFE, b""), "model"),
    "weights are a text": (put(SAFE, b"weights" * 99), "model"),
    "weights are an LFS pointer": (put(SAFE, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"),
        "model"),
    "header said to be enormous": (header(lambda held: None, 1 << 62), "model"),
    "header said to be too short": (header(lambda held: None, 20), "model"),
    "offsets beyond the file": (header(lambda held: [one.update(data_offsets=[0, 1 << 40]) for one in each(held)]),
        "model"),
    "offsets are negative": (header(lambda held: each(held)[0].update(data_offsets=[-4, 4])), "model"),
    "offsets overlap": (header(lambda held: each(held)[1].update(data_offsets=each(held)[0]["data_offsets"])), "model"),
    "shape of another size": (header(lambda held: each(held)[0].update(shape=[3, 3])), "model"),
    "shape is enormous": (header(lambda held: each(held)[0].update(shape=[1 << 40, 1 << 40])), "model"),
    "dtype nobody knows": (header(lambda held: each(held)[0].update(dtype="F7")), "model"),
    "dtype of integers": (header(lambda held: [one.update(dtype="I32") for one in each(held)]), BROKEN),
    "weights of other names": (lambda at: save_file({"a": torch.zeros(2)}, at / "model" / SAFE, {"format": "pt"}),
        "model"),
    "weights are NaN": (lambda at: save_file({k: v * float("nan") for k, v in load_file(at / "model" / SAFE).items()},
        at / "model" / SAFE, {"format": "pt"}), BROKEN),
    "index names a file above": (index("../outside.safetensors"), "outside.safetensors"),
    "index names a file of the system": (index("/etc/passwd"), "/etc/passwd"),
    "index names a file that is missing": (index("none.safetensors"), "none.safetensors"),
    "index names nothing": (index(""), "model"),
    "index is a list": (lambda at: (index("x")(at), put(INDEX, "[]")(at)), "model"),
    "tokenizer is nothing": (put("tokenizer.json", ""), "token"),
    "tokenizer is a list": (put("tokenizer.json", "[]"), "token"),
    "tokenizer cut off": (lambda at: os.truncate(at / "model/tokenizer.json", 900), "token"),
    "tokenizer without a model": (damaged_tokenizer(lambda held: held.pop("model")), "model model: its tokenizer "
        "cannot be loaded: .*; correct the model's files"),
    "tokenizer of another kind": (damaged_tokenizer(lambda held: held["model"].update(type="No")), "model model: its "
        "tokenizer cannot be loaded: .*; correct the model's files"),
    "tokenizer with an enormous id": (damaged_tokenizer(lambda held: held["model"]["vocab"].update({"zzzz": 1 << 31})),
        "gives "
        "'zzzz' the id 2147483648, but an id is"),
    "tokenizer with a negative id": (damaged_tokenizer(lambda held: held["model"]["vocab"].update({"zzzz": -1})),
        "gives "
        "'zzzz' the id -1, but an id is"),
    "tokenizer whose pattern is enormous": (damaged_tokenizer(lambda held: held.update(pre_tokenizer={"type": "Split",
        "pattern": {"Regex": "(" * 50_000}, "behavior": "Isolated", "invert": False})), "model "
        "model: its tokenizer cannot be loaded: .*; correct the model's files"),
    "tokenizer of a class nobody knows": (json_file("tokenizer_config.json", tokenizer_class="os.system"),
        f"{TRAINS}|token"),
    "tokenizer with its own code": (lambda at: (json_file("tokenizer_config.json",
        auto_map={"AutoTokenizer": ["evil.T", None]})(at), put("evil.py", "import "
        "os; os.mkdir('ran')")(at)), f"{TRAINS}|trust_remote_code"),
    "tokenizer config is a list": (put("tokenizer_config.json", "[]"), "token"),
    "template without end": (template(LOOP), "chat template"),
    "template that doubles": (template("{% set n = namespace(x='ab') %}"
            "{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}"), "chat "
        "template"),
    "template that raises": (template("{{ raise_exception('no\x1b[2J') }}"), "chat template|template"),
    "template that divides by zero": (template("{{ 1 / 0 }}"), "template"),
    "template that calls itself": (template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "template"),
    "template that does not end": (template("{% for m in messages %}"), "template"),
    "template that looks for classes": (template(ESCAPE), "template"),
    "template that includes a file": (template("{% include '/etc/passwd' %}"), "template"),
    "template is nothing": (template(""), f"{TRAINS}|template|supervised"),
    "template of a power": (template("{{ 9 ** 9 ** 9 }}"), "template"),
    "template of bytes": (put("chat_template.jinja", b"\xff\xfe"), "model model: its tokenizer cannot be loaded: "
        ".*utf-8"),
    "generation config is a list": (put("generation_config.json", "[]"), f"{TRAINS}|generation_config.json"),
    "generation config is text": (put("generation_config.json", '{"temperature": "hot"}'),
        f"{TRAINS}|generation_config|model"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(place: Path, name: str) -> None:
    act, said = MODELS[name]
    act(place)
    ended(place, "", said)


# ---- settings and options ----

SETTINGS: dict[str, tuple[str, str]] = {
    "anchors that double": ("a0: &a0 [1,1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)),
        "c.yaml"),
    "anchors in an option": ("trainer_args:\n  a0: &a0 [1,1]\n" + "".join(f"  a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n"
        for n in range(1, 40)), "trainer_args|c.yaml"),
    "an anchor of itself": ("trainer_args: &a {x: *a}", "c.yaml is not YAML: an alias"),
    "a tag that calls": ("trainer_args: !!python/object/apply:os.mkdir [ran]", "c.yaml"),
    "a tag that makes an object": ("model: !!python/object/new:pathlib.Path [x]", "c.yaml"),
    "a tag that imports": ("model: !!python/module:antigravity", "c.yaml"),
    "a key twice": ("seed: 1\nseed: 2\n", "seed is given twice"),
    "a key that is a list": ("[1]: 2\n", "c.yaml"),
    "a list": ("- seed\n", "c.yaml"),
    "two documents": ("seed: 1\n---\nseed: 2\n", "c.yaml"),
    "an unknown key": ("sed: 1\n", "did you mean seed|sed"),
    "a tab": ("seed:\t1\n\tx: 1\n", "c.yaml"),
    "a number of a list": ("seed: [1]\n", "seed"),
    "a truth of a number": ("packing: 3\n", "packing"),
    "a number that is a text": ("max_steps: many\n", "max_steps"),
    "a number of base sixty": ("max_steps: 1" + ":59" * 50_000, "max_steps"),
    "infinity": ("learning_rate: .inf\n", "learning_rate"),
    "NaN": ("learning_rate: .nan\n", "learning_rate"),
    "a date": ("run_name: 2020-01-01\n", f"run_name|{TRAINS}"),
    "a path with NUL": ('output_dir: "a\\0b"\n', "output_dir|c.yaml"),
    "nested too deep": ("x: " + "[" * 100_000, "c.yaml"),
    "more than a megabyte": ("# " + "x" * 2_000_000, "c.yaml"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(place: Path, name: str) -> None:
    content, said = SETTINGS[name]
    (place / "c.yaml").write_text(content)
    argv = "--config c.yaml"
    ended(place, argv, said)


WORDS = {
    "--lora_r -1": "lora_r", "--lora_r 1e9": "lora_r", "--max_length 0": "max_length", "--seed x": "seed",
    "--learning_rate -1": "learning_rate", "--learning_rate 1e400": "learning_rate",
        "--num_train_epochs nan": "num_train_epochs",
    "--global_batch_size 99999999999999999999": "global_batch_size", "--optim 'os.system(1)'": "optim",
    "--lr_scheduler_type ../x": "lr_scheduler_type", "--trainer_args '{\"a\": NaN}'": "trainer_args",
    "--trainer_args '[1]'": "trainer_args", "--no_such 1": "no_such", "--seed": "seed", "--run_name ''": "run_name",
    "--run_name ../x": "run_name", f"--run_name {'x' * 300}": "run_name", "--output_dir /proc/x": "/proc/x",
    "--resume /dev/zero": "/dev/zero", "--chat_template /dev/zero": "/dev/zero",
        "--lora_target_modules '('": "lora_target_modules",
    "--lora_target_modules '(a+)+$'": "lora_target_modules", "--max_time 1:2:3:4:5": "max_time",
    "--save_total_limit -3": "save_total_limit", "--dataset_split 'train[999%]'": "dataset_split|train", "--packing "
        "sometimes": "packing",
}  # fmt: skip


@pytest.mark.parametrize("options", WORDS)
def test_options(place: Path, options: str) -> None:
    ended(place, options, WORDS[options])
