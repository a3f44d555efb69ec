"""Where each statement runs."""

import pytest
from making import LOAD, TRAIN, body, convert_cells, kinds

DATA = "from datasets import load_dataset\ndataset = load_dataset('d', split = 'train')"
SHOW = "inputs = tokenizer('x').to('cuda')\nout = model.generate(**inputs)\ntokenizer.batch_decode(out)"


def test_inference_moves_to_the_main_process_with_what_only_it_uses() -> None:
    text = body(convert_cells(LOAD, DATA, TRAIN, "FastLanguageModel.for_inference(model)\n" + SHOW))
    *lines, shown = SHOW.splitlines()
    guarded = "".join(f"    {line}\n" for line in [*lines, f"print({shown})"])
    assert f"FastLanguageModel.for_inference(model)\nif IS_MAIN:\n{guarded}" in text


def test_memory_statistics() -> None:
    cell = "import torch\ngpu = torch.cuda.get_device_properties(0)\nused = round(torch.cuda.max_memory_reserved())"
    text = body(convert_cells(LOAD, DATA, TRAIN, cell, "print(used - 1, gpu.name)"))
    assert "if IS_MAIN:\n    gpu = torch" in text and "    used = round(" in text


def test_nothing_that_training_needs_is_dropped() -> None:
    text = body(
        convert_cells(
            LOAD,
            DATA,
            "lengths = [len(r) for r in dataset]\nprint(max(lengths))\nlimit = max(lengths)",
            "dataset = dataset.select(range(limit))",
            TRAIN,
        )
    )
    assert "\nlengths = [len(r) for r in dataset]\nprint(max(lengths))\nlimit = max(lengths)\n" in text


def test_a_generation_that_training_needs_runs_everywhere_and_is_said() -> None:
    done = convert_cells(LOAD, "out = model.generate('x')\ndataset = [out]", TRAIN)
    assert "\nout = model.generate('x')\n" in body(done) and "inference" in kinds(done)


def test_helpers_are_found_through_the_call_graph() -> None:
    cells = ("def inner(m):\n    return m.generate('x')\ndef outer(m):\n    return inner(m)", "outer(model)")
    text = body(convert_cells(LOAD, *cells, DATA, TRAIN))
    assert "if IS_MAIN:\n    outer(model)\nwait_for_everyone()" in text


def test_a_function_that_training_calls_keeps_what_it_reads() -> None:
    cells = (
        "import re\npattern = re.compile('x')\nprint(pattern)",
        "def reward(completions):\n    return pattern.match(completions)",
    )
    train = "trainer = GRPOTrainer(model, reward_funcs = [reward], args = GRPOConfig())"
    text = body(convert_cells(LOAD, *cells, train, "pattern = re.compile('y')", "trainer.train()"))
    assert "\npattern = re.compile('x')\n" in text and "\npattern = re.compile('y')\n" in text


def test_a_helper_that_prints_and_changes_the_model_runs_everywhere_and_prints_once() -> None:
    cells = ("def prepare(m):\n    m.config.use_cache = False\n    print('done')", "prepare(model)")
    done = convert_cells(LOAD, *cells, DATA, TRAIN)
    assert "\nprepare(model)\n" in body(done)
    assert "if not IS_MAIN:\n\n    def print(" in done.script


def test_an_unknown_function_before_training_is_not_taken_from_the_other_processes() -> None:
    cells = ("from helpers import add_tokens", "added = add_tokens(model, tokenizer)\nprint(added)")
    assert "\nadded = add_tokens(model, tokenizer)\nprint(added)" in body(convert_cells(LOAD, *cells, DATA, TRAIN))


@pytest.mark.parametrize(
    "cell",
    [
        "for name, book in books.items():\n    book.text = fetch(name)\n    print(name)",
        "book = books['a']\nbook.text = fetch('a'); print(book)",
    ],
)
def test_a_change_through_another_name_reaches_training(cell: str) -> None:
    text = body(convert_cells(LOAD, "books = {'a': Book()}", cell, "dataset = [b.text for b in books.values()]", TRAIN))
    assert "book.text = fetch" in text and "    book.text = fetch('a')" not in text
    assert "if IS_MAIN:\n    for name" not in text


