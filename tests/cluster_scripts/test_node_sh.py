"""cluster/node.sh: what it refuses before anything starts, what it starts, and what it makes of signals and codes.

Stand-ins for accelerate-launch and nvidia-smi write down how they were called, so nothing heavier than bash runs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster_scripts.stand_ins import Workplace
from tests.conftest import REPO
from tests.waiting import is_running

NVIDIA_SMI = '#!/bin/sh\ni=0\nwhile [ $i -lt "${GPUS:-0}" ]; do echo "GPU $i: Some (UUID)"; i=$((i+1)); done\n'


class Node(Workplace):
    """One run of node.sh after another, in a folder with ./model and rows.jsonl, on a machine with $GPUS GPUs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tool("nvidia-smi", NVIDIA_SMI)
        (folder / "rows.jsonl").write_text("{}\n")
        (folder / "model").mkdir()

    def begin(self, words: str, **variables: str) -> subprocess.Popen[str]:
        """Start node.sh; what was called before is forgotten."""
        self.calls_file.write_text("")
        return self.start("node.sh", words, **variables)

    def __call__(self, words: str, **variables: str) -> tuple[int, str]:
        """Run node.sh to its end: its exit code and its messages."""
        self.calls_file.write_text("")
        return self.run("node.sh", words, **variables)


@pytest.fixture
def node(tmp_path):
    """node.sh, to be run with words and variables."""
    return Node(tmp_path)


