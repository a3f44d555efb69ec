"""Trainers' arguments: the batch plan and what DDP needs."""

from typing import Any

import pytest
from making import LOAD, TRAIN, body, convert_cells, helpers, kinds


def arithmetic(world: int, rank: int = 0) -> dict[str, Any]:
    """The prologue's batch arithmetic in a process of `world`."""
    names = ("batch_per_process", "ddp_configured")
    return helpers(*names, WORLD_SIZE=world, RANK=rank, IS_MAIN=rank == 0)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_global_batch_is_kept(world: int) -> None:
    assert arithmetic(world)["accumulation_steps"](2 * 4, 1) * world == 8


def test_the_nearest_where_it_does_not_divide_and_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert arithmetic(3)["accumulation_steps"](8, 1) == 3
    assert "Global batch 9 instead of 8" in capsys.readouterr().out
    assert arithmetic(16)["accumulation_steps"](8, 1) == 1
    assert arithmetic(16, rank=1)["accumulation_steps"](8, 1) == 1
    assert capsys.readouterr().out.count("Global batch") == 1  # rank 0 only


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [2, 4, 6, 8])
def test_generations_stay_whole(world: int, group: int) -> None:
    steps = arithmetic(world)["accumulation_steps"](group * 4, 1, multiple=group)
    assert steps * world % group == 0


def test_contrastive_batches_are_split_not_accumulated() -> None:
    names = arithmetic(2)
    per_device = names["batch_per_process"](256, 1, least=2)
    assert (per_device, names["accumulation_steps"](256, per_device)) == (128, 1)
    assert arithmetic(8)["batch_per_process"](8, 1, least=2) == 2
    assert arithmetic(2)["batch_per_process"](1, 1, least=2) == 1  # a batch of one does not become four in all


def test_arguments_from_elsewhere_are_completed_when_they_run() -> None:
    class Config:
        def __init__(self, average_tokens_across_devices=False, ddp_find_unused_parameters=None, **shown: int) -> None:
            self.per_device_train_batch_size = shown.get("per_device_train_batch_size", 4)
            self.gradient_accumulation_steps = shown.get("gradient_accumulation_steps", 2)

    complete = arithmetic(2)["ddp_configured"]
    completed = vars(complete(Config(), 1, report_to=["tensorboard"]))
    assert completed == {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        "ddp_find_unused_parameters": False,
        "average_tokens_across_devices": True,
        "report_to": ["tensorboard"],
    }
    again = vars(complete(Config(**completed), 1))  # `**args.to_dict()` of arguments made so
    assert again.items() <= completed.items()