def test_generations_in_a_loop_do_not_count_as_changes_of_the_model() -> None:
    text = body(convert_cells(LOAD, "for q in ['a', 'b']:\n    model.generate(q, streamer = s)", DATA, TRAIN))
    assert "if IS_MAIN:\n    for q in ['a', 'b']:\n" in text


def test_a_changed_tokenizer_reaches_training() -> None:
    text = body(
        convert_cells(
            LOAD,
            "count = tokenizer.add_tokens(['x'])\nprint(count)",
            DATA,
            TRAIN.replace("model=model", "model=model, processing_class=tokenizer"),
        )
    )
    assert "\ncount = tokenizer.add_tokens(['x'])\n" in text


def test_what_is_saved_is_saved_once() -> None:
    line = "tokenizer.save_vocabulary('v')"
    assert f"if IS_MAIN:\n    {line}\nwait_for_everyone()" in body(convert_cells(LOAD, DATA, TRAIN, line))


def test_a_trainer_asks_for_itself_who_saves() -> None:
    cell = "trainer.save_model('m')\ntrainer.push_to_hub()\nmodel.save_pretrained('l')"
    made = (
        "\ntrainer.save_model('m')\ntrainer.push_to_hub()\nwait_for_everyone()\nif IS_MAIN:\n    model.save_pretrained"
    )
    assert made in body(convert_cells(LOAD, DATA, TRAIN, cell))


def test_save_and_what_reads_it_back_share_a_guard_before_a_barrier() -> None:
    cell = "model.save_lora('x')\nwith open('x/config.json') as file:\n    config = file.read()\nprint(config)"
    text = body(convert_cells(LOAD, DATA, TRAIN, cell))
    assert "if IS_MAIN:\n    model.save_lora('x')\n    with open" in text
    assert text.rstrip().endswith("print(config)\nwait_for_everyone()")


def test_a_second_phase_loads_what_the_first_saved_on_every_process() -> None:
    again = "model, tokenizer = FastLanguageModel.from_pretrained('first')"
    text = body(convert_cells(LOAD, DATA, TRAIN, "trainer.save_model('first')", again, TRAIN))
    assert "\ntrainer.save_model('first')\nwait_for_everyone()" in text
    assert "\nmodel, tokenizer = FastLanguageModel.from_pretrained('first', device_map" in text


def test_a_model_reloaded_to_be_tried_is_loaded_once() -> None:
    again = "model, tokenizer = FastLanguageModel.from_pretrained('first')\nFastLanguageModel.for_inference(model)\n"
    text = body(convert_cells(LOAD, DATA, TRAIN, "model.save_pretrained('first')", again + SHOW))
    assert "if IS_MAIN:\n    model, tokenizer = FastLanguageModel" in text


def test_files_written_for_training_are_written_once_a_node() -> None:
    cell = (
        "import json\nwith open('rows.jsonl', 'w') as file:\n    for row in rows:\n        file.write(json.dumps(row))"
    )
    text = body(
        convert_cells(
            LOAD, "rows = [{'text': 'a'}]", cell, "dataset = load_dataset('json', data_files='rows.jsonl')", TRAIN
        )
    )
    assert "if LOCAL_RANK == 0:\n    with open('rows.jsonl', 'w')" in text
    assert "\nrows = [" in text  # a constant needs no guard
    assert text.index("wait_for_everyone()") < text.index("main_process_first()")


def test_a_database_that_reward_functions_ask_is_filled_once_a_node_before_the_others_go_on() -> None:
    cell = "import sqlite3\nbase = sqlite3.connect('a.db')\nframe.to_sql('a', base)\nprint(len(frame))"
    text = body(convert_cells(LOAD, "import pandas as pd\nframe = pd.DataFrame()", cell, DATA, TRAIN))
    assert "    base = sqlite3.connect('a.db')\n    frame.to_sql('a', base)\nwait_for_everyone()\n" in text


def test_a_files_name_is_not_mistaken_for_a_result() -> None:
    """`f` is bound again by what reads the file: nothing of the first one is needed."""
    cells = ("with open('rows', 'w') as f:\n    f.write('x')", "with open('rows') as f:\n    dataset = f.readlines()")
    text = body(convert_cells(LOAD, *cells, TRAIN))
    assert "from_main" not in text and "\nwith open('rows') as f:\n" in text


