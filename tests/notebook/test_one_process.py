"""Check that several processes do what one did: batches, unused weights, entries, waits, files and trackers."""

import pytest
from making import LOAD, TRAIN, body, convert_cells, kinds

PLAIN = "from transformers import AutoModel, Trainer, TrainingArguments\nmodel = AutoModel.from_pretrained('m')"
ARGUMENTS = "args = TrainingArguments('o', per_device_train_batch_size=16)"
TRAINER = "trainer = Trainer(model=model, args=args, train_dataset=dataset)\ntrainer.train()"


def messages(*cells: str) -> str:
    report = convert_cells(*cells).report
    return "\n".join(entry.message for entry in (*report.edits, *report.warnings))


@pytest.mark.parametrize(
    ("cells", "left"),
    [
        ((PLAIN, ARGUMENTS, TRAINER), True),
        ((LOAD, TRAIN), False),
        (("from peft import LoraConfig", PLAIN, ARGUMENTS[:-1] + ", gradient_checkpointing=True)", TRAINER), False),
        (("from peft import LoraConfig", PLAIN, "model.gradient_checkpointing_enable({'use_reentrant': False})",
          ARGUMENTS, TRAINER), True),
    ],
)  # fmt: skip
def test_transformers_decides_on_unused_weights_but_where_layers_are_computed_anew(
    cells: tuple[str, ...], left: bool
) -> None:
    assert ("search=None" in body(convert_cells(*cells))) == left
    assert ("decides whether to search for unused weights" in messages(*cells)) == left


@pytest.mark.parametrize(
    ("row", "flag", "left"),
    [("'text'", "", True), ("'image'", "", False), ("'text'", ", finetune_vision_layers=False", False)],
)
def test_adapters_of_a_tower_without_images_get_no_gradient(row: str, flag: str, left: bool) -> None:
    load = "from unsloth import FastVisionModel\nmodel, tokenizer = FastVisionModel.from_pretrained('m')\n"
    load += f"model = FastVisionModel.get_peft_model(model{flag})\nkey = {row}"
    done = convert_cells(load, TRAIN)
    assert ("search=None" in body(done)) == left == ("unused weights" in kinds(done))


def test_a_notebook_without_unsloth_keeps_its_batch() -> None:
    assert "per_device_train_batch_size=batch_per_process(16, 1)" in body(convert_cells(PLAIN, ARGUMENTS, TRAINER))
    assert "the same and faster" in messages(LOAD, TRAIN)
    one = convert_cells(PLAIN, ARGUMENTS, TRAINER, per_device_batch_size=1)
    assert "per_device_train_batch_size=1," in body(one).replace(")", ",")


@pytest.mark.parametrize(
    "loss",
    [
        "near @ near.T", "torch.matmul(a, b.t())", "(y[:, None] == y[None]).float()", "torch.cdist(a, b)",
        "cross_entropy(logits, torch.arange(len(logits)))", "cosine(a.unsqueeze(1), b.unsqueeze(0))", "InfoNCE()(a, b)",
    ],
)  # fmt: skip
def test_a_loss_across_the_batch_keeps_its_batch(loss: str) -> None:
    subclass = f"class Own(Trainer):\n    def compute_loss(self, model, inputs):\n        return {loss}\n"
    train = TRAINER.replace("Trainer(", "Own(")
    for load in (PLAIN, LOAD + "\nfrom transformers import Trainer, TrainingArguments"):
        done = convert_cells(load, subclass, ARGUMENTS, train)
        assert "least=2" in body(done) and "contrastive" in kinds(done)


@pytest.mark.parametrize(
    "loss",
    ["x @ self.weight.T", "scores @ keys.transpose(-2, -1)", "hidden[torch.arange(len(hidden)), last]",
     "cross_entropy(x, y)", "torch.arange(n).unsqueeze(0) - torch.arange(n).unsqueeze(1)"],
)  # fmt: skip
def test_a_loss_of_each_row_does_not(loss: str) -> None:
    subclass = f"class Own(Trainer):\n    def compute_loss(self, model, inputs):\n        return {loss}\n"
    assert "contrastive" not in kinds(convert_cells(PLAIN, subclass, ARGUMENTS, TRAINER.replace("Trainer(", "Own(")))


