"""What only the main process has, or what each process would make anew, is read once and sent."""

import copy

import pytest
from making import LOAD, body, convert_cells, helpers, kinds

START = "import wandb\nrun = wandb.init(project = 'p', config = {'lr': 1e-4})"
CLOCK = "import os, secrets, tempfile, time, uuid\nfrom datetime import date, datetime\nstamp = 'x'"
TRAIN = (
    "from trl import SFTConfig, SFTTrainer\n"
    "trainer = SFTTrainer(model=model, train_dataset=rows, args=SFTConfig(\n"
    "    gradient_accumulation_steps = 4,\n"
    "    output_dir = value,\n"
    "))\n"
    "trainer.train()"
)


# The cell's training once for each row.
LOOP = "from trl import SFTConfig, SFTTrainer\nfor phase in rows:\n    " + TRAIN[TRAIN.index("trainer") :].replace(
    "\n", "\n    "
)


def script(*cells: str, train: str = TRAIN) -> str:
    return body(convert_cells(LOAD, "rows = [1]", *cells, train))


def test_a_run_starts_once_and_a_login_once_a_node() -> None:
    text = script("import wandb\nwandb.login()\nwandb.init()\nvalue = 1")
    assert "if LOCAL_RANK == 0:\n    wandb_login()\n" in text and "if IS_MAIN:\n    wandb.init()\n" in text


@pytest.mark.parametrize(
    ("start", "made"),
    [
        ("wandb.init(project='p')", "wandb.init(mode=None if IS_MAIN else \"disabled\", project='p')"),
        ("wandb.init()", 'wandb.init(mode=None if IS_MAIN else "disabled")'),
        ("wandb.init(mode='offline')", "wandb.init(mode=('offline') if IS_MAIN else \"disabled\")"),
    ],
)
@pytest.mark.parametrize("block", ["with {} as run:", "for value in (1, 2):\n    run = {}"])
def test_a_run_that_starts_around_the_training_is_tracked_once(start: str, made: str, block: str) -> None:
    done = convert_cells(LOAD, "rows = [1]\nimport wandb\nvalue = 1", _inside(block.format(start)))
    assert block.format(made) + "\n" in body(done) and kinds(done) == []


@pytest.mark.parametrize("start", ["mlflow.start_run()", "trackio.init(project='p')", "wandb.init(**given)"])
def test_a_run_around_the_training_that_cannot_be_switched_off_is_entered_once(start: str) -> None:
    cells = ("rows = [1]\nimport mlflow, trackio, wandb\nvalue = 1\ngiven = {}", _inside(f"with {start}:"))
    done = convert_cells(LOAD, *cells)
    assert f"with ({start} if IS_MAIN else NoRun()):\n" in body(done) and kinds(done) == []
    named = convert_cells(LOAD, cells[0], _inside(f"with {start} as run:"))
    assert f"with ({start} if IS_MAIN else NoRun()) as run:\n" in body(named) and kinds(named) == []


