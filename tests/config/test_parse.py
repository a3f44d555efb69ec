"""Settings from YAML and the command line: what wins, what is refused, and in which words."""

from __future__ import annotations

import dataclasses
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsloth_ddp.config.command_line import make_command_parser, make_parser
from unsloth_ddp.config.options import OPTIONS, TOPICS, DataSettings, Settings
from unsloth_ddp.config.parse import DEMO_RECIPE, parse_settings, read_config
from unsloth_ddp.config.upstream_names import installed_trackers, known_names
from unsloth_ddp.config.values import convert_value
from unsloth_ddp.utils.errors import UserError

REPO = Path(__file__).resolve().parents[2]
GIVEN = ["--model", "m", "--dataset", "d"]


def refusal(*argv: str) -> str:
    with pytest.raises(UserError) as refused:
        parse_settings(list(argv))
    return str(refused.value)


def test_with_no_arguments_the_demo_is_run_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = parse_settings([])
    assert (Path(str(settings.model)) / "config.json").is_file()
    assert all(Path(source).is_file() for source in settings.dataset + settings.eval_dataset)
    assert parse_settings(["--max_steps", "3"]).model == settings.model
    assert "No training data" in refusal("--model", "m")


def test_the_command_line_wins_over_the_file_and_the_file_over_the_default(config: Any) -> None:
    path = config("model: m\ndataset: [a.jsonl, b.jsonl]\nlora_r: 8\nlearning_rate: 1e-3\n")
    settings = parse_settings(["--config", str(path), "--learning_rate=5e-5", "--dataset", "c.jsonl"])
    assert (settings.lora_r, settings.learning_rate, settings.dataset) == (8, 5e-5, ["c.jsonl"])
    assert settings.lora_alpha == Settings().lora_alpha


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--global-batch-size", "8"], "global_batch_size", 8),
        (["--global_batch_size=8"], "global_batch_size", 8),
        (["--global-batch-size=none"], "global_batch_size", None),
        (["--run-name", "a-b"], "run_name", "a-b"),
        (["--run_name=a=b"], "run_name", "a=b"),
        (["--merge"], "merge", True),
        (["--merge", "false"], "merge", False),
        (["--merge=no"], "merge", False),
        (["--merge", "--no_merge"], "merge", False),
        (["--no-merge"], "merge", False),
        (["--max_steps", "-1"], "max_steps", -1),
        (["--max_steps", "1e3"], "max_steps", 1000),
        (["--max_steps", "9007199254740993"], "max_steps", 9007199254740993),  # no float
        (["--dataset", "x", "y", "--dataset", "z"], "dataset", ["d", "x", "y", "z"]),
        (["--lora_modules_to_save", "none"], "lora_modules_to_save", []),
        (["--trainer_args", '{"neftune_noise_alpha": 5}'], "trainer_args", {"neftune_noise_alpha": 5}),
    ],
)
def test_both_spellings_and_every_kind_of_value(words: list[str], name: str, value: Any) -> None:
    assert getattr(parse_settings([*GIVEN, *words]), name) == value


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("eval_strategy: no", "eval_strategy", "no"),  # False to YAML
        ("packing: on", "packing", "on"),  # True to YAML
        ("packing: off", "packing", "off"),
        ("learning_rate: 2e-4", "learning_rate", 2e-4),  # text to PyYAML
        ("learning_rate: 1", "learning_rate", 1.0),
        ("max_steps: 1e3", "max_steps", 1000),
        ("max_steps: 20.0", "max_steps", 20),
        ("seed: 4294967295", "seed", 4294967295),
        ("merge: yes", "merge", True),
        ("merge: 'false'", "merge", False),
        ("max_time: 1:30:00", "max_time", "1:30:00"),  # 5400 to PyYAML
        ("seed: 010", "seed", 10),  # 8 to PyYAML
        ("eval_dataset:", "eval_dataset", []),
        ("report_to: none", "report_to", []),
        ("global_batch_size: null", "global_batch_size", None),
        ("resume: no", "resume", "no"),
        ("resume: auto", "resume", "auto"),
        ("trainer_args: {adam_beta2: 0.99}", "trainer_args", {"adam_beta2": 0.99}),
    ],
)
def test_yaml_values_mean_what_they_look_like(config: Any, line: str, name: str, value: Any) -> None:
    settings = parse_settings(["--config", str(config(f"{line}\n")), *GIVEN])
    assert getattr(settings, name) == value
    assert type(getattr(settings, name)) is type(value)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("lora_rank: 8", "run.yaml: there is no option lora_rank; here it is lora_r."),
        ("zzzzzzzz: 8", "run.yaml: there is no option zzzzzzzz; train_ddp.py --help lists them all."),
        ("config: run.yaml", "run.yaml: config is for the command line only"),
        ("lora_r: 8\nlora_r: 16", "run.yaml is not YAML: lora_r is given twice (line 2)."),
        ("trainer_args: {a: 1, a: 2}", "a is given twice"),
        ("lora_r: big", "run.yaml: lora_r is 'big', but it takes a whole number."),
        ("lora_r: 8.5", "run.yaml: lora_r is 8.5, but it takes a whole number."),
        ("lora_r: true", "run.yaml: lora_r is True, but it takes a whole number."),
        ("lora_r: [8]", "run.yaml: lora_r is [8], but it takes a whole number."),
        ("lora_r:", "run.yaml: lora_r is empty, but it takes a whole number; leave it out for its default."),
        ("method: null", "run.yaml: method is empty, but it takes lora, qlora or full; leave it out"),
        ("distributed_type: NO",
            "run.yaml is a file for accelerate launch; give it before train_ddp.py: uv run accelerate launch"),
        ("lora_r: .inf", "run.yaml: lora_r is inf, but it takes a whole number."),
        ("learning_rate: .nan", "run.yaml: learning_rate is nan, but it takes a number."),
        ("learning_rate: 1" + "0" * 400, "learning_rate is 1000"),
        ("seed: 0x1" + "0" * 5000, "run.yaml: seed is a huge number, but it takes a whole number."),
        ("method: sft", "run.yaml: method is 'sft', but it takes lora, qlora or full."),
        ("merge: maybe", "run.yaml: merge is 'maybe', but it takes true or false."),
        ("run_name: 2026", "run.yaml: run_name is 2026, but it takes text or none; put it in quotes."),
        ("run_name: 2026-11-20",
            "run_name is datetime.date(2026, 11, 20), but it takes text or none; put it in quotes."),
        ("run_name: ''", "run.yaml: run_name is empty, but it takes text or none; leave it out for its default."),
        ("zero_optimization: {stage: 2}", "run.yaml is a file of DeepSpeed; start with uv run accelerate launch"),
        ("dataset: {a: b}",
            "run.yaml: dataset is {'a': 'b'}; a is not a key of a dataset; the keys are path, subset, split, "
                "weight."),
        ("dataset: [a, 3]", "run.yaml: dataset is ['a', 3], but it takes text, or a list of texts."),
        ("trainer_args: 5",
            "run.yaml: trainer_args is 5, but it takes a mapping of plain, finite values (JSON on the command "
                "line)."),
        ("- model: m", "run.yaml holds no options, which stand as one `name: value` a line."),
        ("just text", "run.yaml holds no options"),
        ("1: 2", "run.yaml holds no options"),
        ("", "run.yaml holds no options"),
        ("model: [", "run.yaml is not YAML: expected the node content, but found '<stream end>' (line 1)."),
        ("? [a]\n: b", "run.yaml is not YAML: found unhashable key (line 1)."),
        ("run_name: 2026-13-45", "run.yaml is not YAML: month must be in 1..12."),
        ("model: !!python/object/apply:os.system ['touch ran']", "run.yaml is not YAML: could not determine a"),
        ("model: " + "[" * 1200, "run.yaml is not YAML: nested too deeply"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_in_one_sentence(config: Any, line: str, sentence: str) -> None:
    message = refusal("--config", str(config(line)), *GIVEN)
    assert sentence in message
    assert "\n" not in message


@pytest.mark.parametrize("content", [b"\xff\xfe\x00m", b"model: \x00", "model: \u0007".encode()])
def test_a_file_that_is_not_text_is_refused(config: Any, content: bytes) -> None:
    assert "run.yaml is not YAML" in refusal("--config", str(config(content)), *GIVEN)


def test_a_file_may_begin_with_a_byte_order_mark_and_have_windows_line_ends(config: Any) -> None:
    assert read_config(config(b"\xef\xbb\xbflora_r: 4\r\nlora_alpha: 8\r\n")) == {"lora_r": 4, "lora_alpha": 8}


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "no.yaml"
    recipes = DEMO_RECIPE.parent
    assert refusal("--config", str(path)) == f"--config {path}: there is no such file; {recipes} holds examples."
    where = f"there is no such file in {Path.cwd()}; {recipes} holds examples."
    assert refusal("--config", "nowhere/no.yaml") == f"--config nowhere/no.yaml: {where}"
    (tmp_path / "qwen_lora.yaml").touch()
    near = f"there is no such file; did you mean {tmp_path}/qwen_lora.yaml?"
    assert refusal("--config", f"{tmp_path}/qwen_lroa.yaml").endswith(near)
    assert refusal("--config", str(tmp_path)) == f"--config {tmp_path} is a folder; name one of the .yaml files in it."
    assert "cannot be read" in refusal("--config", "x" * 5000)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("gradient-checkpointing", "auto"), ("resume", "auto"), ("packing", "on"), ("cuda_graphs", "on")],
)
@pytest.mark.parametrize("after", [[], ["--merge"], ["--seed", "1"]])
def test_flags_of_other_tools_work_without_a_value(flag: str, value: str, after: list[str]) -> None:
    settings = parse_settings([*GIVEN, f"--{flag}", *after])
    assert getattr(settings, flag.replace("-", "_")) == value


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--lora-rank", "8"], "command line: there is no option lora_rank; here it is lora_r."),
        (["--global_batch", "8"], "command line: there is no option global_batch; did you mean global_batch_size?"),
        (["--global_batch=8"], "command line: there is no option global_batch; did you mean global_batch_size?"),
        (["--no_lora"], "command line: there is no option no_lora; "),
        (["--epochs", "3"], "command line: there is no option epochs; here it is num_train_epochs."),
        (["--node_rank", "3"], "there is no option node_rank; give it to the launcher, before the name of the script."),
        (["--nodez", "3"], "there is no option nodez; train_ddp.py --help lists them all."),
        (["rows.jsonl"], "command line: rows.jsonl belongs to no option; write --dataset rows.jsonl."),
        (["--merge", "rows.jsonl"], "command line: merge is 'rows.jsonl', but it takes true or false."),
        (["--lora_r"], "command line: no value is given for lora_r; lora_r takes a whole number."),
        (["--config"], "command line: no value is given for config; config takes text."),
        (["--resume", "--eval-dataset", "--seed"], "no value is given for eval_dataset; eval_dataset takes text,"),
        (
            ["--bf16", "--gradient_checkpointing", "--use_peft", "--resume"],
            "2 options do not exist: bf16 (give --precision bf16), use_peft (give --method lora); train_ddp.py --help "
            "lists those that do.",
        ),
        (["--lora_r", "x"], "command line: lora_r is 'x', but it takes a whole number."),
        (["--trainer_args", "{"], "command line: trainer_args is '{', but it takes a mapping"),
        (["--trainer_args", "{'a': 1}"], "(JSON on the command line); it is not JSON: Expecting property name"),
        (["--trainer_args", '{"a": {"b": 1, "b": 2}}'], "(JSON on the command line); 'b' is given twice."),
        (["--trainer_args", '{"a": [NaN]}'], "(JSON on the command line); nan is not finite."),
        (["--trainer_args", '{"a": 1e999}'], "(JSON on the command line); inf is not finite."),
        (["--trainer_args", "[" * 5000], "but it takes a mapping"),
        (["--run_name", "a\0b"], "command line: run_name is 'a\\x00b', but it takes text or none."),
        (["--", "x"], "command line: -- belongs to no option; every value follows the name of its option."),
    ],
)
def test_a_bad_command_line_is_refused_in_one_sentence(words: list[str], sentence: str) -> None:
    message = refusal(*words, *GIVEN)
    assert sentence in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("tool", "words", "sentence"),
    [
        ("plan", "--node 2", "there is no option node; did you mean nodes?"),
        (
            "plan",
            "--seq 2",
            "there is no option seq; python -m unsloth_ddp.plan --help and train_ddp.py --help list them",
        ),
        ("parity", "--step 2", "there is no option step; did you mean steps?"),
        ("preflight", "--time_out 2", "there is no option time_out; did you mean timeout?"),
        ("preflight", "--node_rank 3", "no option node_rank; give it to the launcher, before the name of the script."),
        ("preflight", "--nodez 3", "no option nodez; python -m unsloth_ddp.preflight --help and train_ddp.py"),
        ("preflight", "--lora_rank 3", "there is no option lora_rank; here it is lora_r."),
    ],
)
def test_a_tool_suggests_its_own_options_too(tool: str, words: str, sentence: str) -> None:
    parser = importlib.import_module(f"unsloth_ddp.{tool}.__main__").make_parser()
    with pytest.raises(UserError) as refused:
        parse_settings([*GIVEN, *words.split()], command=parser)
    assert sentence in str(refused.value)


