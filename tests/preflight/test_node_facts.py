"""What is read from this machine, and what a run will write to it."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time

import pytest
from safetensors.torch import load_file

from tests.conftest import DEMO_MODEL, REPO
from tests.preflight.rows import documented, undocumented
from tests.ranks import free_port
from tests.waiting import is_running, wait_until
from unsloth_ddp.config.options import Settings
from unsloth_ddp.preflight import (
    background,
    collectives,
    disk_space,
    doctor,
    folders,
    identity,
    machine_facts,
    network_facts,
    node_checks,
    output,
    rendezvous,
    shared_folder,
    training_arguments,
)
from unsloth_ddp.preflight.__main__ import parse
from unsloth_ddp.preflight.checks import Check
from unsloth_ddp.preflight.process_info import read_process_info
from unsloth_ddp.preflight.time_limit import run_or_none, run_with_limit
from unsloth_ddp.utils.errors import UserError

CONFIG = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def stuck():
    """Something that hangs until the test is over."""
    over = threading.Event()
    yield lambda: over.wait(60)
    over.set()


def test_an_adapter_is_counted_as_peft_makes_it(tiny_model):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    made = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    trainable = sum(p.numel() for p in made.parameters() if p.requires_grad)
    assert disk_space.count_adapter_parameters(json.loads((tiny_model / "config.json").read_text()), 8) == trainable


def test_weights_are_counted_as_they_lie_on_disk():
    config, weights = folders.read_model_size(Settings(model=str(DEMO_MODEL)))
    parameters = sum(t.numel() * t.element_size() for t in load_file(DEMO_MODEL / "model.safetensors").values())
    assert config is not None and config["hidden_size"] > 0
    assert parameters <= weights < parameters * 1.01


def test_a_run_of_full_parameters_writes_far_more_than_an_adapter():
    weights = 16 * 2**30
    lora = disk_space.estimate_run_bytes(Settings(method="lora"), CONFIG, weights)
    full = disk_space.estimate_run_bytes(Settings(method="full"), CONFIG, weights)
    # 8.6e9 parameters in fp32: three checkpoints (two kept, one being written) of weights and two states, and the end.
    assert full == pytest.approx((3 * 3 + 1) * 4 * weights / 2, rel=0.01)
    assert 1e9 < lora < full / 50
    merged = disk_space.estimate_run_bytes(Settings(method="lora", merge=True), CONFIG, weights)
    assert merged - lora == pytest.approx(weights)
    assert disk_space.estimate_run_bytes(Settings(method="full"), None, 0) == disk_space.UNKNOWN_MODEL["full"]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (Settings(save_total_limit=2), 3),
        (Settings(save_strategy="no"), 0),
        (Settings(save_total_limit=None, max_steps=100, save_steps=10), 10),
        (Settings(save_total_limit=None), disk_space.CHECKPOINTS_IF_UNLIMITED),
    ],
)
def test_how_many_checkpoints_are_on_disk_at_once(settings, kept):
    assert disk_space.count_checkpoints(settings) == kept


def test_a_folder_that_was_made_to_be_tried_is_removed_unless_it_is_used(tmp_path):
    probed = folders.NodeFolders()
    assert probed.probe(tmp_path / "new" / "inner").free > 0
    assert probed.probe(tmp_path / "used").free > 0
    (tmp_path / "used" / "file").write_text("x")
    probed.remove()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["used"]


def test_a_folder_that_cannot_be_written_says_why(tmp_path):
    (tmp_path / "file").write_text("x")
    assert "directory" in folders.NodeFolders().probe(tmp_path / "file" / "inner").error.lower()


def test_a_port_in_use_names_its_holder():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert f"(pid {os.getpid()})" in str(network_facts.find_port_holder(port))
    assert network_facts.find_port_holder(port) is None


def test_interfaces_have_addresses_and_loopback_leads_to_loopback():
    found = network_facts.read_interfaces()
    loopback = network_facts.find_route_interface(["127.0.0.1"], found)
    assert any(i.name == loopback and "127.0.0.1" in i.addresses for i in found)
    assert network_facts.resolve_name("no-such-host.invalid") == []
    assert network_facts.resolve_name("127.0.0.1") == ["127.0.0.1"]


def test_infiniband_is_read_as_the_kernel_words_it(tmp_path):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "state").write_text("4: ACTIVE\n")
    (found,) = network_facts.read_infiniband_ports(tmp_path)
    assert found == {"name": "mlx5_0:1", "rate": "400 Gb/sec (4X NDR)", "state": "4: ACTIVE", "link_layer": "unknown"}


def test_the_clock_is_asked_of_the_kernel():
    # The same bound by another call: struct ntptimeval has two longs, then the largest error in microseconds.
    told = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).ntp_gettime(told)
    assert machine_facts.read_clock_error() == pytest.approx(ctypes.c_long.from_buffer(told, 16).value / 1e6, abs=1)


def test_a_check_that_raises_or_hangs_is_a_warning(stuck):
    def broken() -> Check:
        raise PermissionError("not for you")

    raised = node_checks.run_check("disk", 1, broken)
    assert (raised.verdict, raised.values[1]) == ("warning", "not checked: PermissionError: not for you")
    began = time.monotonic()
    hung = node_checks.run_check("disk", 1, stuck, seconds=0.2)
    assert (hung.verdict, time.monotonic() - began < 10) == ("warning", True)


def test_bounded_returns_raises_and_ends(stuck):
    assert run_with_limit(lambda: 3, 5) == 3
    with pytest.raises(KeyError):
        run_with_limit(lambda: {}[1], 5)
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        run_with_limit(stuck, 0.1)


def test_a_disk_that_hangs_is_not_waited_for(stuck, monkeypatch):
    assert run_or_none(lambda: 3, 5) == 3 and run_or_none(stuck, 0.1) is None
    monkeypatch.setattr(identity, "hash_data_files", lambda settings: stuck())
    found = identity.collect_identity(Settings(model=str(DEMO_MODEL)), {}, seconds=0)
    assert found["unknown"]["data"] == "TimeoutError: no answer within 1 s"
    assert found["settings"]["model"] == str(DEMO_MODEL)


def test_files_are_known_by_content_and_large_ones_by_samples(tmp_path, monkeypatch):
    path = tmp_path / "rows"
    path.write_bytes(bytes(5000))
    assert identity.hash_file(path) == {"bytes": 5000, "digest": hashlib.sha256(bytes(5000)).hexdigest()}
    monkeypatch.setattr(identity, "READ_WHOLE", 1000)
    monkeypatch.setattr(identity, "MIB", 100)
    monkeypatch.setattr(identity, "SAMPLES", 10)
    before = identity.hash_file(path)
    assert before["sampled"]
    path.write_bytes(bytes(4999) + b"x")
    assert identity.hash_file(path) != before


def test_a_folder_to_be_streamed_is_known_by_names_and_sizes_and_needs_no_cache(tmp_path):
    (tmp_path / "shards" / "a").mkdir(parents=True)
    for name in ("a/1.jsonl", "2.jsonl"):
        (tmp_path / "shards" / name).write_bytes(bytes(100))
    streamed = Settings(dataset=[str(tmp_path / "shards")], streaming=True, max_steps=1)
    before = identity.hash_data_files(streamed)["dataset shards"]
    assert before["bytes"] == 200 and before["sampled"]
    (tmp_path / "shards" / "2.jsonl").rename(tmp_path / "shards" / "3.jsonl")
    assert identity.hash_data_files(streamed)["dataset shards"]["digest"] != before["digest"]
    assert "missing" in identity.hash_data_files(Settings(dataset=streamed.dataset))["dataset shards"]
    file = str(tmp_path / "shards" / "3.jsonl")
    assert folders.read_data_sizes(Settings(dataset=[file], eval_dataset=[file])) == [100, 100]
    assert folders.read_data_sizes(Settings(dataset=[file], eval_dataset=[file], streaming=True)) == [100]


def test_hub_sources_are_known_by_the_caches_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert identity.read_hub_commit("a/b", "model") == {"hub": None}
    (tmp_path / "models--a--b" / "refs").mkdir(parents=True)
    (tmp_path / "models--a--b" / "refs" / "main").write_text("c0ffee\n")
    (tmp_path / "models--a--b" / "snapshots" / "beef").mkdir(parents=True)
    assert identity.read_hub_commit("a/b", "model") == {"hub": "c0ffee"}
    assert identity.read_hub_commit("a/b", "model", "beef") == {"hub": "beef"}


def test_secrets_do_not_leave_the_node(monkeypatch):
    settings = Settings(model=str(DEMO_MODEL), trainer_args={"hub_token": "hf_abc", "adam_beta1": 0.8})
    found = identity.collect_identity(settings, {"UNSLOTH_API_KEY": "sk-123", "NCCL_DEBUG": "INFO", "HOME": "/root"})
    assert "hf_abc" not in json.dumps(found) and "sk-123" not in json.dumps(found)
    assert found["flags"] == {"NCCL_DEBUG": "INFO"}
    assert found["settings"]["trainer_args"]["adam_beta1"] == 0.8


def test_a_part_of_the_identity_that_fails_leaves_the_rest(monkeypatch):
    def broken(settings: Settings) -> dict:
        raise OSError("stale file handle")

    monkeypatch.setattr(identity, "hash_data_files", broken)
    found = identity.collect_identity(Settings(model=str(DEMO_MODEL)), {})
    assert found["unknown"] == {"data": "OSError: stale file handle"}
    assert found["versions"]["torch"] and "config.json" in found["model"]


def test_the_kits_files_decide_and_the_commit_is_shown(tmp_path):
    kit = tmp_path / "kit" / "unsloth_ddp"
    kit.mkdir(parents=True)
    (kit / "a.py").write_text("1")
    before = identity.hash_kit(kit)
    assert before["commit"] == "no git"
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm x"):
        subprocess.run(["git", *command.split()], cwd=kit.parent, check=True)
    assert identity.hash_kit(kit)["hash"] == before["hash"]
    assert len(identity.hash_kit(kit)["commit"]) == 10
    (kit / "a.py").write_text("2")
    after = identity.hash_kit(kit)
    assert after["commit"].endswith("+dirty") and after["hash"] != before["hash"]


def test_places_with_and_without_a_launcher():
    alone = read_process_info({"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "m"})
    assert (alone.ranks.rank, alone.ranks.world_size, alone.ranks.local_rank, alone.port) == (2, 3, 0, 6001)
    assert not alone.launched and alone.ranks.is_local_main
    environ = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "7"}
    worker = read_process_info(environ)
    assert (worker.nodes, worker.node_rank, worker.launched, worker.ranks.is_local_main, worker.port) == (
        2,
        1,
        True,
        False,
        7,
    )


@pytest.mark.parametrize(("environ", "listens"), [({}, True), ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, False)])
def test_below_a_launcher_its_own_store_is_used(environ, listens, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    worker = read_process_info({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"})
    assert rendezvous.hosts_store(worker, master_is_here=True) is listens
    node_0 = read_process_info({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "m"})
    assert rendezvous.hosts_store(node_0, master_is_here=True)
    assert not rendezvous.hosts_store(node_0, master_is_here=False)


def test_what_keeps_a_port_from_answering_is_told():
    assert rendezvous.wait_for_port("127.0.0.1", free_port(), 0.3) == "refused"
    assert "does not resolve" in rendezvous.wait_for_port("no-such-host.invalid", 1, 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert rendezvous.wait_for_port("127.0.0.1", server.getsockname()[1], 5) == ""


def test_a_value_is_json_and_signed_where_the_job_has_a_secret():
    value = {"host": "a", "values": [1, None]}
    assert rendezvous.decode("who/1", rendezvous.encode("who/1", value, ""), "") == value
    signed = rendezvous.encode("who/1", value, "secret")
    assert rendezvous.decode("who/1", signed, "secret") == value and b"secret" not in signed
    for key, content, secret in (
        ("who/1", rendezvous.encode("who/1", value, "guessed"), "secret"),
        ("who/1", rendezvous.encode("who/1", value, ""), "secret"),
        # A value of another key, and one that was changed on the way.
        ("who/2", signed, "secret"),
        ("who/1", signed.replace(b"null", b"true"), "secret"),
        ("who/1", b"", "secret"),
    ):
        with pytest.raises(rendezvous.RendezvousError, match="not signed with this job's UNSLOTH_DDP_SECRET"):
            rendezvous.decode(key, content, secret)
    for content in (b"\x80\x04]", b"{", b"[" * 100_000, b"\xff"):
        with pytest.raises(rendezvous.RendezvousError, match="is no JSON"):
            rendezvous.decode("who/1", content, "")


@pytest.mark.parametrize("roll", [None, [], {}, {"present": [{"rank": 0}]}, {"present": 3}, "roll"])
def test_a_roll_that_preflight_did_not_send_is_refused(roll):
    with pytest.raises(rendezvous.RendezvousError, match="another program writes to this store"):
        rendezvous._judge_roll(roll, read_process_info({}))


def test_strangers_on_the_store_are_told_by_the_secret(monkeypatch):
    """One that connects to node 0's store and hands in a value for the node that is to come."""
    from torch.distributed import PrefixStore, TCPStore

    port = free_port()
    environ = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    monkeypatch.setenv("UNSLOTH_DDP_SECRET", "only the nodes know this")
    node_0 = rendezvous.Rendezvous(read_process_info({**environ, "NODE_RANK": "0"}), True, 10)
    node_1 = rendezvous.Rendezvous(read_process_info({**environ, "NODE_RANK": "1"}), False, 10)
    node_1.put("node/1", {"host": "b"})
    assert node_0.get("node/1", 10) == {"host": "b"}
    stranger = PrefixStore("preflight/0/meeting", TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    stranger.set("node/1", '{"host": "mine"}')
    with pytest.raises(rendezvous.RendezvousError, match="node/1 is not signed"):
        node_0.get("node/1", 10)


MEET = """
import os, sys
os.environ.pop("TORCH_CPP_LOG_LEVEL", None)
from unsloth_ddp.preflight import __main__, rendezvous
from unsloth_ddp.preflight.process_info import read_process_info
from unsloth_ddp.preflight.time_limit import run_or_none, run_with_limit

def run(options, settings):
    import torch.distributed
    (row,) = rendezvous.join_rendezvous(read_process_info(), False, options.timeout)[1]
    print(row.remedy)
    return 1

__main__.run_preflight = run
sys.argv = ["preflight", "--timeout", "2"]
__main__.main()
"""


@pytest.mark.parametrize("answers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_another_program_at_the_master_port_is_told_in_time_and_without_a_stack(answers):
    """One that hangs up, and one that says nothing."""
    kept = []

    def accept(server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = server.accept()[0]
                client.close() if answers else kept.append(client)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, args=(server,), daemon=True).start()
        port = server.getsockname()[1]
        environ = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-c", MEET]
        done = subprocess.run(command, cwd=REPO, env=os.environ | environ, capture_output=True, text=True, timeout=60)
        server.shutdown(socket.SHUT_RDWR)
    assert done.stderr == ""
    told = re.fullmatch(
        rf"Node 0 did not answer at 127.0.0.1:{port} within (\d+) s: another program listens there: .*\n", done.stdout
    )
    assert told and 1 <= int(told[1]) <= 8, done.stdout


def test_the_token_is_found_in_a_shared_folder_only(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_folder, "TOKEN_SECONDS", 0.1)
    (tmp_path / "other").mkdir()
    left = shared_folder.write_token(tmp_path)
    assert left is not None
    assert shared_folder.find_token(tmp_path, left[0].name, left[1]) is True
    assert shared_folder.find_token(tmp_path / "other", left[0].name, left[1]) is False
    assert shared_folder.find_token(tmp_path, left[0].name, "another run's") is False
    assert shared_folder.write_token(tmp_path / "no" / "such") is None


def test_the_table_shows_nodes_that_saw_the_same_in_one_line():
    assert output.merge_values({0: "a", 1: "a"}) == "a"
    assert output.merge_values({0: "a", 1: "b", 2: "a"}) == "nodes 0, 2: a\nnode 1: b"
    text = output.render_checks([Check("disk", {0: "full [1]"}, "failure", "Free some.")], "Preflight", width=100)
    assert all(part in text for part in ("Preflight", "disk", "full [1]", "failure", "Free some."))
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--timeout", "soon"], "--timeout is soon"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--jsn"], "there is no option jsn"),
        (["--learning_rate", "fast"], "learning_rate is 'fast'"),
    ],
)
def test_mistakes_in_the_options_are_refused(argv, sentence):
    with pytest.raises(UserError, match=sentence):
        parse(argv)