def _inside(block: str) -> str:
    return block + "\n    " + TRAIN.replace("\n", "\n    ")


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("value = wandb.config.lr", "value = from_main(lambda: wandb.config.lr)"),
        ("value = wandb.config['lr'] * 2", "value = from_main(lambda: wandb.config['lr']) * 2"),
        ("value = run.config.get('lr', 1)", "value = from_main(lambda: run.config.get('lr', 1))"),
        ("value = f'out/{run.name}-{wandb.run.id}'", "value = from_main(lambda: f'out/{run.name}-{wandb.run.id}')"),
        ("value = 'out/' + run.id", "value = 'out/' + from_main(lambda: run.id)"),
        (
            "value = wandb.run.name if wandb.run else 'x'",
            "value = from_main(lambda: wandb.run.name if wandb.run else 'x')",
        ),
        ("value = dict(wandb.config)['lr']", "value = dict(from_main(lambda: dict(wandb.config)))['lr']"),
        ("config = wandb.config\nvalue = config.lr", "value = from_main(lambda: config.lr)"),
        ("config = run.config\nvalue = config.lr", "value = from_main(lambda: config.lr)"),
        ("value = wandb.summary['best']", "value = from_main(lambda: wandb.summary['best'])"),
        ("if rows:\n    run = rows[0]\nvalue = run.name", "value = from_main(lambda: run.name)"),
        # No process may wait for another while others wait for it.
        (
            "from datasets import load_dataset\nvalue = 1\nrows = load_dataset(run.config.name)",
            "rows = load_dataset(from_main(lambda: run.config.name))",
        ),
        (
            "import time\nvalue = 1\nbegin = run.config.begin\nif time.time() - begin > 9:\n    value = 2",
            "begin = from_main(lambda: run.config.begin)",
        ),
        (
            "value = {}\nfor k, v in run.config.items():\n    value[k] = v",
            "for k, v in from_main(lambda: list(run.config.items())):\n    value[k] = v",
        ),
    ],
)
def test_what_a_run_knows_is_sent(given: str, made: str) -> None:
    text = script(START, given)
    assert "if IS_MAIN:\n    run = wandb.init(" in text and f"\n{made}\n" in text
    assert "run = from_main" not in text and "lambda: run)" not in text


def test_what_a_run_knows_is_sent_from_within_the_arguments() -> None:
    text = script(START, train=TRAIN.replace("value", "wandb.config.folder"))
    assert "    output_dir = from_main(lambda: wandb.config.folder),\n" in text


def test_another_name_of_a_config_stays_on_the_main_process() -> None:
    for name in ("wandb.config", "run.config"):
        assert f"if IS_MAIN:\n    config = {name}\n" in script(START, f"config = {name}\nvalue = config.lr")


def test_what_changes_a_run_stays_where_it_is() -> None:
    text = script(START, "run.config.update({'a': 1})\nwandb.run.name = 'x'\nvalue = run.name")
    assert "    run.config.update({'a': 1})\n    wandb.run.name = 'x'\nvalue = from_main(" in text


def test_a_name_that_held_a_run_once_is_a_name_again() -> None:
    assert "\nrun = rows[0]\nvalue = run.name\n" in script(START, "run = rows[0]\nvalue = run.name")
    config = "config = wandb.config\nconfig = rows[0]\nvalue = config.lr"
    assert "\nconfig = rows[0]\nvalue = config.lr\n" in script(START, config)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("run.log(trainer.train().metrics)", "run.log(trainer.train().metrics)"),
        ("best = run.summary.update(trainer.train().metrics)", "best = run.summary.update(trainer.train().metrics)"),
        ("best = f'{run.name} {trainer.train()}'", "best = f'{from_main(lambda: run.name)} {trainer.train()}'"),
        (
            "best = run.name if trainer.train() else 'x'",
            "best = from_main(lambda: run.name) if trainer.train() else 'x'",
        ),
    ],
)
def test_training_stays_on_every_process(given: str, made: str) -> None:
    text = script(START, "value = 'x'", train=TRAIN.replace("trainer.train()", given))
    assert f"\n{made}\n" in text


def test_a_run_that_is_told_what_training_came_to_is_said() -> None:
    train = TRAIN.replace("trainer.train()", "run.log(trainer.train().metrics)")
    assert kinds(convert_cells(LOAD, "rows = [1]", START, "value = 'x'", train)) == ["tracker"]


def test_what_mlflow_knows_is_sent() -> None:
    text = script("import mlflow\nrun = mlflow.start_run()\nvalue = run.info.run_id")
    assert "if IS_MAIN:\n    run = mlflow.start_run()\n" in text
    assert "value = from_main(lambda: run.info.run_id)" in text