def test_a_tools_own_options_are_read_with_dashes_too() -> None:
    _, rest = make_command_parser("tool", None).parse_known_args(["--run-name", "a-b"])
    assert rest == ["--run_name", "a-b"]
    parser = importlib.import_module("unsloth_ddp.plan.__main__").make_parser()
    assert parser.parse_known_args(["--gpus-per-node", "8"])[0].gpus_per_node == 8


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--lora_r 0", "lora_r is 0, but it has to be above 0."),
        ("--learning_rate -1e-4", "learning_rate is -0.0001, but it has to be above 0."),
        ("--global_batch_size -8", "global_batch_size is -8, but it has to be above 0."),
        ("--global_batch_tokens 0", "global_batch_tokens is 0, but it has to be above 0."),
        ("--packing off --global_batch_tokens 9", "global_batch_tokens 9 needs packed rows, but packing is off; give"),
        ("--weight_decay -1", "weight_decay is -1.0, but it has to be 0 or above."),
        ("--seed 4294967296", "seed is 4294967296, but it has to be 4,294,967,295 or below."),
        ("--max_steps 0", "max_steps is 0, so nothing would be trained"),
        ("--lora_dropout 1", "lora_dropout is 1.0, but it has to be below 1."),
        ("--eval_fraction 1", "eval_fraction is 1.0, but it has to be below 1."),
        ("--eval_strategy epoch", "eval_strategy is epoch, but there are no evaluation rows; give --eval_dataset"),
        ("--eval_steps 5 --eval_strategy no", "eval_steps 5 and eval_strategy no contradict"),
        ("--run_name ../up", "run_name '../up' is not a plain folder name"),
        ("--run_name ..", "run_name '..' is not a plain folder name; use letters, digits, - and _."),
        ("--run_name a\\b", "is not a plain folder name"),
        ("--run_name " + "a" * 201, "has 201 bytes, and a folder name holds 200; give a shorter one."),
        ("--run_name " + "\u00e9" * 150, "has 300 bytes, and a folder name holds 200"),
        ("--streaming --max_steps 9 --eval_dataset e --eval_strategy epoch", "leave it out, and give --eval_steps."),
        ("--streaming --max_steps 9 --shuffle_buffer -1", "shuffle_buffer is -1, but it has to be 0 or above."),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(words: str, sentence: str) -> None:
    # tests/docs/test_advice_typed.py has those whose sentence says what to give.
    assert sentence in refusal(*GIVEN, *words.split(" "))


