"""Loading and devices."""

import pytest
from making import LOAD, TRAIN, body, convert_cells, kinds


@pytest.mark.parametrize("loader", ["FastLanguageModel", "FastModel", "FastVisionModel", "FastSentenceTransformer"])
@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("'m'", "'m', device_map={\"\": LOCAL_RANK}"),
        ("'m', 2048, None, True", "'m', 2048, None, True, device_map={\"\": LOCAL_RANK}"),
        ("model_name = 'm'", "device_map = {\"\": LOCAL_RANK}, model_name = 'm'"),
    ],
)
def test_every_loader_is_bound(loader: str, given: str, made: str) -> None:
    done = convert_cells(f"from unsloth import {loader}\nmodel, tok = {loader}.from_pretrained({given})")
    assert f"{loader}.from_pretrained({made})" in body(done)


def test_an_aliased_module_path_is_bound() -> None:
    assert "device_map" in body(convert_cells("import unsloth\nm, t = unsloth.FastModel.from_pretrained('m')"))


def test_several_lines_keep_their_style() -> None:
    done = convert_cells(
        "m, t = FastModel.from_pretrained(\n    model_name = 'm', # the model\n    # a note\n    dtype = None,\n)"
    )
    assert body(done).splitlines()[1:7] == [
        "m, t = FastModel.from_pretrained(",
        '    device_map = {"": LOCAL_RANK},',
        "    model_name = 'm', # the model",
        "    # a note",
        "    dtype = None,",
        ")",
    ]


@pytest.mark.parametrize(
    ("name", "more", "spreads"),
    [
        ("m", "device_map = 'balanced'", True),
        ("m", "device_map = 'sequential'", True),
        ("m", "device_map = 'auto'", False),  # it fits on one GPU
        ("m", "device_map = 'auto', max_memory = sizes", True),
        ("org/Large-70B", "device_map = 'auto'", True),
        ("org/Large-70B", "device_map = 'auto', quantization_config = four_bits", False),
        ("org/Large-8x22B", "device_map = 'auto', load_in_4bit = True", True),
    ],
)
def test_a_map_that_spreads_the_model_is_replaced_with_a_warning(name: str, more: str, spreads: bool) -> None:
    done = convert_cells(f"name = '{name}'\nm, t = FastModel.from_pretrained(name, {more})")
    assert 'device_map = {"": LOCAL_RANK}' in body(done) and "'auto'" not in body(done)
    assert ("model parallel" in kinds(done)) == spreads


def test_a_model_that_only_the_main_process_loads_needs_no_warning() -> None:
    tried = "last = AutoModel.from_pretrained('x-70b', device_map='auto')\nlast.generate(1)"
    assert kinds(convert_cells(LOAD, TRAIN, f"from transformers import AutoModel\n{tried}")) == []


def test_other_loaders_are_left_alone_unless_they_name_a_device() -> None:
    assert "device_map" not in body(convert_cells(LOAD, "t = AutoTokenizer.from_pretrained('m')")).split("# %%")[2]
    assert 'device_map={"": LOCAL_RANK}' in body(
        convert_cells(LOAD, "a = AutoModel.from_pretrained('m', device_map='auto')")
    )


def test_offloaded_embeddings_only_on_one_process() -> None:
    done = convert_cells("m, t = FastModel.from_pretrained('m', offload_embedding = True)")
    assert "offload_embedding = WORLD_SIZE == 1" in body(done)
    assert any("offload_embedding" in e.message for e in done.report.edits)


def test_arguments_from_a_dict() -> None:
    done = convert_cells("kw = {'model_name': 'm', 'device_map': 'auto'}\nm, t = FastModel.from_pretrained(**kw)")
    assert 'from_pretrained(**{**kw, "device_map": {"": LOCAL_RANK}})' in body(done)


@pytest.mark.parametrize(
    ("given", "made", "warns"),
    [
        ("dict(device_map={'': 0}, dtype=d)", 'dict(device_map={"": LOCAL_RANK}, dtype=d)', []),
        ("{'device_map': 0, 'dtype': d}", "{'device_map': {\"\": LOCAL_RANK}, 'dtype': d}", []),
        ("dict(device_map='balanced')", 'dict(device_map={"": LOCAL_RANK})', ["model parallel"]),
        ("dict(device_map='cpu')", "dict(device_map='cpu')", []),
        ("{'device_map': None}", "{'device_map': None}", []),
        # A variable of that name as key may hold anything.
        ("{device_map: 0}", "{device_map: 0}", []),
    ],
)
def test_arguments_with_which_a_trainer_loads_the_model_itself(given: str, made: str, warns: list[str]) -> None:
    """With the notebook's own, every process would load its model to GPU 0, or over all of them."""
    train = (
        f"from trl import SFTConfig, SFTTrainer\nloading = {given}\n"
        "trainer = SFTTrainer(model='m', train_dataset=dataset, args=SFTConfig(model_init_kwargs=loading))\n"
        "trainer.train()"
    )
    done = convert_cells("from datasets import load_dataset\ndataset = load_dataset('d')", train)
    assert f"\nloading = {made}\n" in body(done)
    assert kinds(done) == warns