@pytest.mark.parametrize("given", ["value = use(run)", "def choose():\n    return wandb.config.lr\nvalue = choose()"])
def test_a_run_that_cannot_be_sent_is_said(given: str) -> None:
    assert kinds(convert_cells(LOAD, "rows = [1]", START, given, TRAIN)) == ["tracker"]
    assert kinds(convert_cells(LOAD, "rows = [1]", START, "value = run.name", TRAIN)) == []


def test_a_function_that_starts_a_run_may_use_it() -> None:
    cell = "def again():\n    run = wandb.init()\n    return run.name\nvalue = again()"
    assert kinds(convert_cells(LOAD, "rows = [1]", START, cell, TRAIN)) == []


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("value = datetime.now().strftime('%H')", "value = from_main(lambda: datetime.now().strftime('%H'))"),
        ("value = f'out/{date.today()}'", "value = from_main(lambda: f'out/{date.today()}')"),
        ("value = 'a' + time.strftime('%H')", "value = 'a' + from_main(lambda: time.strftime('%H'))"),
        ("value = str(uuid.uuid4())[:8]", "value = str(from_main(lambda: uuid.uuid4()))[:8]"),
        (
            "value = os.path.join('a', str(os.getpid()))",
            "value = os.path.join('a', str(from_main(lambda: os.getpid())))",
        ),
        ("value = tempfile.mkdtemp()", "value = from_main(lambda: tempfile.mkdtemp())"),
        (
            "value = str([1 for row in rows]) + time.ctime()",
            "value = str([1 for row in rows]) + from_main(lambda: time.ctime())",
        ),
        ("value = secrets.token_hex(4)", "value = from_main(lambda: secrets.token_hex(4))"),
        ("now = time.time()\nvalue = str(now)", "now = from_main(lambda: time.time())"),
        (
            "def name():\n    now = datetime.now()\n    return now.isoformat()\nvalue = name()",
            "value = from_main(lambda: name())",
        ),
        (
            "import random\nvalue = 1\nseed = int(time.time())\nrandom.seed(seed)",
            "seed = int(from_main(lambda: time.time()))",
        ),
        ("value = 1\nos.chdir(time.strftime('%H'))", "os.chdir(from_main(lambda: time.strftime('%H')))"),
        ("value = 1\nhour = time.strftime('%H')\nos.chdir(hour)", "hour = from_main(lambda: time.strftime('%H'))"),
    ],
)
def test_what_differs_by_process_is_sent(given: str, made: str) -> None:
    assert f"\n{made}\n" in script(CLOCK, given)


def test_a_clock_in_the_arguments_is_sent() -> None:
    text = script(CLOCK, train=TRAIN.replace("value", "f'out/{time.time()}'"))
    assert "    output_dir = from_main(lambda: f'out/{time.time()}'),\n" in text


def test_a_clock_in_a_loop_that_trains_is_sent() -> None:
    text = script(CLOCK, train=LOOP.replace("value", "f'out/{time.time()}'"))
    assert "output_dir = from_main(lambda: f'out/{time.time()}')," in text


def test_a_clock_in_what_only_the_main_process_saves_is_left_alone() -> None:
    text = script(CLOCK, "value = 'x'", train=LOOP + "\n    model.save_pretrained(f'm-{time.time()}')")
    assert "    if IS_MAIN:\n        model.save_pretrained(f'm-{time.time()}')\n" in text