@pytest.mark.parametrize("name", ["..a", "a.b", "Qwen3 8B, r=16", "\u00fcber", "a" * 200])
def test_plain_names_are_accepted(name: str) -> None:
    assert parse_settings([*GIVEN, "--run_name", name]).run_name == name


def test_saved_settings_repeat_the_run_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--model", "../m", "--dataset", "./a.jsonl", "b.jsonl", "--eval_strategy", "no", "--learning_rate", "1e-5"]
    settings = parse_settings([*words, "--trainer_args", '{"adam_beta2": 0.99}', "--run_name", "no"])
    assert settings.dataset == [str(tmp_path / "a.jsonl"), "b.jsonl"]
    (tmp_path / "run").mkdir()
    settings.save(tmp_path / "run" / "settings.yaml")
    assert parse_settings(["--config", str(tmp_path / "run" / "settings.yaml")]) == settings


def test_paths_in_a_file_are_relative_to_it(config: Any) -> None:
    path = config("model: ../m\ndataset: [./a.jsonl, owner/name]\nrun_name: ./x\n")
    options = read_config(path)
    assert options["model"] == str(path.parent.parent / "m")
    assert options["dataset"] == [str(path.parent / "a.jsonl"), "owner/name"]
    assert options["run_name"] == "./x"