def test_fixed_gpu_numbers_become_this_process_s() -> None:
    done = convert_cells(
        LOAD + "\nimport torch\nx = x.to('cuda:0')\ny = y.cuda(0)\ntorch.cuda.set_device(0)\nz = z.cuda()\n"
        "d = torch.device('cuda', 1)\ns = 'see cuda:0'"
    )
    text = body(done)
    for expected in (
        'x.to(f"cuda:{LOCAL_RANK}")',
        "y.cuda(LOCAL_RANK)",
        "set_device(LOCAL_RANK)",
        "z.cuda()",
        "torch.device('cuda', LOCAL_RANK)",
        "'see cuda:0'",
    ):
        assert expected in text


def test_dead_code_stays_dead() -> None:
    done = convert_cells(LOAD, "if False:\n    model.save_pretrained('x')\nif False: model.push_to_hub('y')")
    assert "if False:\n    model.save_pretrained('x')\nif False: model.push_to_hub('y')" in body(done)
    assert "save" not in [e.kind for e in done.report.edits]


@pytest.mark.parametrize(
    "cell",
    [
        "from unsloth.dataprep import SyntheticDataKit\nkit = SyntheticDataKit.from_pretrained('m')",
        "from unsloth.chat import Tokens\nkit = Tokens.from_pretrained('m')",
    ],
)
def test_loaders_that_load_no_model_get_no_device_map(cell: str) -> None:
    assert "device_map" not in body(convert_cells(cell, "from unsloth import FastModel"))


def test_a_loader_of_another_name_is_known_by_what_it_imports() -> None:
    done = convert_cells("from unsloth import FastVisionModel as Vision\nm, t = Vision.from_pretrained('m')")
    assert "Vision.from_pretrained('m', device_map={\"\": LOCAL_RANK})" in body(done)


@pytest.mark.parametrize("given", ["'cpu'", '"cpu"', '{"": "cpu"}', "{'': 'cpu'}", "torch.device('cpu')"])
def test_a_model_kept_on_the_cpu_stays_there(given: str) -> None:
    line = f"model = AutoModel.from_pretrained('m', device_map={given})"
    assert line in body(convert_cells("import torch\nfrom transformers import AutoModel", line))


def test_the_number_of_gpus_is_what_a_process_has() -> None:
    """With the launcher's number of GPUs, code for several would wrap the model that DDP is to wrap."""
    cell = "import torch\nif torch.cuda.device_count() > 1:\n    model = torch.nn.DataParallel(model)"
    done = convert_cells(LOAD, "dataset = [1]", cell, TRAIN)
    assert "if min(1, torch.cuda.device_count()) > 1:" in body(done) and "sizing" not in kinds(done)
    named = "from torch.cuda import device_count\nsteps = 8 // max(1, device_count())\ndataset = rows[:steps]"
    assert "max(1, min(1, device_count()))" in body(convert_cells(LOAD, named, TRAIN))


def test_a_number_of_gpus_in_a_message_stays() -> None:
    line = "print(f'{torch.cuda.device_count()} GPUs')"
    assert line in body(convert_cells(LOAD, "import torch\ndataset = [1]", line, TRAIN))


def test_a_server_behind_a_from_pretrained_starts_once_a_node() -> None:
    kit = "from unsloth.dataprep import SyntheticDataKit\nkit = SyntheticDataKit.from_pretrained('m')"
    rows = (
        "from datasets import load_dataset\nfiles = kit.chunk_data('a.txt')\n"
        "dataset = load_dataset('text', data_files=files)"
    )
    text = body(convert_cells(kit, rows, LOAD, TRAIN))
    assert "if LOCAL_RANK == 0:\n    kit = SyntheticDataKit" in text
    assert "files = from_main(lambda: files)" in text or "files = from_main(lambda: kit.chunk_data" in text


def test_a_loader_under_another_name_is_one() -> None:
    cell = "from unsloth import FastLanguageModel\nloader = FastLanguageModel\nm, t = loader.from_pretrained('m')"
    assert "loader.from_pretrained('m', device_map={\"\": LOCAL_RANK})" in body(convert_cells(cell, TRAIN))