@pytest.mark.parametrize(
    "given",
    [
        "begin = time.time()\nprint(time.time() - begin)",
        "for _ in range(2):\n    begin = time.time()\n    rows.append(1)\n    print(f'{time.time() - begin:.1f}')",
        "begin = datetime.now()\nrows.append(1)\nspent = datetime.now() - begin\nprint(spent)",
        "end = time.time() + 9\nwhile time.time() < end:\n    rows.append(1)",
        "model.save_pretrained(f'm-{time.time()}')",
        "label = time.strftime('%H')\nlabels = [label]",
        "rows = [(row, uuid.uuid4()) for row in rows]",
        "for row in list(rows):\n    rows.append(uuid.uuid4())",
        "rows = list(map(lambda row: (row, uuid.uuid4()), rows))",
        "def took():\n    return time.time()\nprint(took())",
        "rows = {row: uuid.uuid4() for row in rows}",
        "rows = list(str(uuid.uuid4()) for row in rows)",
        "if rows:\n    begin = time.time()\n    rows.append(1)\n    print(time.time() - begin)",
        "end = time.time() + 9\nif end > time.time():\n    rows.append(1)",
        # Each waits for the others in there.
        "with accelerator.main_process_first():\n    rows.append(time.time())",
        # What they do beside reading a clock is for every process.
        "def mark():\n    rows.append(1)\n    return time.time()\nrows = [mark()]",
        "def mark():\n    global rows\n    rows = [1]\n    return time.time()\nrows = [mark()]",
        "import lib\ndef mark():\n    lib.mark()\n    return time.time()\nrows = [mark()]",
        "class Mark:\n    def __init__(self):\n        self.at = time.time()\nrows = [Mark()]",
    ],
)
def test_a_clock_that_reaches_no_name_is_left_alone(given: str) -> None:
    done = convert_cells(LOAD, "rows = [1]", CLOCK, "value = 'x'", given, TRAIN)
    assert "from_main" not in done.script


def test_the_helper_is_there_before_the_first_value_is_sent() -> None:
    text = convert_cells("import time\nvalue = time.strftime('%H')", LOAD, "rows = [1]", TRAIN).script
    assert text.index("def from_main") < text.index("value = from_main")
    text = convert_cells("import random\nvalue = random.random()", LOAD, "rows = [1]", TRAIN).script
    assert text.index("def same_draws") < text.index("same_draws(3407)")


COMET = "import comet_ml\nexperiment = comet_ml.start()\nhyper = {'lr': 1}\nexperiment.log_parameters(hyper)"
COMET_LOOP = (
    "def train(model, experiment):\n    for batch in rows:\n        loss = model(batch)\n        loss.backward()\n"
    "        experiment.log_metric('loss', loss)"
)


def test_a_run_that_a_loop_passes_on_has_a_stand_in() -> None:
    """Without one, the other processes end with a NameError where the main one trains."""
    go = (
        "model = Net(hyper['lr'])\nwith experiment.train():\n    train(model, experiment)\nlog_model(experiment, model)"
    )
    done = convert_cells("import torch\nfrom nets import Net, log_model\nrows = [1]", COMET, COMET_LOOP, go)
    text = body(done)
    assert "experiment = comet_ml.start() if IS_MAIN else NoRun()" in text and "tracker" not in kinds(done)
    assert "\nwith experiment.train():\n    train(model, experiment)\n" in text
    assert "if IS_MAIN:\n    log_model(experiment, model)" in text
    assert "from_main" not in text  # what a tracker is told stays as it is


def test_a_stand_in_takes_whatever_a_run_takes() -> None:
    run = helpers("NoRun")["NoRun"]()
    with run.train() as inside:
        inside.log({"a": 1}).anything.at_all(2)
    assert copy.deepcopy(run) is not run  # trainers copy what their callbacks hold


def test_a_run_that_no_loop_passes_on_has_no_stand_in() -> None:
    text = body(convert_cells(LOAD, "dataset = [1]", COMET, TRAIN, "experiment.end()"))
    assert "if IS_MAIN:\n    experiment = comet_ml.start()" in text and "NoRun" not in text


def test_a_text_of_several_parts_is_sent_whole() -> None:
    text = script(CLOCK, "if rows:\n    value = (\n        f'{stamp}'\n        f'-{datetime.now()}'\n    )")
    assert "value = from_main(lambda: (\n        f'{stamp}'\n        f'-{datetime.now()}'\n    ))\n" in text