def test_a_path_in_a_file_is_looked_for_beside_the_file_too(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config("model: tiny\ndataset: [chats.jsonl, owner/name]\nchat_template: chatml\noutput_dir: out\n")
    (path.parent / "chats.jsonl").touch()
    (path.parent / "out").mkdir()
    (path.parent / "chatml").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    options = read_config(path)
    assert options["dataset"] == [str(path.parent / "chats.jsonl"), "owner/name"]
    assert (options["model"], options["chat_template"], options["output_dir"]) == ("tiny", "chatml", "out")
    # The working directory comes first.
    (elsewhere / "chats.jsonl").touch()
    assert read_config(path)["dataset"] == ["chats.jsonl", "owner/name"]


def test_help_shows_every_option_once_under_its_topic() -> None:
    text = make_parser("About.").format_help()
    positions = [text.index(f"\n{topic.__doc__}:") for topic in TOPICS]
    assert positions == sorted(positions)
    for name in OPTIONS:
        assert text.count(f"\n  --{name} ") == 1, name
    assert sum(len(dataclasses.fields(topic)) for topic in TOPICS) == len(OPTIONS)


def test_reading_settings_imports_nothing_heavy() -> None:
    code = "import sys, unsloth_ddp.config.parse; print({'torch', 'transformers', 'numpy'} & sys.modules.keys() or [])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


WRONG_FILES = {
    "--model {0} --dataset nowhere.jsonl": "nowhere.jsonl: there is no such file in",
    "--model {0} --dataset {0} --streaming --max_steps 1": "is a folder without a .jsonl, .parquet, .csv file;",
    "--model ./nowhere --dataset {0}/train.jsonl": "nowhere: there is no such folder; give",
    "--model {0} --dataset {0}/pairs_train.jsonl --task dpo --reference_model "
    "./nowhere": "nowhere: there is no such folder; give",
    "--model {0} --dataset {0}/train.jsonl --task dpo": "train.jsonl:1: the row has one answer; give --task sft",
    "--model {0} --dataset {0}/pairs_train.jsonl --task dpo --backend "
    "unsloth": "backend unsloth does not work with task dpo",
    "--model {0} --dataset {0}/../make_demo.py": "make_demo.py is not a .jsonl",
    "--model {0} --dataset {0}/train.jsonl --report_to wandb": "uv pip install wandb",
    "--model {0} --dataset {0}/train.jsonl --resume nope": "resume nope: there is no such folder",
    "--model {0} --dataset {0}/train.jsonl --output_dir /proc/runs": "output folder /proc/runs/",
}


def test_what_files_show_to_be_wrong_is_told_before_anything_slow_is_imported() -> None:
    code = (
        "import sys\nfrom train_ddp import Ranks, UserError, open_run, parse_settings\nfor options in "
        "sys.argv[1:]:\n    try:\n        with open_run(parse_settings(options.split()), Ranks()): pass\n    except "
        "UserError as told: print(told, {'torch', 'transformers', 'datasets', 'pandas'} & {*sys.modules})"
    )
    given = [
        options.format(REPO / "demo/model").replace("model/train", "train").replace("model/pairs", "pairs")
        for options in WRONG_FILES
    ]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, check=True, cwd=REPO)
    for line, said in zip(done.stdout.splitlines(), WRONG_FILES.values(), strict=True):
        assert said in line and line.endswith(" set()")


