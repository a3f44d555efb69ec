"""Runs on images take the steps of a plain PyTorch loop, whatever the layout, ranks without an image, and a kill."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import write_jsonl
from tests.jobs import manifest_steps, train_and_signal_the_job
from tests.plain_loop import TOLERANCE, PlainLoop, history, run_once, units_of
from tests.tiny_vision import KINDS, image_rows, save_vision
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.chat.tokenize import Encoder
from unsloth_ddp.data.images.processing import load_processing
from unsloth_ddp.data.order.collate import PadRight
from unsloth_ddp.data.sources.checked_rows import checked_rows

RATE, FULL_RATE = 0.5, 0.2
# 13 rows: the second step of an epoch holds 5, and one rank of two has micro-batches without an image.
NUMBERS = (1, 0, 3, 2, 1, 0, 1, 3, 0, 0, 1, 0, 0)
# Tokens of a pack, with which the rows make six, and the rate of runs with packs, where larger steps make more of the
# rounding of fp32.
CAPACITY, PACKED_RATE = {"gemma4": 250}, {"gemma4": 0.1}
PACKED = "--packing on --max_length"


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    return write_jsonl(folder / "rows.jsonl", image_rows(folder, NUMBERS))


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Return the folder of the tiny model of a kind."""
    folders: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            save_vision(kind, folders[kind])
        return folders[kind]

    return folder


@pytest.fixture(scope="module")
def job(tmp_path_factory, model_of, rows):
    """Run three steps once for each kind, layout and options; returns the run's folder."""
    cwd = tmp_path_factory.mktemp("images")

    def run(kind: str, processes: int, per_device: int, extra: str = "", name: str = "", environ=None, **more) -> Path:
        name = name or f"{kind}{processes}x{per_device}{extra.replace(' ', '')}".replace("/", "_")
        rate = FULL_RATE if "--method full" in extra else PACKED_RATE.get(kind, RATE) if PACKED in extra else RATE
        options = f"--model {model_of(kind)} --dataset {rows} --learning_rate {rate} --max_length 512 {extra}"
        return run_once(cwd, name, processes, per_device, options, environ, **more)

    return run


def whole_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a model by their names in its class, which those of its files may differ from."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


class ImageLoop(PlainLoop):
    absolute = 0.0

    def __init__(self, folder: Path, rows: Path, targets: list[str] | None, capacity: int | None, rate: float) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.processor = AutoProcessor.from_pretrained(folder)
        self.read_rows = [
            self.read(json.loads(line)["messages"], rows.parent) for line in rows.read_text().splitlines()
        ]
        base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        super().__init__(
            base,
            units_of([len(labels) for _, labels in self.read_rows], capacity),
            rate,
            targets,
        )

    def read(self, messages: list[dict], folder: Path) -> tuple[dict, torch.Tensor]:
        """Return the inputs and the labels of a row: from behind the assistant's token up to the end of the turn."""
        from PIL import Image

        images = []
        for message in messages:
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
            for part in message["content"]:
                if part["type"] == "image":
                    images.append(Image.open(folder / (part.get("image") or part["path"])).convert("RGB"))
        chat = [
            {
                "role": m["role"],
                "content": [{k: v for k, v in p.items() if k in ("type", "text")} for p in m["content"]],
            }
            for m in messages
        ]
        text = self.processor.apply_chat_template(chat, tokenize=False)
        inputs = self.processor(text=[text], images=images or None, add_special_tokens=False, return_tensors="pt")
        inputs = {n: v.double() if v.is_floating_point() else v for n, v in inputs.items()}
        begin, end = self.processor.tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
        ids, labels, speaks = inputs["input_ids"][0].tolist(), [], False
        for token in ids:
            labels.append(token if speaks else -100)
            speaks = token != end and (speaks or token == begin)
        return inputs, torch.tensor(labels)

    def loss(self, row: int) -> tuple[torch.Tensor, int]:
        inputs, labels = self.read_rows[row]
        logits = self.model(**inputs).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
        return loss, int((labels[1:] != -100).sum())

    def measure(self, rows) -> dict[str, torch.Tensor]:
        sums, counts = zip(*(self.loss(row) for row in rows), strict=True)
        return {"loss": sum(sums) / sum(counts)}

    def weights(self, folder: Path) -> dict[str, torch.Tensor]:
        return super().weights(folder) if (folder / "adapter_config.json").exists() else whole_weights(folder)