@pytest.mark.parametrize("names", [(), ("ddp_find_unused_parameters",), ("average_tokens_across_devices",)])
def test_settings_that_an_older_release_does_not_have_are_not_passed(
    names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = "".join(f", {name}=None" for name in names)
    scope: dict[str, Any] = {}
    exec(f"class Config:\n    def __init__(self, lr=1{parameters}): pass\nclass SFTConfig(Config): pass", scope)
    settings = arithmetic(2)["ddp_settings"](scope["SFTConfig"])
    scope["SFTConfig"](**settings)  # a TypeError in the notebooks that pin such a release
    assert set(settings) == set(names)
    assert ("averages the loss" in capsys.readouterr().out) == ("average_tokens_across_devices" not in names)


DDP = ("**ddp_settings(",)


def test_inline_arguments() -> None:
    text = body(convert_cells(LOAD, TRAIN))
    assert "    per_device_train_batch_size = 1,\n" in text
    assert "    gradient_accumulation_steps = accumulation_steps(2 * 4, 1),\n" in text
    assert all(name in text for name in DDP)


@pytest.mark.parametrize(
    "config", ["TrainingArguments", "SFTConfig", "DPOConfig", "ORPOConfig", "UnslothTrainingArguments"]
)
def test_arguments_in_a_variable(config: str) -> None:
    text = body(
        convert_cells(
            LOAD,
            f"args = {config}(per_device_train_batch_size = batch, gradient_accumulation_steps = a + b)\n"
            "trainer = SFTTrainer(model = model, args = args)\ntrainer.train()",
        )
    )
    assert "gradient_accumulation_steps = accumulation_steps(batch * (a + b), 1)" in text
    assert all(name in text for name in DDP)


def test_an_unknown_class_is_known_by_its_use() -> None:
    text = body(
        convert_cells(
            LOAD, "args = MyArgs(gradient_accumulation_steps = 4)\nt = SFTTrainer(model, args = args)\nt.train()"
        )
    )
    assert "args = ddp_configured(MyArgs(gradient_accumulation_steps = 4), 1)\n" in text


def test_two_phases() -> None:
    done = convert_cells(LOAD, TRAIN, TRAIN.replace("trainer", "second"))
    assert body(done).count("**ddp_settings(SFTConfig)") == 2


def test_a_setting_that_was_there_is_replaced_and_said() -> None:
    done = convert_cells(LOAD, "t = SFTTrainer(model, args = SFTConfig(ddp_find_unused_parameters = True))\nt.train()")
    assert "ddp_configured(SFTConfig(), 1)" in body(done)
    assert any("was True" in e.message for e in done.report.edits)


def test_arguments_from_a_dict_keep_their_comments() -> None:
    text = convert_cells(
        "from trl import SFTConfig\nargs = SFTConfig(\n    output_dir='o', # here\n    **common, # more\n)"
    ).script
    assert "# here\n" in text and "# more\n" in text


def test_arguments_from_a_dict() -> None:
    text = body(convert_cells(LOAD, "t = SFTTrainer(model, args = SFTConfig(output_dir='o', **common))\nt.train()"))
    assert "args = ddp_configured(SFTConfig(output_dir='o', **common), 1)" in text


def test_keep_and_other_sizes() -> None:
    assert "per_device_train_batch_size = 3," in body(convert_cells(LOAD, TRAIN, per_device_batch_size=3))
    kept = body(convert_cells(LOAD, TRAIN, per_device_batch_size=None))
    assert "per_device_train_batch_size = batch_per_process(2, 4)," in kept


@pytest.mark.parametrize(
    ("config", "trainer"),
    [("SentenceTransformerTrainingArguments", "SentenceTransformerTrainer"), ("KTOConfig", "KTOTrainer")],
)
def test_contrastive_trainers_never_get_one_row(config: str, trainer: str) -> None:
    done = convert_cells(
        LOAD, f"t = {trainer}(model = model, args = {config}(per_device_train_batch_size = 64))\nt.train()"
    )
    assert "least=2" in body(done) and "contrastive" in kinds(done)


def test_generations() -> None:
    call = "t = GRPOTrainer(model = model, args = GRPOConfig(per_device_train_batch_size = {}, "
    call += "gradient_accumulation_steps = {}, num_generations = {}))\nt.train()"
    assert "accumulation_steps(2 * 4, 1, multiple=4)" in body(convert_cells(LOAD, call.format(2, 4, 4)))
    assert "accumulation_steps(8 * 4, 1, multiple=8)" in body(convert_cells(LOAD, call.format(1, 4, 8)))
    assert "args = ddp_configured(GRPOConfig(" in body(convert_cells(LOAD, call.format("b", 4, 8)))


def test_report_to() -> None:
    cell = TRAIN.replace("# note\n", "# note\n    report_to = 'wandb',\n")
    assert "report_to = 'wandb'" in body(convert_cells(LOAD, cell))
    assert 'report_to = "tensorboard"' in body(convert_cells(LOAD, cell, tensorboard=True))


def test_a_trainer_built_in_a_function() -> None:
    done = convert_cells(
        LOAD,
        "def run(model):\n    args = SFTConfig(per_device_train_batch_size = 2)\n    t = SFTTrainer(model, args)\n"
        "    t.train()\n    model.save_pretrained('x')\n    return t",
        "t = run(model)\nprint(t)",
    )
    text = body(done)
    assert "    args = ddp_configured(SFTConfig(per_device_train_batch_size = 2), 1)\n" in text
    assert "    if IS_MAIN:\n        model.save_pretrained('x')\n" in text
    assert "\nt = run(model)\nwait_for_everyone()\nprint(t)" in text


def test_the_report_says_what_one_row_at_a_time_costs() -> None:
    said = [e.message for e in convert_cells(LOAD, TRAIN).report.edits if e.kind == "batch"]
    assert said == [
        "was gradient_accumulation_steps = 4, # note",
        "share the global batch 2 * 4 among the processes, one row at a time "
        "(--per-device-batch-size keep: 2, the same and faster)",
    ]
    kept = [e.message for e in convert_cells(LOAD, TRAIN, per_device_batch_size=None).report.edits if e.kind == "batch"]
    assert kept == ["share the global batch 2 * 4 among the processes"]