def test_preflights_options_are_told_from_the_runs():
    options, settings = parse(["--json", "--learning_rate", "1", "--timeout", "5", "--use_cpu"])
    assert (options.json, options.timeout, settings.learning_rate, settings.use_cpu) == ("-", 5, 1.0, True)
    assert parse(["--json", "f.json"])[0].json == "f.json"


def test_help_is_preflights_own(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: python -m unsloth_ddp.preflight") and "those of train_ddp.py" in printed


def preflight(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Preflight as a user starts it, on this machine alone."""
    command = [sys.executable, "-m", "unsloth_ddp.preflight", *argv]
    env = {**os.environ, **environ}
    return subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=280)


def test_one_node_is_checked_with_plain_python(tmp_path):
    done = preflight("--use_cpu", "--output_dir", str(tmp_path / "out"), "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["exit_code"]) == (0, 0), done.stdout
    # A busy machine may not import in time what that check needs.
    others = [check for check in report["checks"] if check["name"] != "training arguments"]
    assert {check["verdict"] for check in others} == {"ok"}, done.stdout
    names = [check["name"] for check in report["checks"]]
    for name in (
        "environment",
        "output folder",
        "shared memory",
        "GPUs",
        "versions",
        "kit",
        "settings",
        "data",
        "model",
    ):
        assert name in names
    assert undocumented(report) == set()
    assert not (tmp_path / "out").exists()


def test_every_row_that_the_page_lists_can_be_made():
    source = "".join(path.read_text() for path in (REPO / "unsloth_ddp" / "preflight").glob("*.py"))
    made = {name for name in documented() if f'"{name.removesuffix("NAME")}' in source or f'"{name} (' in source}
    # The operations of torch.distributed, with a dash.
    assert documented() - made == {"all-reduce"}


def test_a_failure_is_exit_code_1_and_a_mistake_2(tmp_path):
    (tmp_path / "file").write_text("")
    argv = ["--use_cpu", "--output_dir", str(tmp_path / "file"), "--dataset", str(tmp_path / "no.jsonl")]
    done = preflight(*argv, "--model", str(DEMO_MODEL))
    assert done.returncode == 1
    assert "preflight: 2 failures (output folder, data: dataset no.jsonl)" in done.stdout
    done = preflight("--no_such_option", UNSLOTH_DDP_EXIT_CODE_FILE=str(tmp_path / "code"))
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "preflight: error: command line: there is no option no_such_option; python -m unsloth_ddp.preflight --help and "
        "train_ddp.py --help list them all.\n"
    )
    assert (tmp_path / "code").read_text() == "2\n"


def test_variables_that_cannot_be_read_are_a_row_too(tmp_path):
    done = preflight("--use_cpu", NNODES="2")
    assert done.returncode == 1
    assert "NODE_RANK is not set on this node" in " ".join(done.stdout.split())
    done = preflight("--use_cpu", "--json", str(tmp_path / "new" / "report.json"), NNODES="2")
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    assert (done.returncode, report["exit_code"], report["checks"][0]["name"]) == (1, 1, "environment")


class FakeProperties:
    """What torch.cuda.get_device_properties gives."""

    name, total_memory, major, minor, uuid = "NVIDIA H200", 150 * 10**9, 9, 0, "GPU-1"


def test_gpus_are_read_from_torch(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: FakeProperties())
    gpu = {"name": "NVIDIA H200", "memory": 150 * 10**9, "capability": "9.0", "uuid": "GPU-1"}
    assert machine_facts.read_gpus(cpu=False) == ([gpu, gpu], "")
    assert machine_facts.read_gpus(cpu=True) == ([], "")

    def broken() -> None:
        raise RuntimeError("Found no NVIDIA driver\non your system")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", broken)
    assert machine_facts.read_gpus(cpu=False) == ([], "Found no NVIDIA driver on your system")


def test_a_stuck_driver_is_not_waited_for(monkeypatch, stuck):
    monkeypatch.setattr(machine_facts, "query_gpus", stuck)
    monkeypatch.setattr(machine_facts, "GPU_SECONDS", 0.1)
    assert machine_facts.read_gpus(cpu=False)[1].startswith("TimeoutError")


@pytest.mark.parametrize(
    ("world", "per_node", "expected"),
    [
        (4, 2, {"inside": [[0, 1], [2, 3]], "between": [[0, 2]], "all": [[0, 1, 2, 3]]}),
        (4, 4, {"inside": [[0, 1, 2, 3]]}),
        (3, 1, {"between": [[0, 1, 2]]}),
    ],
)
def test_what_is_measured(world, per_node, expected):
    assert dict(collectives.scopes(world, per_node)) == expected


def test_the_doctor_is_stopped_with_all_it_started(monkeypatch, tmp_path):
    fake = tmp_path / "unsloth_cli"
    fake.mkdir()
    (fake / "__init__.py").write_text(
        "import os, subprocess, sys, time\n"
        "def app():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"    open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "    print('RANK' in os.environ, sys.argv[1:], flush=True)\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    started_doctor = doctor.Doctor()
    started = tmp_path / "child"
    wait_until(lambda: started.exists() and started.read_text() != "", 30, "the doctor's child")
    monkeypatch.setattr(doctor, "DOCTOR_SECONDS", 0)
    found = started_doctor.check(0)
    assert (found.verdict, "did not end" in found.values[0]) == ("warning", True)
    wait_until(lambda: not is_running(int(started.read_text())), 30, "the end of the doctor's child")
    # Nothing of the launcher's reached it.
    assert started_doctor.command.output.startswith("False ['doctor', '--gpus']")


def test_training_arguments_are_checked_only_where_they_are_not_the_defaults():
    assert not training_arguments.needs_check(Settings(model="m", dataset=["d"], learning_rate=1.0))
    for changed in ({"optim": "sgd"}, {"lr_scheduler_type": "cosine"}, {"trainer_args": {"adam_beta2": 0.9}}):
        assert training_arguments.needs_check(Settings(model="m", dataset=["d"], **changed))
    checked = training_arguments.TrainingArguments(Settings(model="m", dataset=["d"]))
    assert checked.check(0) == training_arguments.Check("training arguments", {0: "defaults"})
    checked.end()


def test_training_arguments_are_refused_as_a_run_refuses_them(tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    Settings(model="m", dataset=["d"], lr_scheduler_type="cosine_with_min_lr").save(path)
    assert training_arguments.main(path) == 2
    assert capsys.readouterr().out.startswith("lr_scheduler_type cosine_with_min_lr does not work with")
    Settings(model="m", dataset=["d"], trainer_args={"no_such_field": 1}).save(path)
    assert training_arguments.main(path) == 2
    assert "SFTConfig has no field no_such_field" in capsys.readouterr().out
    # A GPU may do what this process, on the CPU, cannot.
    Settings(model="m", dataset=["d"], trainer_args={"tf32": True}, precision="bf16").save(path)
    assert training_arguments.main(path) == 0


@pytest.mark.parametrize(
    ("script", "verdict", "value"),
    [
        ("raise SystemExit", "ok", "accepted"),
        ("print('noise'); print('optim x is refused'); raise SystemExit(2)", "failure", "refused"),
        ("raise ValueError('not expected')", "warning", "not checked: exit code 1: ValueError: not expected"),
        ("import time; time.sleep(60)", "warning", "not checked: no answer in time"),
    ],
)
def test_the_check_of_training_arguments_has_a_row(script, verdict, value, monkeypatch):
    checked = training_arguments.TrainingArguments.__new__(training_arguments.TrainingArguments)
    checked.command = background.BackgroundCommand([sys.executable, "-c", script])
    monkeypatch.setattr(training_arguments, "LIMIT_SECONDS", 1 if "sleep" in script else 60)
    found = checked.check(1)
    assert (found.verdict, found.values[1]) == (verdict, value)
    assert verdict != "failure" or found.remedy == "optim x is refused"


@pytest.mark.parametrize(
    ("launcher", "words", "devices", "verdict", "remedy"),
    [
        ({}, "", [], "ok", ""),
        ({"UNSLOTH_FSDP2": "1"}, "", [], "failure", "sharding fsdp2 needs GPUs and none is used here"),
        ({"UNSLOTH_FSDP2": "1"}, "", [{"name": "H200"}], "ok", ""),
        ({"UNSLOTH_FSDP2": "1"}, "--gradient_checkpointing unsloth", [{"name": "H200"}], "failure", "does not go with"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "", [{"name": "H200"}], "failure", "DeepSpeed, which is not installed"),
        ({}, "--backend unsloth", [], "failure", "backend unsloth needs an accelerator"),
    ],
)
def test_a_sharding_that_training_would_refuse_is_a_failure(
    launcher, words, devices, verdict, remedy, tmp_path, monkeypatch
):
    monkeypatch.setattr(node_checks, "read_driver_version", lambda: None)
    monkeypatch.setattr("unsloth_ddp.distributed.sharding.importlib.util.find_spec", lambda name: None)
    _, settings = parse(["--output_dir", str(tmp_path / "outputs"), *words.split()])
    environ = {**os.environ, **launcher}
    probed = folders.NodeFolders()
    found = node_checks.check_machine(read_process_info(environ), settings, environ, probed, devices, "")
    probed.remove()
    row = next(check for check in found if check.name == "sharding")
    assert (row.verdict, remedy in row.remedy) == (verdict, True), row