def test_what_every_process_reads_every_process_has() -> None:
    make = "results = {}\ndef count(m):\n    print(m)\n    return 1\nresults['a'] = count(model)\n"
    make += "model.extra = count(model)"
    text = body(convert_cells(LOAD, make, TRAIN, "trainer.log(results['a'])\ntrainer.save_model(model.extra)"))
    assert "\nresults['a'] = count(model)\n" in text and "\nmodel.extra = count(model)\n" in text


def test_what_only_the_main_process_has_filled_only_it_reads() -> None:
    fill = "texts = []\nfor row in rows:\n    texts.append(model.generate(row))\n"
    fill += "share = sum(texts) / len(texts)\nprint(share)"
    assert "    share = sum(texts) / len(texts)\n" in body(convert_cells(LOAD, TRAIN, fill))


LOOP = "def size(path):\n    return open(path).read()\nfor rate in (1, 2):\n"
LOOP += "    t = SFTTrainer(model=model, args=SFTConfig())\n    t.train()\n"


@pytest.mark.parametrize(
    ("lines", "made"),
    [
        ("model.save_pretrained('x')\nsize('x')",
         "    if IS_MAIN:\n        model.save_pretrained('x')\n    wait_for_everyone()\n"),
        ("if rate > 1:\n    model.save_pretrained('x')\nsize('x')",
         "        if IS_MAIN:\n            model.save_pretrained('x')\n    wait_for_everyone()\n    size('x')"),
        ("with open('f', 'w') as f:\n    json.dump(rate, f)", "    if IS_MAIN:\n        with open('f', 'w') as f:\n"),
        ("with open('f', 'w') as f:\n    w = csv.writer(f)\n    for r in rows:\n        w.writerow(r)",
         "    if IS_MAIN:\n        with open('f', 'w') as f:\n            w = csv.writer(f)\n"),
        ("total = 0\nwith open('f', 'w') as f:\n    json.dump(rate, f)\n    total += 1\nprint(total)",
         "    with open('f' if IS_MAIN else os.devnull, 'w') as f:\n        json.dump(rate, f)\n        total += 1\n"),
        ("[wandb.log({'x': x}) for x in rows]", "    if IS_MAIN:\n        [wandb.log({'x': x}) for x in rows]\n"),
        ("mlflow.log_artifact('x')", "    if IS_MAIN:\n        mlflow.log_artifact('x')\n"),
    ],
)  # fmt: skip
def test_blocks_wait_and_write_as_the_top_of_a_script(lines: str, made: str) -> None:
    block = "".join(f"    {line}\n" for line in lines.splitlines())
    imports = "from trl import SFTConfig, SFTTrainer\nimport csv, json, wandb, mlflow"
    assert made in body(convert_cells(LOAD, imports, LOOP + block))


def test_no_wait_where_processes_may_go_different_ways() -> None:
    """Each has losses of its own rows: those that do not save must wait as well, and once, behind the batches."""
    loop = "for x, y in loader:\n    loss = model(x)\n    loss.backward()\n    optimizer.step()\n"
    loop += "    optimizer.zero_grad()\n    if loss < best:\n        torch.save(model, 'b.pt')\n"
    text = body(
        convert_cells("import torch", "def fit():\n" + "".join(f"    {line}\n" for line in loop.splitlines()), "fit()")
    )
    assert "            if IS_MAIN:\n                torch.save(model, 'b.pt')\n    wait_for_everyone()\n" in text


@pytest.mark.parametrize(
    "call", ["wandb.define_metric('x')", "wandb.log_artifact(a)", "trackio.log({})", "swanlab.log({})"]
)
def test_trackers_belong_to_the_process_with_the_run(call: str) -> None:
    assert f"if IS_MAIN:\n    {call}\n" in body(convert_cells(LOAD, "import wandb, trackio, swanlab", call, TRAIN))