@pytest.fixture(scope="module")
def loops(model_of, rows):
    cached_loops: dict[tuple, ImageLoop] = {}
    torch.set_num_threads(1)

    def loop(kind: str, run: Path, capacity: int | None = None) -> ImageLoop:
        """Return the loop that trains the modules of a run; they are in the text decoder, or are all."""
        adapter = run / "adapter_config.json"
        targets = json.loads(adapter.read_text())["target_modules"] if adapter.exists() else None
        key = (kind, tuple(sorted(targets or ())), capacity)
        if key not in cached_loops:
            rate = PACKED_RATE.get(kind, RATE) if capacity else RATE
            cached_loops[key] = ImageLoop(model_of(kind), rows, targets, capacity, rate if targets else FULL_RATE)
            # The rounding of fp32 in these packs depends on the CPU: 6.1e-6 on one, at other rates 3.1e-6 to 6.4e-6.
            cached_loops[key].tolerance = 1e-5 if capacity and kind in PACKED_RATE else TOLERANCE
        return cached_loops[key]

    return loop


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_loss_of_a_plain_loop_alone_and_beside_all_others(kind, model_of, rows, monkeypatch):
    # Its processor needs that package for videos only.
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder, plain = model_of(kind), ImageLoop.__new__(ImageLoop)
    plain.processor = AutoProcessor.from_pretrained(folder)
    plain.model = AutoModelForImageTextToText.from_pretrained(folder).double().eval()
    processing = load_processing(Settings(model=str(folder)))
    encoder = Encoder(plain.processor.tokenizer, supervise_all=False, processing=processing)
    plain.read_rows, units = [], []
    for _, example in checked_rows(str(rows), "train", task="sft"):
        row = encoder.encode(example)
        units.append({**vars(row), "input_ids": np.array(row.input_ids), "labels": np.array(row.labels)})
    for line in rows.read_text().splitlines():
        plain.read_rows.append(plain.read(json.loads(line)["messages"], rows.parent))
    collate = PadRight(0, processing)

    def losses(batch):
        labels = batch.pop("labels")
        logits = plain.model(**{n: v.double() if v.is_floating_point() else v for n, v in batch.items()}).logits
        each = torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:], ignore_index=-100, reduction="none")
        return each.sum(dim=1)

    units = [{name: unit[name] for name in ("input_ids", "labels", "images", "rendered")} for unit in units]
    with torch.no_grad():
        expected = torch.stack([plain.loss(row)[0] for row in range(len(units))])
        alone = torch.cat([losses(collate([unit])) for unit in units])
        torch.testing.assert_close(alone, expected, rtol=1e-9, atol=0)
        torch.testing.assert_close(losses(collate(units)), expected, rtol=1e-9, atol=0)
        # A row for the towers beside rows of text changes none of them.
        processing.always = True
        texts = [number for number, unit in enumerate(units) if not unit["images"]]
        beside = losses(collate([units[number] for number in texts]))
        torch.testing.assert_close(beside, torch.cat([expected[texts], torch.zeros(1)]), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("kind", "processes", "per_device"),
    [
        ("qwen3_vl", 2, 1), pytest.param("qwen3_vl", 1, 8, marks=pytest.mark.slow),
        pytest.param("gemma3", 2, 2, marks=pytest.mark.slow),
        pytest.param("qwen3_vl", 4, 2, marks=pytest.mark.slow), pytest.param("gemma3", 4, 1, marks=pytest.mark.slow),
        *(
            pytest.param(kind, *layout, marks=pytest.mark.slow)
            for kind in ("qwen3_5", "gemma4", "mistral3", "internvl") for layout in ((1, 8), (2, 2))
        ),
    ],
)  # fmt: skip
def test_a_run_on_images_takes_the_step_of_a_plain_loop(kind, processes, per_device, job, loops, rows):
    folder = job(kind, processes, per_device, f"--eval_dataset {rows}")
    loops(kind, folder).assert_equal(folder)


@pytest.mark.parametrize(
    ("kind", "processes", "per_device", "extra"),
    [
        ("qwen3_vl", 2, 1, ""), pytest.param("qwen3_vl", 2, 2, "--method full --train_towers", marks=pytest.mark.slow),
        *(pytest.param("qwen3_vl", *layout, "", marks=pytest.mark.slow) for layout in ((1, 4), (4, 1))),
        *(
            pytest.param(kind, *layout, "", marks=pytest.mark.slow)
            for kind in ("gemma3", "gemma4", "mistral3", "internvl") for layout in ((1, 4), (2, 1))
        ),
    ],
)  # fmt: skip
def test_packs_with_images_take_the_step_of_a_plain_loop(kind, processes, per_device, extra, job, loops, rows):
    capacity = CAPACITY.get(kind, 90)
    folder = job(kind, processes, per_device, f"--eval_dataset {rows} {extra} {PACKED} {capacity}")
    loops(kind, folder, capacity).assert_equal(folder)