def test_paid_calls_happen_once_and_their_result_is_shared() -> None:
    cells = (
        "from openai import OpenAI\nclient = OpenAI()",
        "answer = client.chat.completions.create(model='x')",
        "dataset = [answer]",
    )
    done = convert_cells(LOAD, *cells, TRAIN)
    assert "answer = from_main(lambda: client.chat.completions.create(model='x'))" in body(done)
    assert "paid call" in kinds(done)


def test_a_server_starts_once_a_node() -> None:
    cell = (
        "import subprocess, time\nserver = subprocess.Popen(['serve'])\nwhile server.poll() is None:\n    time.sleep(1)"
    )
    done = convert_cells(cell, LOAD)
    assert (
        "if LOCAL_RANK == 0:\n    server = subprocess.Popen(['serve'], env=child_environment())\n"
        "    while server.poll()" in done.script
    )
    assert "server" in kinds(done)


def test_a_servers_handle_is_not_sent_to_other_processes() -> None:
    cells = (
        "from unsloth import launch_openenv\nport, server = 9000, None",
        "port, server = launch_openenv(port, server)\nresult = server.reset()",
        "def reward(completions):\n    global port, server\n    port, server = launch_openenv(port, server)",
        "trainer = GRPOTrainer(model, reward_funcs = [reward], args = GRPOConfig())\ntrainer.train()",
    )
    text = body(convert_cells(LOAD, *cells))
    assert "\nport, server = 9000, None\n" in text and "from_main" not in text
    assert "if LOCAL_RANK == 0:\n    port, server = launch_openenv(port, server)\n    result = server.reset()\n" in text


def test_what_is_read_back_in_a_later_cell_stays_on_the_main_process() -> None:
    cell = "from safetensors import safe_open\nwith safe_open('lora/model.safetensors') as f:\n    keys = f.keys()"
    text = body(convert_cells(LOAD, DATA, TRAIN, "model.save_lora('lora')", cell))
    assert "if IS_MAIN:\n    with safe_open(" in text


def test_a_method_that_is_passed_on_counts_as_called() -> None:
    cells = (
        "def ask(m):\n    return partial(m.generate, x = 1)()",
        "answer = ask(model)\nfirst = answer[0]\nprint(first)",
    )
    assert "if IS_MAIN:\n    answer = ask(model)\n    first = answer[0]\n    print(first)" in body(
        convert_cells(LOAD, *cells, DATA, TRAIN)
    )


def test_a_function_s_globals_reach_training() -> None:
    cells = (
        "limit = 1\ndef choose():\n    global limit\n    limit = 2\n    print(limit)",
        "choose()",
        "dataset = rows[:limit]",
    )
    assert "\nchoose()\n" in body(convert_cells(LOAD, *cells, TRAIN))


def test_input_is_asked_once_and_shared() -> None:
    done = convert_cells(LOAD, "name = input('name? ')")
    assert "name = from_main(lambda: input('name? '))" in body(done) and "input" in kinds(done)


def test_colab_s_modules() -> None:
    done = convert_cells(
        "from google.colab import userdata, drive\ndrive.mount('/content/drive')\nimport os\n"
        "os.environ['HF_TOKEN'] = userdata.get('HF_TOKEN')",
        LOAD,
    )
    assert "google.colab" not in body(done)
    assert "os.environ['HF_TOKEN'] = secret('HF_TOKEN') or \"\"" in done.script
    assert "host" in kinds(done)


def test_plots_and_widgets() -> None:
    cells = (
        "import matplotlib.pyplot as plt\nplt.plot([1]); plt.show()",
        "import ipywidgets as w\nb = w.Button()\ndisplay(b)",
    )
    text = body(convert_cells(LOAD, *cells))
    assert (
        "if IS_MAIN:\n    plt.plot([1])\n    plt.show()" in text
        and "if IS_MAIN:\n    b = w.Button()\n    display(b)" in text
    )