YAML_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=8,
)


@given(st.sampled_from(sorted(OPTIONS)), YAML_VALUES)
def test_any_value_is_coerced_to_the_type_of_its_option_or_refused(name: str, value: Any) -> None:
    try:
        accepted = convert_value(name, value, "run.yaml")
    except UserError as refused:
        assert str(refused).startswith(f"run.yaml: {name} is ")
    else:
        assert convert_value(name, accepted, "run.yaml") == accepted


@pytest.mark.parametrize(
    ("topic", "first", "shown"),
    [
        ("lora", "LoRA and QLoRA:", 8),
        ("data", "Data:", len(dataclasses.fields(DataSettings))),
        ("dataset", "Data:", 1),
        ("max-length", "Data:", 1),
    ],
)
def test_help_of_a_topic_or_an_option(topic: str, first: str, shown: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(["--help", topic])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and printed.splitlines()[0] == first
    assert len(re.findall(r"^  --\w+", printed, re.MULTILINE)) == shown
    with pytest.raises(
        UserError, match="--help nothing names no topic or option; the topics are model, lora, task, data"
    ):
        parse_settings(["--help", "nothing"])


@given(st.lists(st.sampled_from(["--", "-", "=", "--merge", "--lora_r", "8", "--dataset"]) | st.text(), max_size=6))
def test_any_command_line_gives_settings_or_a_refusal(words: list[str]) -> None:
    words = [word for word in words if word not in ("-h", "--help")]
    try:
        assert isinstance(parse_settings([*GIVEN, *words]), Settings)
    except UserError as refused:
        assert len(str(refused)) < 1000


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        (
            "lr_scheduler_type",
            "cosin",
            "lr_scheduler_type cosin is not one that Transformers knows; did you mean cosine?",
        ),
        ("optim", "adamw_trch", "optim adamw_trch is not one that Transformers knows; did you mean adamw_torch?"),
        (
            "report_to",
            "tensorbord",
            "report_to tensorbord is not a tracker that Transformers knows; they are azure_ml,",
        ),
    ],
)
def test_a_misspelt_name_of_transformers_is_told_before_anything_is_loaded(name: str, value: str, said: str) -> None:
    assert refusal(*GIVEN, f"--{name}", value).startswith(said)