def test_rows_of_a_model_that_mixes_them_are_padded_or_refused(job):
    with pytest.raises(
        AssertionError, match="packing on would mix rows, because the model's Qwen3_5GatedDeltaNet layers carry"
    ):
        job("qwen3_5", 1, 1, f"{PACKED} 90")


def updates(folder: Path, other: Path) -> float:
    """Return the largest difference between the weights of two runs."""
    name = next(path.name for path in folder.glob("*model.safetensors"))
    weights, expected = load_file(folder / name), load_file(other / name)
    assert weights.keys() == expected.keys()
    return max((weights[key] - expected[key]).abs().max().item() for key in weights)


@pytest.mark.parametrize(
    "kind", ["qwen3_vl", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gemma3", "mistral3"))]
)
def test_trained_towers_take_the_step_of_a_plain_loop_with_ranks_without_an_image(kind, job, loops):
    folder = job(kind, 2, 1, "--method full --train_towers")
    loops(kind, folder).assert_equal(folder)


def test_weights_beside_the_text_are_frozen_unless_they_are_asked_for(job, model_of):
    initial = load_file(model_of("qwen3_vl") / "model.safetensors")
    after = load_file(job("qwen3_vl", 1, 8, "--method full") / "model.safetensors")
    moved = {name for name in initial if not torch.equal(initial[name], after[name])}
    assert moved and not any("visual" in name for name in moved)


@pytest.mark.slow
def test_one_part_beside_the_text_is_trained_alone(job, loops, model_of):
    folder = job("qwen3_vl", 2, 1, "--train_towers projector")
    weights = load_file(folder / "adapter_model.safetensors")
    parts = {key.split(".visual.")[1].split(".")[0] for key in weights if ".visual." in key}
    assert parts == {"merger", "deepstack_merger_list"}
    loops("qwen3_vl", folder).assert_equal(folder)


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", "--method full --train_towers", "--method full --train_towers projector"])
def test_fsdp2_takes_the_step_of_one_process_with_ranks_without_an_image(extra, job):
    sharded = job("qwen3_vl", 2, 1, extra, f"fsdp2{len(extra)}", {"UNSLOTH_FSDP2": "1"})
    assert updates(sharded, job("qwen3_vl", 1, 8, extra)) < 1e-6


@pytest.mark.parametrize(
    ("kind", "packed"), [pytest.param("gemma3", "", marks=pytest.mark.slow), ("qwen3_vl", f"{PACKED} 90")]
)
def test_a_killed_run_ends_like_a_whole_one(kind, packed, job):
    options = f"--lora_dropout 0.1 --save_strategy steps --save_steps 1 {packed}"
    whole = job(kind, 2, 2, options, f"whole{bool(packed)}")
    resumed = job(kind, 2, 2, f"{options} --resume {whole}/checkpoint-2", f"resumed{bool(packed)}")
    assert updates(whole, resumed) == 0
    assert history(whole)[-1]["loss"] == history(resumed)[-1]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("packed", ["", f"{PACKED} 90"])
def test_streamed_rows_have_their_images(packed, job, rows):
    streamed = f"--streaming --shuffle_buffer 0 {packed}"
    whole = job("qwen3_vl", 1, 4 if packed else 8, streamed)
    assert updates(job("qwen3_vl", 2, 2, streamed), whole) < 1e-6
    losses = [line["loss"] for line in history(whole)]
    # Another order than that of prepared rows.
    prepared = job("qwen3_vl", *((2, 1) if packed else (1, 8)), f"--eval_dataset {rows} {packed}")
    assert losses != pytest.approx([line["loss"] for line in history(prepared)], rel=1e-5)


@pytest.mark.slow
def test_packs_whose_images_worker_processes_read_are_the_same(job):
    packed = f"{PACKED} 90"
    workers = job("qwen3_vl", 1, 4, f'--trainer_args {{"dataloader_num_workers":2}} {packed}', "workers")
    assert updates(workers, job("qwen3_vl", 1, 4, packed)) == 0


@pytest.mark.slow
def test_a_signal_to_all_processes_of_a_job_leaves_the_workers_that_read_images(job):
    options = "--lora_dropout 0.1 --save_strategy steps --save_steps 9"
    workers = f'{options} --trainer_args {{"dataloader_num_workers":2}}'
    stopped = job("qwen3_vl", 2, 1, workers, "signalled", target=train_and_signal_the_job, code=75)
    # The ranks may agree on it a step later.
    assert manifest_steps(stopped) in ([1], [2])
    assert updates(job("qwen3_vl", 2, 1, workers, "signalled"), job("qwen3_vl", 2, 1, options, "unsignalled")) == 0
