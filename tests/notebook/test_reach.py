"""Test that what reaches the training runs on every process, and that no collective is under one rank."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from making import LOAD, TRAIN, body, convert_cells, helpers, kinds

from unsloth_ddp.notebook.types import NotebookError
from unsloth_ddp.notebook.write.helpers import HELPERS

DATA = "from datasets import load_dataset\ndataset = load_dataset('d', split = 'train')"
PROXY = (
    "import os, subprocess\n"
    "found = subprocess.run('env | grep proxy', shell=True, capture_output=True, text=True)\n"
    "for line in found.stdout.splitlines():\n"
    "    if '=' in line:\n"
    "        name, value = line.split('=', 1)\n"
    "        os.environ[name] = value\n"
    "        print(name)"
)


def test_variables_from_a_command_reach_every_process_and_so_do_later_ones() -> None:
    text = body(convert_cells(PROXY, "os.environ['WANDB_MODE'] = 'offline'", LOAD, DATA, TRAIN))
    assert "found = from_main(lambda: subprocess.run(" in text
    assert "\nfor line in found.stdout.splitlines():\n" in text and "\nos.environ['WANDB_MODE']" in text
    assert "        print(name)\nkeep_launched()\n" in text  # one of them may be the launcher's


@pytest.mark.parametrize(
    "change",
    [
        "def adapt(m):\n    for name, layer in m.named_modules():\n        layer.adapter = A()\n"
        "        print(name)\nadapt(model)",
        "def adapt(m):\n    layer = m.get_submodule('x')\n    setattr(layer, 'a', A())\n    print(m)\nadapt(m=model)",
        "def inner(m):\n    m.eval()\n    m.a = A()\ndef adapt(m):\n    inner(m)\n    print(m)\nadapt(model)",
        "for name, layer in model.named_modules():\n    setattr(layer, 'a', A())\n    print(name)",
        "class Fit:\n    def __init__(self, m):\n        self.m = m\n    def to(self, m):\n"
        "        m.a = A()\n        print(m)\n"
        "Fit(model).to(model)",
        "def fill(m, new):\n    state = m.state_dict()\n    wanted = {k.lower(): (k, t) for k, t in state.items()}\n"
        "    for n, (k, old) in wanted.items():\n        old.data.copy_(new[n])\n    print(n)\nfill(model, {})",
        "def blocks(m):\n    found = m.layers\n    return found\ndef cut(m):\n    first = blocks(m)\n"
        "    first[0].requires_grad_(False)\n    print(m)\ncut(model)",
        "def inner(m):\n    part = m.module if hasattr(m, 'module') else m\n    part.a = 1\n    print(m)\ninner(model)",
        "from peft import set_peft_model_state_dict\nif saved:\n    done = set_peft_model_state_dict(model, saved)\n"
        "    print(done)",
        "import torch.nn as nn\ndef start(m):\n    for p in m.parameters():\n        nn.init.zeros_(p)\n"
        "    print(m)\nstart(model)",
    ],
)
def test_a_model_changed_while_printing_is_changed_on_every_process(change: str) -> None:
    text = body(convert_cells(LOAD, change, DATA, TRAIN))
    assert "IS_MAIN" not in text and change.splitlines()[-1] in text


PREPARES = """\
class Rows:
    def prepare(self):
        os.makedirs('rows')
        self.rows = [1]
        with open('rows/x', 'w') as file:
            file.write('1')
        return 1