def test_the_names_are_those_of_the_installed_transformers() -> None:
    from transformers import SchedulerType
    from transformers.integrations import INTEGRATION_TO_CALLBACK
    from transformers.training_args import OptimizerNames

    assert set(known_names("lr_scheduler_type")) == {str(one.value) for one in SchedulerType}
    assert set(known_names("optim")) == {str(one.value) for one in OptimizerNames}
    assert set(known_names("report_to")) == set(INTEGRATION_TO_CALLBACK)


def test_trackers_without_their_package_are_found_without_importing_transformers() -> None:
    from transformers.integrations import get_available_reporting_integrations

    available = set(get_available_reporting_integrations())
    assert available <= installed_trackers()
    # What the source does not tell: these are decided by variables, or by the environment.
    assert installed_trackers() - available <= {"comet_ml", "neptune", "kubeflow", "flyte"}


def test_a_few_lines_that_stand_for_more_values_than_memory_holds_are_refused(config: Any) -> None:
    levels = "".join(f"  x{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
    for text, said in (
        (f"trainer_args:\n  x0: &a0 [{'l, ' * 8}l]\n{levels}", "stand for too many values"),
        (f"trainer_args:\n  x: &a {'l' * 9000}\n  y: [{'*a, ' * 900}*a]\n", "stand for too many values"),
        ("trainer_args: &a {x: *a}\n", "stands for a value that it is part of"),
    ):
        with pytest.raises(UserError, match=said):
            read_config(config(text))
    shared = "dataset: &d [a.jsonl]\neval_dataset: *d\n"
    assert read_config(config(shared)) == {"dataset": ["a.jsonl"], "eval_dataset": ["a.jsonl"]}