TWO = {"GPUS": "4", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.9.8.7"}


@pytest.mark.parametrize(
    ("words", "variables", "says"),
    [
        ("", {"NNODES": "two"}, "NNODES is 'two', but it takes a whole number"),
        ("", {"NNODES": "0"}, "NNODES is 0, but it is from 1 to"),
        ("", {"NNODES": "-1"}, "NNODES is '-1'"),
        ("", {"NNODES": "2", "MASTER_ADDR": "a"}, "NODE_RANK is not set and NNODES is 2"),
        ("", TWO | {"NODE_RANK": "2"}, "NODE_RANK is 2 and NNODES is 2; ranks go from 0 to 1"),
        ("", {"NODE_RANK": "1"}, "NODE_RANK is 1 and NNODES is 1"),
        ("", TWO | {"NODE_RANK": "1.5"}, "NODE_RANK is '1.5'"),
        ("", TWO | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set and NNODES is 2"),
        ("", TWO | {"MASTER_ADDR": "localhost"}, "MASTER_ADDR is localhost, which on every node means itself"),
        ("", TWO | {"MASTER_ADDR": "127.0.1.1"}, "MASTER_ADDR is 127.0.1.1"),
        ("", TWO | {"MASTER_ADDR": "a b"}, "MASTER_ADDR is 'a b', which is not a name or address"),
        ("", TWO | {"MASTER_PORT": "80"}, "MASTER_PORT is 80, but it is from 1024 to 65534"),
        ("", TWO | {"MASTER_PORT": "65535"}, "the preflight takes the next one"),
        ("", TWO | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ("", TWO | {"START_TIMEOUT": "5"}, "START_TIMEOUT is 5"),
        ("", TWO | {"GPUS_PER_NODE": "8"}, "shows 4; give at most 4, on every node alike"),
        ("", {"GPUS": "4", "CUDA_VISIBLE_DEVICES": "1,2", "GPUS_PER_NODE": "3"}, "shows 2; give at most 2"),
        ("", {"GPUS": "4", "GPUS_PER_NODE": "0"}, "GPUS_PER_NODE is 0"),
        ("", {"GPUS": "4", "CUDA_VISIBLE_DEVICES": ""}, "shows no GPU"),
        ("", {"GPUS": "4", "CUDA_VISIBLE_DEVICES": "-1"}, "shows no GPU"),
        ("", {}, "shows no GPU; check its driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, or add --cpu"),
        ("-m ./none", {}, "-m ./none: there is no such folder on this node"),
        ("-m rows.jsonl", {}, "-m rows.jsonl: there is no such folder"),
        ("-d no.jsonl", TWO, "-d no.jsonl: there is no such file on this node (node 1, "),
        ("-d rows.jsonl ~/no", {}, "-d ~/no: there is no such file"),
        ("-d rows.jsonl:3 rows.jsonl[:10%]:1 no.jsonl[:5]", {}, "-d no.jsonl[:5]: there is no such file"),
        ("--config no.yaml", {}, "--config no.yaml: there is no such file on this node"),
        ("-m", {}, "-m takes a value and has none"),
        ("--method lola", {}, "--method is lola, but it is one of lora, qlora and full"),
        ("--sharding zero1", {}, "--sharding is zero1, but it is one of"),
        ("--sharding zero3 --cpu", {}, "--sharding zero3 needs GPUs"),
        ("--max_restarts some", {}, "--max_restarts is some"),
        ("--min_nodes one", TWO, "--min_nodes is one"),
        ("--min_nodes 3 --run_name r", TWO, "--min_nodes is 3 and NNODES is 2"),
        ("--min_nodes 1 --run_name r --sharding zero2", TWO, "checkpoints of --sharding zero2 do not allow; take"),
        ("--min_nodes 1", TWO, "--min_nodes needs --run_name, the same on every node"),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused_in_one_sentence_before_anything_starts(node, words, variables, says):
    code, text = node(words, **variables)
    assert code == 2
    assert says in text
    assert text.startswith("node.sh: error: ") and text.count("\n") == 1
    assert node.calls() == []


@pytest.mark.parametrize("sharding", ["fsdp2", "fsdp2_hybrid", "zero2_offload", "zero3_offload", "fsdp2_offload"])
def test_a_sharding_is_started_with_its_file(node, sharding):
    assert node(f"--sharding {sharding} --no_preflight", GPUS="2")[0] == 0
    config = REPO / "accelerate_configs" / f"{sharding}.yaml"
    assert config.is_file() and node.calls()[0].startswith(
        f"--config_file {config} --num_machines 1 --num_processes 2 "
    )


def test_usage(node):
    code, text = node("-h", NNODES="x")
    assert code == 0 and "MASTER_PORT            a free TCP port of node 0 (default 6001)" in text


def test_one_machine_needs_no_variable(node):
    code, text = node("-m ./model -d rows.jsonl --no_preflight --max_steps 3", GPUS="2")
    assert (code, text) == (0, "")
    config = REPO / "accelerate_configs" / "multi_node.yaml"
    assert node.calls() == [
        f"--config_file {config} --num_machines 1 --num_processes 2 --machine_rank 0 --main_process_port 0 "
        f"--rdzv_backend c10d --rdzv_conf store_type=file {REPO}/train_ddp.py --model ./model --dataset rows.jsonl "
        "--max_steps 3"
    ]


def test_the_flags_of_a_node_and_its_preflights(node):
    code, _ = node("-m a/b -d rows.jsonl rows.jsonl --method=full --run-name x", **TWO, MASTER_PORT="07000")
    train = "--model a/b --dataset rows.jsonl rows.jsonl --method full --run-name x"
    job = (
        f"--config_file {REPO}/accelerate_configs/multi_node.yaml --num_machines 2 --num_processes 8 --machine_rank 1 "
        "--main_process_ip 10.9.8.7 --main_process_port {} --rdzv_conf timeout=300 {} " + train
    )
    assert code == 0
    assert node.calls() == [
        f"-m unsloth_ddp.preflight --timeout 300 {train}",
        job.format(7001, "-m unsloth_ddp.preflight --timeout 300"),
        job.format(7000, f"{REPO}/train_ddp.py"),
    ]


def test_a_job_that_may_lose_nodes_is_launched_by_torchrun_with_a_range(node):
    seen = 'echo "$PET_NNODES $PET_RDZV_ENDPOINT $UNSLOTH_DDP_NODES" >>"$CALLS"'
    code, _ = node("-d rows.jsonl --sharding fsdp2 --min_nodes 1", **TWO, RUN_NAME="r", SCRIPT=seen)
    preflight, _, launched, variables = node.calls()
    assert code == 0
    # By itself: the other nodes may be training.
    assert "--num_machines 1 --num_processes 4 --machine_rank 0 " in preflight and "unsloth_ddp.preflight" in preflight
    assert launched.startswith(
        f"--config_file {REPO}/accelerate_configs/fsdp2.yaml --num_machines 1 --num_processes 4 --main_process_port 0 "
        "--max_restarts 3 --rdzv_backend c10d --rdzv_conf is_host=0,join_timeout=300,read_timeout=300 "
    )
    assert variables == "1:2 10.9.8.7:6001 1:2"
    # The launcher has restarted by itself: not again without a later checkpoint.
    failing = "echo x >>$CALLS; exit 1"
    assert node("--no_preflight --min_nodes 1 --run_name r", **TWO, SCRIPT=failing)[0] == 1
    assert node.calls().count("x") == 1


@pytest.mark.parametrize(("option", "seen"), [("--cpu", "cpu True"), ("", "cpu ")])
def test_processes_are_told_to_leave_the_gpus_alone(node, option, seen):
    node(f"{option} --no_preflight", GPUS="2", SCRIPT='echo "cpu ${ACCELERATE_USE_CPU:-}" >>"$CALLS"')
    assert [line for line in node.calls() if line.startswith("cpu")] == [seen]


def test_cpu_processes(node):
    node("--cpu --no_preflight", **TWO, GPUS_PER_NODE="3")
    assert node.calls()[0].startswith(
        f"--config_file {REPO}/accelerate_configs/cpu.yaml --num_machines 2 --num_processes 6 "
    )


def test_words_with_spaces_and_quotes_arrive_whole(node):
    (node.folder / "my rows.jsonl").touch()
    script = 'for word; do echo "<$word>" >>"$CALLS"; done'
    node("""-d 'my rows.jsonl' --trainer_args '{"a": "b c"}' --cpu --no_preflight""", SCRIPT=script)
    assert node.calls()[-4:] == ["<--dataset>", "<my rows.jsonl>", "<--trainer_args>", '<{"a": "b c"}>']


@pytest.mark.parametrize("noted", [2, 75, 1])
def test_its_exit_code_is_the_trainings(node, noted):
    code, _ = node("--cpu --no_preflight", SCRIPT=f'echo {noted} >"$UNSLOTH_DDP_EXIT_CODE_FILE"; exit 1')
    assert code == noted


def test_a_stop_before_the_first_step_may_be_started_again(node):
    script = 'trap \'echo 1 >"$UNSLOTH_DDP_EXIT_CODE_FILE"; exit 1\' USR1; echo ready >>"$CALLS"'
    script += "; while :; do sleep 0.05; done"
    process = node.begin("--cpu --no_preflight", SCRIPT=script)
    node.wait_for("ready")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=200)
    assert process.returncode == 75


def test_a_launcher_that_fails_by_itself_is_a_failure(node):
    assert node("--cpu --no_preflight", SCRIPT="exit 9")[0] == 9


@pytest.mark.parametrize(("failing", "calls"), [("--timeout", 1), ("--module-of-launcher", 2)])
def test_a_failed_preflight_stops_it(node, failing, calls):
    script = '[[ "$*" != *preflight* ]] || exit 1' if calls == 1 else '[[ "$*" != *"--config_file"* ]] || exit 1'
    code, text = node("--cpu", **TWO, SCRIPT=f"echo 'the table'; {script}")
    assert code == 1
    assert "the table" in text and "the preflight failed, so nothing was trained" in text
    assert len(node.calls()) == calls and not any("train_ddp.py" in call for call in node.calls())


@pytest.mark.parametrize(("sent", "got", "code"), [("TERM", "TERM", 75), ("INT", "TERM", 75), ("USR1", "USR1", 75)])
def test_a_signal_reaches_the_launcher_and_is_waited_for(node, sent, got, code):
    process = node.begin(
        "--cpu --no_preflight --max_restarts 3", SCRIPT='echo ready >>"$CALLS"; while :; do sleep 0.05; done'
    )
    node.wait_for("ready")
    process.send_signal(getattr(signal, f"SIG{sent}"))
    text, _ = process.communicate(timeout=200)
    assert process.returncode == code
    assert node.calls()[1:] == ["ready", f"got {got}"]  # once, and no restart
    assert "stopped on request" in text


def test_a_stop_during_the_preflight_trains_nothing(node):
    process = node.begin("--cpu", SCRIPT='echo ready >>"$CALLS"; while :; do sleep 0.05; done')
    node.wait_for("ready")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=200)
    assert process.returncode == 75
    assert not any("train_ddp.py" in call for call in node.calls())


def test_restarts(node):
    code, text = node("--cpu --no_preflight --max_restarts 2", SCRIPT="exit 1")
    assert code == 1 and len(node.calls()) == 3
    assert "start 2 of at most 2 again, from the last complete checkpoint" in text
    assert "node 0: no start after the checkpoint of step 0 got further" in text
    # Five starts, of which each saves a later step but the last, which is the first restart without progress.
    later = "n=$(cat n 2>/dev/null || echo 1); echo $((n < 4 ? n + 1 : 4)) >n; "
    later += 'echo "${n}0" >"$UNSLOTH_DDP_EXIT_CODE_FILE.step"; exit 1'
    code, text = node("--cpu --no_preflight --max_restarts 1", SCRIPT=later)
    assert code == 1 and len(node.calls()) == 5
    assert text.count("start 1 of at most 1 again") == 4 and text.count("--no_overwrite") == 0
    assert all(call.count("--no_overwrite") == 1 for call in node.calls()[1:])
    assert "node 0: no start after the checkpoint of step 40 got further" in text
    named = 'echo "train_ddp.py: error: rank 1 died" >"$UNSLOTH_DDP_EXIT_CODE_FILE.why"; exit 1'
    code, text = node("--cpu --no_preflight --max_restarts 1", SCRIPT=named)
    assert "so the cause is not one that passes (--max_restarts 1): train_ddp.py: error: rank 1 died" in text
    once = "[[ -e again ]] || { touch again; exit 1; }"
    assert node("--cpu --no_preflight --max_restarts 2", SCRIPT=once)[0] == 0 and len(node.calls()) == 2
    for code in (2, 75):  # a mistake, and a stop that was asked for
        node("--cpu --no_preflight --max_restarts 2", SCRIPT=f'echo {code} >"$UNSLOTH_DDP_EXIT_CODE_FILE"; exit 1')
        assert len(node.calls()) == 1


def test_a_process_that_dies_once_the_result_is_written_changes_nothing(node):
    script = 'touch "$UNSLOTH_DDP_EXIT_CODE_FILE.done"; exit 1'
    code, text = node("--cpu --no_preflight --max_restarts 2", SCRIPT=script)
    assert code == 0 and len(node.calls()) == 1
    assert "node 0: the result was written before, so nothing is left to do here" in text


@pytest.mark.parametrize("starts", [0, 1])
def test_a_node_that_may_restart_asks_for_the_result_before_it_waits_for_the_others(node, starts):
    # Between two starts it waits for ten seconds.
    node.tool("sleep", "#!/bin/sh\nexec /bin/sleep 0.1\n")
    code, text = node(
        "--no_preflight --max_restarts 2", **TWO | {"NODE_RANK": "0"}, SCRIPT="exit 1", FINISHED=str(starts)
    )
    assert code == 0 and len(node.calls()) == starts
    assert "node 0: the run's folder holds the result of these settings, so nothing is left to do here" in text


def test_a_node_that_may_restart_names_a_mistake_in_its_settings_before_others_wait_for_its_ranks(node):
    code, text = node("--no_preflight --max_restarts 2", **TWO, MISTAKE="train_ddp.py: error: seed is -1.")
    assert code == 2 and not node.calls()
    assert "train_ddp.py: error: seed is -1.\n" in text and "ended with exit code 2" in text


@pytest.mark.parametrize(
    ("words", "config", "named"),
    [
        ("", "seed: 1\n", "slurm-7"),
        ("--run-name=mine", "seed: 1\n", "mine"),
        ("", "run_name: mine\n", None),
        ("", "run_name: null  # by the clock\n", "slurm-7"),
    ],
)
def test_the_name_of_a_job_is_the_runs_unless_that_has_its_own(node, words, config, named):
    (node.folder / "c.yaml").write_text(config)
    node(f"--cpu --no_preflight --config c.yaml {words}", RUN_NAME="slurm-7")
    found = node.calls()[0].partition("--config c.yaml")[2].split()
    assert [word for word in found if not word.startswith("--run")] == ([named] if named else [])


def test_a_stop_between_two_starts_begins_none(node):
    # The wait between two starts lasts until the signal has been sent.
    wait = 'echo "sleep $1" >>"$CALLS"\nwhile [[ $1 == 10 && ! -e $CALLS.sent ]]; do /bin/sleep 0.05; done\n'
    node.tool("sleep", f"#!/bin/bash\n{wait}exec /bin/sleep 0.1\n")
    script = '[[ "$*" == *preflight* ]] || exit 1'
    process = node.begin("--max_restarts 3", **TWO | {"NODE_RANK": "0"}, SCRIPT=script)
    node.wait_for("sleep 10")
    before = [call for call in node.calls() if not call.startswith("sleep")]
    process.send_signal(signal.SIGUSR1)
    node.calls_file.with_name("calls.txt.sent").touch()
    process.communicate(timeout=200)
    assert process.returncode == 75
    assert [call for call in node.calls() if not call.startswith("sleep")] == before


def test_ranks_that_outlive_their_launcher_are_ended(node):
    script = "(setsid sleep 300 & echo $! >stray); kill -KILL $$"
    code, text = node("--cpu --no_preflight", SCRIPT=script)
    assert code == 137 and "ending processes that outlived their launcher" in text
    assert not is_running(int((node.folder / "stray").read_text()))


def test_without_uv_and_environment_it_says_what_to_do(node):
    node.tool("uv", "#!/bin/sh\nexit 1\n")
    code, text = node("--cpu")
    assert code == 2 and "install uv" in text


def test_shell_scripts_are_clean():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is missing (Debian's package shellcheck)")
    shell = (path for path in sorted((REPO / "cluster").iterdir()) if path.suffix not in (".yml", ".yaml"))
    scripts = [*map(str, shell), str(REPO / ".ci" / "run")]
    done = subprocess.run(["shellcheck", "--shell=bash", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_nothing_is_left_in_the_temporary_folder(node):
    node("--cpu --no_preflight")
    assert not [name for name in os.listdir(node.folder) if name.startswith("unsloth_ddp_node")]