def test_display_before_its_import() -> None:
    done = convert_cells(LOAD, "display(1)", "from IPython.display import display\ndisplay(2)")
    assert "\ndef display(*values" in done.script


@pytest.mark.parametrize(
    ("made", "call", "warns"),
    [
        (
            "from sentence_transformers import SentenceTransformer\nm = SentenceTransformer('x')",
            "m.fit(objectives)",
            ["sizing"],
        ),
        ("from ultralytics import YOLO\nm = YOLO('x')", "m.train(data='d')", ["training"]),
        ("from sklearn.svm import SVC\nm = SVC()", "m.fit(x, y)", []),
    ],
)
def test_trainings_under_other_names(made: str, call: str, warns: list[str]) -> None:
    done = convert_cells(LOAD, TRAIN, made, f"print({call})")
    assert [kind for kind in kinds(done) if kind != "arguments"] == warns
    assert (f"    print({call})" in body(done)) == (warns == [])


def test_a_launcher_of_spark_is_left_out_and_its_processes_count() -> None:
    start = "from pyspark.ml.torch.distributor import TorchDistributor\n"
    start += "out = TorchDistributor(num_processes=4).run(fit, 0.1)"
    train = f"def fit(rate):\n    {ARGUMENTS}\n    Trainer(model=model, args=args, train_dataset=d).train()"
    text = body(convert_cells(PLAIN, train, start))
    assert "\nout = fit(0.1)\n" in text and "accumulation_steps(16 * 4, batch_per_process(16, 4))" in text


def test_comments_stay_with_their_arguments() -> None:
    cell = "args = SFTConfig( # all\n    # the batch\n    per_device_train_batch_size = 2, # two\n"
    cell += "    gradient_accumulation_steps = 1,\n)"
    text = body(convert_cells(LOAD, f"from trl import SFTConfig\n{cell}"), comments=True)
    assert "SFTConfig( # all\n    **ddp_settings(SFTConfig),\n" in text
    assert "    # the batch\n    per_device_train_batch_size = 1,\n" in text
    assert "# ddp: was per_device_train_batch_size = 2, # two\n" in text


def test_the_same_is_said_once() -> None:
    script = convert_cells(PLAIN, "both = [TrainingArguments('a'), TrainingArguments('b')]").script
    lines = [line for line in script.splitlines() if line.startswith("# ddp: count every token")]
    assert len(lines) == 1


def test_what_a_trainer_overrides_still_waits_for_all() -> None:
    """Its `super().evaluate()` gathers: on the main process alone it would wait for ever."""
    subclass = (
        "class Own(Trainer):\n    def evaluate(self):\n        model.generate(x)\n        return super().evaluate()"
    )
    text = body(
        convert_cells(PLAIN, ARGUMENTS, subclass, TRAINER.replace("= Trainer(", "= Own("), "r = trainer.evaluate()")
    )
    assert "\nr = trainer.evaluate()\n" in text


def test_a_model_moved_under_a_second_name_is_moved_on_every_process() -> None:
    loop = "for x in batches:\n    loss = model(x)\n    loss.backward()\n    optimizer.step()"
    text = body(convert_cells("import torch\nmodel = Net()", "m = model.to(device)\nprint(m)", loop))
    assert "\nm = model.to(device)\n" in text


def test_a_method_of_the_notebook_gets_no_seed_for_its_name() -> None:
    buffer_code = "class Buffer:\n    def sample(self, n):\n        return self.rows[:n]\nbuffer = Buffer()"
    text = body(convert_cells(LOAD, buffer_code, "dataset = buffer.sample(8)", TRAIN))
    assert "= buffer.sample(8)\n" in text


def test_a_trainer_that_a_function_hands_back_shares_its_rows() -> None:
    wrapped = "from unsloth.chat_templates import train_on_responses_only as mask\ntrainer = mask(trainer)\n"
    made, train = TRAIN.rsplit("\n", 1)
    assert kinds(convert_cells(LOAD, made, wrapped + train.replace("()", "(resume_from_checkpoint=True)"))) == []