def test_a_line_with_a_save_after_training_is_split() -> None:
    text = body(
        convert_cells(
            LOAD, DATA, TRAIN.replace("trainer.train()", "trainer.train(); model.save_pretrained('x') # both")
        )
    )
    assert "\ntrainer.train()\nif IS_MAIN:\n    model.save_pretrained('x') # both\n" in text


def test_environment_from_a_secret_prompt_reaches_every_process() -> None:
    text = body(convert_cells(LOAD, "import os, getpass\nos.environ['K'] = getpass.getpass('key')"))
    assert "os.environ['K'] = from_main(lambda: getpass.getpass('key'))" in text


@pytest.mark.parametrize(
    "statement", ["torch.manual_seed(1)", "os.chdir('x')", "model.resize_token_embeddings(9)", "setup()"]
)
def test_what_changes_the_process_stays_on_every_process(statement: str) -> None:
    assert f"\n{statement}\n" in body(convert_cells(LOAD, statement, DATA, TRAIN))


def test_a_hand_written_loop_is_said() -> None:
    done = convert_cells(LOAD, "for row in rows:\n    loss = model(**row).loss\n    loss.backward()\n    print(loss)")
    assert kinds(done) == ["loop"]
    assert "\nfor row in rows:\n" in body(done)


def test_a_custom_loss_is_said() -> None:
    cell = "class Mine(SFTTrainer):\n    def compute_loss(self, model, inputs):\n        return 0"
    done = convert_cells(LOAD, cell, DATA, TRAIN.replace("SFTTrainer(", "Mine("))
    assert kinds(done) == ["custom loss"] and "ddp_settings(" in body(done)


def test_sizing_code_is_said() -> None:
    assert "sizing" in kinds(convert_cells(LOAD, "n = xm.device_count()\ndataset = rows[:n]", TRAIN))
    spawn = "import torch.multiprocessing as mp\nmp.spawn(go, nprocs=2)"
    assert "sizing" in kinds(convert_cells(LOAD, DATA, spawn, TRAIN))
    assert "sizing" in kinds(
        convert_cells(
            LOAD,
            DATA,
            TRAIN.replace("\ntrainer.train", "\ntrainer.args.gradient_accumulation_steps = 2\ntrainer.train"),
        )
    )


def test_a_callback_saves_once_and_what_does_not_train_is_left_alone() -> None:
    save = "\n    def on_epoch_end(self, *_, **__):\n        model.save_pretrained('x')"
    text = body(convert_cells(LOAD, DATA, "class Keep(TrainerCallback):" + save, "class Plain:" + save, TRAIN))
    assert "        if IS_MAIN:\n            model.save_pretrained('x')\nclass Plain" in text.replace("\n\n# %%", "")
    assert text.count("if IS_MAIN:") == 1


@pytest.mark.parametrize("function", ["generate", "stream_generate"])
def test_a_library_s_function_that_generates_runs_on_the_main_process(function: str) -> None:
    cell = f"from some_library import {function}\nanswer = {function}(model, tokenizer, prompt='x')\nprint(answer)"
    text = body(convert_cells(LOAD, DATA, TRAIN, cell))
    assert f"if IS_MAIN:\n    answer = {function}(model, tokenizer, prompt='x')\n    print(answer)" in text


def test_a_function_of_the_notebook_called_like_one_that_generates_is_judged_by_its_body() -> None:
    cell = "def generate(rows):\n    return [r['a'] for r in rows]\nkept = generate(dataset)\ntexts = sorted(kept)"
    assert "\nkept = generate(dataset)\n" in body(convert_cells(LOAD, DATA, cell, TRAIN))


def test_a_module_used_in_a_function_is_not_changed_by_it() -> None:
    """If `json.dump(...)` counted as a change of json, a later `json.load` for training would need the generation."""
    cells = (
        "import json, builtins\ndef show(m):\n    out = m.generate('x')\n    json.write(out)\n    return out",
        "answer = show(model)\nprint(answer)",
        "def rows(text):\n    return json.loads(text)\ndataset = rows('[1]')",
    )
    done = convert_cells(LOAD, *cells, TRAIN)
    assert "inference" not in kinds(done) and "if IS_MAIN:\n    answer = show(model)\n    print(answer)" in body(done)