"""


def test_a_model_is_moved_on_every_process_whatever_chose_the_device() -> None:
    cell = (
        "import os, torch\ndef where():\n    os.makedirs('x')\n    return torch.device('cuda')\n"
        "device = where()\nmodel.to(device)"
    )
    assert "\nmodel.to(device)\n" in body(convert_cells(LOAD, cell, DATA, TRAIN))


def test_an_object_without_methods_is_no_plain_value() -> None:
    cell = (
        "import os\nclass C:\n    n = 2\nc = C()\nc.model = model\ndef fill(c):\n    c.out = 'o'\n"
        "    os.makedirs(c.out)\nfill(c)"
    )
    text = body(convert_cells(LOAD, DATA, cell, TRAIN.replace("SFTConfig(", "SFTConfig(output_dir=c.out, ")))
    assert "from_main" not in text and "    fill(c)\n" in text


def test_an_object_that_fills_itself_and_writes_is_filled_on_every_process() -> None:
    text = body(convert_cells("import os\n" + PREPARES, LOAD, "r = Rows()\nn = r.prepare()\ndataset = r.rows", TRAIN))
    assert "with main_process_first():\n    n = r.prepare()\n" in text and "from_main" not in text
    assert "        if LOCAL_RANK == 0:\n            os.makedirs('rows')\n        self.rows = [1]\n" in text
    assert "        if LOCAL_RANK == 0:\n            with open('rows/x', 'w') as file:\n" in text


def test_a_buffer_is_written_on_every_process() -> None:
    cell = (
        "import io, soundfile as sf\ndef sound(row):\n    buffer = io.BytesIO()\n    sf.write(buffer, row)\n"
        "    return buffer.getvalue()\ndataset = [sound(row) for row in rows]"
    )
    text = body(convert_cells(LOAD, cell, TRAIN))
    assert "\n    sf.write(buffer, row)\n" in text


def test_files_in_a_folder_of_its_own_are_written_by_each_process() -> None:
    cell = (
        "import tempfile, pathlib\ndef rows():\n    with tempfile.TemporaryDirectory() as folder:\n"
        "        pathlib.Path(folder, 'x').write_text('1')\n        return load_dataset(folder)\ndataset = rows()"
    )
    text = body(convert_cells(LOAD, "from datasets import load_dataset\n" + cell, TRAIN))
    assert "\n        pathlib.Path(folder, 'x').write_text('1')\n" in text


@pytest.mark.parametrize("made", ["TrainingArguments(output_dir=out)", "AutoModel.from_pretrained(out)"])
def test_arguments_and_models_are_never_sent(made: str) -> None:
    cell = (
        "import os\nfrom transformers import AutoModel, Trainer, TrainingArguments\n"
        f"def setup(out):\n    os.makedirs(out)\n    return {made}\nthing = setup('o')\n"
    )
    train = "trainer = Trainer(model=model, args=thing, train_dataset=dataset)\ntrainer.train()"
    text = body(convert_cells(LOAD, DATA, cell + train))
    assert "from_main" not in text and "    if LOCAL_RANK == 0:\n        os.makedirs(out)\n" in text


def test_a_paid_answer_is_sent_and_the_dataset_made_of_it_is_not() -> None:
    cell = (
        "from openai import OpenAI\nfrom datasets import Dataset\nclient = OpenAI()\n"
        "def ask(text):\n    return client.chat.completions.create(messages=[text]).choices[0].message.content\n"
        "dataset = Dataset.from_list([{'text': ask(t)} for t in ['a', 'b']])"
    )
    done = convert_cells(LOAD, cell, TRAIN)
    assert "Dataset.from_list(from_main(lambda: [{'text': ask(t)} for t in ['a', 'b']]))" in body(done)
    assert kinds(done) == ["paid call"]


@pytest.mark.parametrize(
    "change",
    [
        "for m in list(sys.modules):\n    if 'PIL' in m:\n        sys.modules.pop(m)\n"
        "        open('log', 'w').write(m)",
        "if torch.cuda.is_available():\n    torch.use_deterministic_algorithms(True)\n    print('fixed')",
        "if torch.cuda.is_available():\n    disable_caching()\n    print('no cache')",
    ],
)
def test_modules_and_settings_of_libraries_change_on_every_process(change: str) -> None:
    text = body(convert_cells("import sys, torch\nfrom datasets import disable_caching", LOAD, DATA, change, TRAIN))
    assert f"IS_MAIN:\n    {change[:8]}" not in text and f"LOCAL_RANK == 0:\n    {change[:8]}" not in text
    drawn = "import matplotlib.pyplot as plt\nplt.set_cmap('x')\nplt.show()"
    assert "IS_MAIN:\n    plt.set_cmap" in body(convert_cells(LOAD, DATA, drawn, TRAIN))


LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    "cell",
    [
        "del os.environ['RANK']",
        "os.environ.pop('LOCAL_RANK', None)",
        "os.environ.setdefault('MASTER_PORT', '1')",
        "if 'RANK' in os.environ:\n    del os.environ['RANK']",
        "for name in ('RANK', 'WORLD_SIZE'):\n    os.environ.pop(name, None)",
        "os.environ.update({'RANK': '7', 'CUDA_VISIBLE_DEVICES': '7'})",
        "os.environ.clear()",
        "env = os.environ\nenv.pop('RANK')\ndel env['WORLD_SIZE']",
        "env = os.environ\nfor name in ('RANK', 'LOCAL_RANK'):\n    env[name] = '7'",
        "def alone():\n    for name in list(os.environ):\n        if 'RANK' in name:\n"
        "            del os.environ[name]\nalone()",
    ],
)
def test_what_the_launcher_set_is_never_unset(cell: str) -> None:
    done = convert_cells("import os\n" + cell, LOAD, DATA, TRAIN)
    given = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "5"}
    with mock.patch.dict(os.environ, given, clear=True):
        exec(body(done).partition("from unsloth")[0], helpers("keep_launched"))
        assert [os.environ.get(name) for name in LAUNCH] == ["0", "1", "0", "5", None]


def test_nothing_is_sent_to_those_who_wait_for_their_turn() -> None:
    """Who waits in main_process_first() would wait for the main process, which waits for him in from_main()."""
    cell = "with open('a') as file:\n    key = input('key')\n    dataset = load_dataset('json', token=key)"
    text = body(convert_cells(LOAD, "from datasets import load_dataset", cell, TRAIN))
    assert "from_main(lambda: input('key'))" in text and "main_process_first" not in text


def test_what_the_script_needs_survives_a_notebook_that_deletes_its_names() -> None:
    cell = (
        "def clean():\n    for name in list(globals()):\n        if not name.startswith('_'):\n"
        "            del globals()[name]\n"
        "    print('clean')\nclean()"
    )
    done = convert_cells(LOAD, DATA, TRAIN, cell)
    assert "\nclean()\n" in body(done)
    region = "import builtins, os\nIS_MAIN = True\n" + HELPERS["keep_names"].source
    code = region + cell + "\nassert IS_MAIN and os.getcwd()\n"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "clean\n", run.stderr
    assert HELPERS["keep_names"].source in done.script


def test_a_trainer_that_a_function_makes_is_one() -> None:
    cell = (
        "from trl import PPOConfig, PPOTrainer\ndef build():\n    made = PPOTrainer(PPOConfig(batch_size=8), model)\n"
        "    return made\nrl = build()\ndef epoch():\n    for b in rl.dataloader:\n        out = rl.generate(b['q'])\n"
        "        print(rl.step(b['q'], out, [1]))\nepoch()"
    )
    assert "IS_MAIN" not in body(convert_cells(LOAD, DATA, cell))


def test_a_trainer_driven_by_hand_trains_on_every_process() -> None:
    cell = (
        "from trl import PPOConfig, PPOTrainer\n"
        "ppo_trainer = PPOTrainer(PPOConfig(batch_size=8), model, dataset=dataset)\n"
        "for batch in ppo_trainer.dataloader:\n    out = ppo_trainer.generate(batch['q'])\n"
        "    stats = ppo_trainer.step(batch['q'], out, [1])\n    print(stats)"
    )
    done = convert_cells(LOAD, DATA, cell)
    assert "IS_MAIN" not in body(done) and kinds(done) == ["sizing"]
    assert "per_device_train_batch_size" not in body(done)  # these arguments have no such field


@pytest.mark.parametrize(
    "line",
    ["trainer.save_checkpoint('a.ckpt')", "out = trainer.predict(net, dm)\nprint(out)", "trainer.test(net)\nprint(1)"],
)
def test_methods_of_lightnings_trainer_are_called_on_every_process(line: str) -> None:
    cell = "import pytorch_lightning as pl\ntrainer = pl.Trainer(max_epochs=1)\ntrainer.fit(net, dm)"
    assert "IS_MAIN" not in body(convert_cells("from mine import net, dm", cell, line))


@pytest.mark.parametrize(
    "line",
    [
        "accelerator.save_state('s')\nprint(1)",
        "out = accelerator.gather(x)\nprint(out)",
        "for batch in loader:\n    print(batch)",
        "print(net(x))",
        "batch = next(iter(loader))\nprint(batch)",
    ],
)
def test_what_accelerate_does_together_is_never_under_one_rank(line: str) -> None:
    cell = (
        "from accelerate import Accelerator\naccelerator = Accelerator()\n"
        "net, optimizer, loader = accelerator.prepare(model, o, l)\n"
        "for batch in loader:\n    accelerator.backward(net(batch))\n    optimizer.step()"
    )
    text = body(convert_cells(LOAD, DATA, cell, line))
    assert "IS_MAIN:\n    " + line.splitlines()[0] not in text and f"\n{line.splitlines()[0]}\n" in text


@pytest.mark.parametrize(
    "line", ["!conda remove -y pytorch", "!poetry remove torch", "!pip uninstall -y torch --progress-bar off"]
)
def test_other_uninstalls_are_left_out(line: str) -> None:
    done = convert_cells(line + "\n!pip install -U x --progress-bar off", LOAD, DATA, TRAIN)
    assert "run_shell" not in done.script and done.report.requirements == ["x"]


@pytest.mark.parametrize(
    "line", ["fuser -v /dev/nvidia* -k", "pkill -9 -f python3", "kill -9 $(nvidia-smi --query-compute-apps=pid)"]
)
def test_a_command_that_ends_the_scripts_own_processes_is_said(line: str) -> None:
    assert kinds(convert_cells("!" + line, LOAD, DATA, TRAIN)) == ["command"]
    assert kinds(convert_cells("!pkill ollama", LOAD, DATA, TRAIN)) == []


def test_an_uninstall_is_left_out_with_its_tool() -> None:
    done = convert_cells(
        "!pip install pip3-autoremove\n!pip-autoremove torch -y\n!pip install unsloth", LOAD, DATA, TRAIN
    )
    assert "autoremove" not in done.script and done.report.requirements == ["unsloth"]


def test_a_notebooks_own_class_called_like_a_trainer_is_judged_by_its_body() -> None:
    cell = (
        "class GRPOTrainer:\n    def __init__(self, model):\n        self.model = model\n    def train(self):\n"
        "        for row in rows:\n            self.model(row).backward()\n            self.opt.step()\n"
        "trainer = GRPOTrainer(model)\ntrainer.train()"
    )
    assert kinds(convert_cells(LOAD, DATA, "rows = [1]", cell)) == ["loop"]


def test_a_clone_and_a_writer_are_the_main_processs() -> None:
    cells = (
        "from huggingface_hub import Repository\nrepo = Repository('out', clone_from='me/x')",
        "from torch.utils.tensorboard import SummaryWriter\nwriter = SummaryWriter('log')",
        "for row in dataset:\n    model(row).loss.backward()\n    writer.add_scalar('loss', 1)\n    repo.push_to_hub()",
    )
    text = body(convert_cells(LOAD, DATA, *cells))
    assert "Repository('out', clone_from='me/x') if IS_MAIN else NoRun()" in text or "if IS_MAIN:\n    repo = " in text
    assert "SummaryWriter('log')" in text.partition("for row")[0].split("IS_MAIN", 1)[1]
    assert "    if IS_MAIN:\n        repo.push_to_hub()" in text


def test_arguments_from_a_parser_get_what_ddp_needs(tmp_path: Path) -> None:
    cell = (
        "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
        "(given,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses(['--output_dir', 'o'])\n"
        "trainer = Trainer(model=model, args=given, train_dataset=dataset)\ntrainer.train()"
    )
    done = convert_cells(LOAD, DATA, cell)
    assert "args=ddp_configured(given, 1)" in body(done)
    from transformers import TrainingArguments

    configured = helpers("ddp_configured", WORLD_SIZE=2)["ddp_configured"]
    given = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=4, use_cpu=True)
    for _ in range(2):  # twice: it was configured already
        configured(given, 1)
        assert (given.per_device_train_batch_size, given.gradient_accumulation_steps) == (1, 2)
        assert given.ddp_find_unused_parameters is False and given.average_tokens_across_devices


def test_arguments_given_by_position_get_what_ddp_needs() -> None:
    cell = (
        "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
        "targs = HfArgumentParser(TrainingArguments).parse_json_file('a')[0]\n"
        "more = {'args': targs}\nTrainer(model, targs, train_dataset=dataset).train()\nTrainer(**more_args)"
    )
    text = body(convert_cells(LOAD, DATA, cell))
    assert "Trainer(model, ddp_configured(targs, 1), train" in text and "Trainer(**more_args)" in text
    others = "Trainer(large_model, lora_config, train_dataset=dataset).train()"
    assert others in body(convert_cells(LOAD, DATA, "from transformers import Trainer", others))
    shown = (
        "from transformers import Trainer, TrainingArguments\ntargs = TrainingArguments('o')\n"
        "Trainer(model, targs).train()"
    )
    assert "ddp_configured" not in body(convert_cells(shown))


@pytest.mark.parametrize(
    ("count", "division"),
    [
        ("int(os.environ.get('WORLD_SIZE', 1))", "steps = steps // world"),
        ("int(os.environ['WORLD_SIZE'])", "steps //= world"),
        ("torch.distributed.get_world_size()", "steps = steps // world"),
    ],
)
def test_a_batch_is_not_divided_among_the_processes_twice(count: str, division: str) -> None:
    cell = (
        f"import os, torch\naccum_steps = 8\nworld = {count}\nif world > 1:\n    {division}\n"
        f"rows = dataset_size // world"
    )
    cell = cell.replace("steps", "accum_steps").replace("accum_accum", "accum")
    text = body(convert_cells(LOAD, DATA, cell, TRAIN.replace("= 4", "= accum_steps")))
    assert text.count("// world") == 1 and "rows = dataset_size // world" in text and "//= world" not in text


def test_the_others_wait_while_one_downloads_a_dataset() -> None:
    cell = "from torchvision.datasets import MNIST\ndataset = MNIST('.', download=True)"
    assert "with main_process_first():\n    dataset = MNIST(" in body(convert_cells(LOAD, cell, TRAIN))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("from src.train import train\ntrain(model)", ["module"]),
        ("import finetune\nfinetune.run_train()", ["module"]),
        ("from sklearn.model_selection import train_test_split\na = train_test_split(b)", []),
        ("from unsloth.chat_templates import train_on_responses_only\ntrainer = train_on_responses_only(trainer)", []),
        ("from transformers.trainer_utils import get_last_checkpoint\nc = get_last_checkpoint('o')", []),
    ],
)
def test_a_training_in_a_module_of_the_authors_is_said(call: str, said: list[str]) -> None:
    assert kinds(convert_cells(LOAD, DATA, TRAIN, call)) == said


def test_a_setting_of_accelerate_is_the_notebooks() -> None:
    cell = "import os\nos.environ['ACCELERATE_MIXED_PRECISION'] = 'bf16'"
    assert "os.environ['ACCELERATE_MIXED_PRECISION'] = 'bf16'" in body(convert_cells(cell, LOAD, DATA, TRAIN))


def test_ipythons_shell_is_not_there_by_whatever_name() -> None:
    cell = (
        "import IPython\nfrom IPython import get_ipython as shell\n"
        "IPython.get_ipython().run_line_magic('pip', 'install x')\nk = shell().kernel"
    )
    done = convert_cells(cell, LOAD, DATA, TRAIN)
    assert "get_ipython" not in body(done) and "k = None" in body(done) and done.report.requirements == ["x"]


def test_ipythons_shell_is_not_there() -> None:
    cell = (
        "from IPython import get_ipython, version_info\nshell = get_ipython().__class__.__name__\n"
        "if get_ipython():\n    x = 1"
    )
    done = convert_cells(cell, LOAD, DATA, TRAIN)
    text = body(done)
    assert "from IPython import version_info\n" in text and "get_ipython" not in text and kinds(done) == []


@pytest.mark.parametrize("end", ["exit()", "raise SystemExit", "raise SystemExit('no GPU')"])
def test_an_end_of_the_script_is_every_processs(end: str) -> None:
    cell = f"import torch\nif not torch.cuda.is_available():\n    print('no GPU')\n    {end}"
    assert f"\n{cell.partition('torch' + chr(10))[2]}\n" in body(convert_cells(cell, LOAD, DATA, TRAIN))


@pytest.mark.parametrize(
    ("cell", "quoted"),
    [
        ("x = 1\n\n# a comment\ny = = 2\n\n# the end", "line 4: 'y = = 2'"),
        ("!pip install x\nfor i in x\n\n    y\n", "line 2: 'for i in x'"),
        ("x = 1\nreturn x", "line 2: 'return x'"),
        ("def f(:\n\n# note\n", "line 1: 'def f(:'"),
    ],
)
def test_a_refusal_quotes_the_notebooks_line(cell: str, quoted: str) -> None:
    with pytest.raises(NotebookError, match="is not Python") as error:
        convert_cells(LOAD, cell, TRAIN)
    assert quoted in str(error.value)


def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("UNSLOTH_ALLOW_CPU")
    for kind in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(kind, "is_available", lambda: False)
    region = convert_cells(LOAD, DATA, TRAIN).script.partition("# endregion")[0]
    with pytest.raises(SystemExit, match="No GPU is visible here"):
        exec(region[region.index("# ddp: each process takes its own GPU") :], {"os": os, "LOCAL_RANK": 0})
    monkeypatch.setenv("UNSLOTH_ALLOW_CPU", "1")
    exec(region[region.index("# ddp: each process takes its own GPU") :], {"os": os, "LOCAL_RANK": 0})


@pytest.mark.parametrize(
    ("cell", "needed"),
    [
        ("model.cuda()", True),
        ("device = 'cuda'\nmodel.to(device)", True),
        ("device = 'cuda' if torch.cuda.is_available() else 'cpu'\nmodel.to(device)", False),
    ],
)
def test_what_moves_the_model_to_a_gpu_needs_one(cell: str, needed: bool) -> None:
    load = "import torch\nfrom transformers import AutoModel\nmodel = AutoModel.from_pretrained('m')"
    script = convert_cells(load, cell, DATA, TRAIN).script
    assert ("No GPU is visible here" in script) is needed