STOPWATCH = "import time\nstarted = 0\ndef tick():\n    global started\n    started = time.time()\n"
STOPWATCH += "def tock():\n    print(time.time() - started)\n"
TIMED = "def show(text):\n    {}\n    print(model.generate(text))\n    tock()\n"
LOOP = "for row in dataset:\n    model(row).loss.backward()\n    show('x')"


@pytest.mark.parametrize(
    ("first", "apart"),
    [
        ("tick()", True),
        ("global started\n    started = time.time()", True),
        ("tock()\n    tick()", True),
        ("if text:\n        tick()", True),
        ("print(started)\n    tick()", False),
        ("global started\n    started = started + 1", False),
    ],
)
def test_a_global_that_only_times_ties_the_calls_that_set_it_to_nothing(first: str, apart: bool) -> None:
    text = body(convert_cells(LOAD, DATA, STOPWATCH + TIMED.format(first), "show('before')", LOOP))
    assert ("if IS_MAIN:\n    show('before')" in text) is apart
    assert apart or "\nshow('before')\n" in text


def test_a_stopwatch_that_exists_only_where_it_is_started_runs_everywhere() -> None:
    watch = STOPWATCH.replace("started = 0\n", "")
    stop = "for row in dataset:\n    model(row).loss.backward()\n    tock()"
    text = body(
        convert_cells(LOAD, DATA, watch + "def both():\n    tick()\n    print(model.generate('x'))", "both()", stop)
    )
    assert "\nboth()\n" in text


def test_a_class_that_downloads_when_it_is_made_is_made_on_one_process_first() -> None:
    cell = (
        "class Rows(Dataset):\n    def __init__(self, name):\n        self.rows = load_dataset(name)\n"
        "dataset = Rows('d')"
    )
    cells = ("from torch.utils.data import Dataset\nfrom datasets import load_dataset", cell)
    assert "with main_process_first():\n    dataset = Rows('d')" in body(convert_cells(LOAD, *cells, TRAIN))


def test_an_import_before_its_use_in_one_line_reads_nothing_from_above() -> None:
    """The cell's `if` then serves the installs only, and goes with them."""
    install = "import os\nif 'COLAB_' in os.environ:\n    import torch; v = torch.__version__\n    !pip install x{v}"
    text = body(convert_cells(install + "\nimport torch; torch.set_printoptions(2)", LOAD, DATA, TRAIN))
    assert "pass" not in text and "COLAB_" not in text and "torch.set_printoptions(2)" in text


def test_the_tokenizer_that_training_reads_back_is_saved_on_each_node() -> None:
    cell = "tokenizer.save_model('words')\nfrom transformers import BertTokenizerFast"
    read = "tokenizer = BertTokenizerFast.from_pretrained('words')"
    used = TRAIN.replace("model=model,", "model=model, processing_class=tokenizer,")
    text = body(convert_cells(LOAD, DATA, cell, read, used))
    assert "if LOCAL_RANK == 0:\n    tokenizer.save_model('words')" in text and f"\n{read}\n" in text


def test_a_block_that_makes_model_and_optimizer_runs_on_every_process() -> None:
    """Sent apart, the optimizer would hold other weights than the model."""
    cell = (
        "if __name__ == '__main__':\n    model = AutoModel.from_pretrained('m')\n    open('a', 'w').write('x')\n"
        "    optimizer = torch.optim.AdamW(model.parameters())"
    )
    loop = "for row in rows:\n    model(row).loss.backward()\n    optimizer.step()"
    text = body(convert_cells("import torch\nfrom transformers import AutoModel\nrows = [1]", cell, loop))
    assert "from_main(lambda" not in text
    assert "with main_process_first():\n    if __name__ == '__main__':\n        model = AutoModel" in text


def test_methods_of_a_class_that_another_inherits_are_followed() -> None:
    cells = (
        "class Bench:\n    def size(self):\n        torch.save(1, 'x.pt')\n        return 1",
        "class Later(Bench):\n    def name(self):\n        return 'later'",
        "bench = Bench()\nsizes = bench.size()",
        TRAIN,
        "bench = Later()\nsizes = bench.size()",
    )
    text = body(convert_cells("import torch", LOAD, DATA, *cells))
    assert text.count("    sizes = bench.size()") == 2
