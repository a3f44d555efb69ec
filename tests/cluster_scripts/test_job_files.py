"""cluster/slurm.sbatch, pbs.sh and ssh.sh: what they refuse and start. Remote shells and schedulers are stand-ins."""

from __future__ import annotations

import base64
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster_scripts.stand_ins import Workplace
from tests.conftest import REPO

CLUSTER = REPO / "cluster"
# ssh joins its words for the remote user's shell; pbs_tmrsh hands them over as they are.
SSH = '#!/bin/bash\nhost=$1; shift\n[[ $host != dead ]] || exit 255\nHOST=$host exec bash -c "$*"\n'
PBS_TMRSH = '#!/bin/bash\nhost=$1; shift\nHOST=$host exec "$@"\n'


@pytest.fixture
def place(tmp_path):
    """Where the scripts run; `remote` stands for ssh."""
    made = Workplace(tmp_path)
    made.tool("remote", SSH)
    return made


@pytest.mark.parametrize("name", ["slurm.sbatch", "pbs.sh"])
def test_lines_for_the_scheduler_hold_no_variable(name):
    lines = [line for line in (CLUSTER / name).read_text().splitlines() if line.startswith(("#SBATCH", "#PBS"))]
    assert len(lines) > 3 and not any("$" in line for line in lines)


def test_files_refuse_to_run_without_their_scheduler(place):
    environ = {"UNSLOTH_DDP_HOME": str(REPO)}
    assert place.run("slurm.sbatch", **environ)[0] == 2
    assert "start it with sbatch" in place.run("slurm.sbatch", **environ)[1]
    assert "start it with qsub" in place.run("pbs.sh", **environ)[1]
    code, text = place.run("pbs.sh", **environ, PBS_JOBID="1.x", PBS_NODEFILE="none")
    assert code == 2 and "PBS_NODEFILE=none, is missing or empty" in text


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ("", "HOSTS is not set"),
        ("a b a", "HOSTS has a twice"),
        ("a -oProxyCommand=x", "HOSTS has '-oProxyCommand=x', which is not a host name"),
        ("empty.txt", "names no host"),
    ],
)
def test_hosts_that_cannot_be_meant_are_refused(place, hosts, says):
    (place.folder / "empty.txt").write_text("# none yet\n\n")
    code, text = place.run("ssh.sh", HOSTS=hosts, SSH="remote")
    assert code == 2 and says in text and text.count("\n") == 1


NODES = 'echo "$HOST $NNODES $NODE_RANK $MASTER_ADDR $MASTER_PORT" >>"$CALLS"'


def nodes(place: Workplace) -> list[str]:
    return sorted(line for line in place.calls() if not line.startswith("--config_file"))


def test_every_host_gets_its_rank_and_the_options_whole(place):
    (place.folder / "hosts.txt").write_text("me@first  # the master\n\nsecond\nthird\n")
    # One write a host, because they write side by side.
    script = NODES + '; line=$(printf "<%s>" "$@"); echo "$line" >>"$CALLS"'
    code, text = place.run(
        "ssh.sh",
        """--cpu --no_preflight --trainer_args '{"a": "b c"}'""",
        HOSTS="hosts.txt",
        SSH="remote",
        SCRIPT=script,
        LOGS="logs",
    )
    assert code == 0, text
    found = nodes(place)
    assert [line for line in found if line[0] != "<"] == [
        "me@first 3 0 first 6001",
        "second 3 1 first 6001",
        "third 3 2 first 6001",
    ]
    assert sum("""<--trainer_args><{"a": "b c"}>""" in line for line in found) == 3
    assert sorted(path.name for path in (place.folder / "logs").iterdir()) == ["node-0.log", "node-1.log", "node-2.log"]


@pytest.mark.parametrize("code", [1, 2, 75])
def test_the_exit_code_is_that_of_the_training(place, code):
    script = f'echo {code} >"$UNSLOTH_DDP_EXIT_CODE_FILE"; exit 1'
    assert place.run("ssh.sh", "--cpu --no_preflight", HOSTS="a b", SSH="remote", SCRIPT=script)[0] == code


def test_the_others_are_ended_when_one_fails(place):
    # A node that is ended before it has started its launcher has none to end.
    fails = 'until [[ $(grep -c ready "$CALLS") == 2 ]]; do sleep 0.05; done; exit 1'
    script = f'[[ $NODE_RANK != 1 ]] || {{ {fails}; }}; echo ready >>"$CALLS"; while :; do sleep 0.05; done'
    code, text = place.run("ssh.sh", "--cpu --no_preflight", HOSTS="a b c", SSH="remote", SCRIPT=script)
    assert code == 1
    assert "node 1 (b) ended with exit code 1; ending the other nodes" in text
    assert place.calls_file.read_text().count("got TERM") == 2


def test_a_host_out_of_reach_ends_the_others(place):
    script = "while :; do sleep 0.05; done"
    code, text = place.run("ssh.sh", "--cpu --no_preflight", HOSTS="a dead", SSH="remote", SCRIPT=script)
    assert code == 255 and "node 1 (dead) ended with exit code 255" in text


@pytest.mark.parametrize(("sent", "got"), [("TERM", "TERM"), ("INT", "TERM"), ("USR1", "USR1")])
def test_signals_reach_every_node_once(place, sent, got):
    script = 'echo ready >>"$CALLS"; while :; do sleep 0.05; done'
    process = place.start("ssh.sh", "--cpu --no_preflight", HOSTS="a b", SSH="remote", SCRIPT=script)
    place.wait_for("ready", times=2)
    process.send_signal(getattr(signal, f"SIG{sent}"))
    process.communicate(timeout=200)
    assert process.returncode == 75
    assert place.calls_file.read_text().count(f"got {got}") == 2
    assert not list(place.folder.glob("unsloth_ddp_*"))


def test_a_signal_reaches_a_node_that_is_being_started(place):
    """The process has its number before it becomes node.sh."""
    starting = place.folder / "cluster" / "ssh.sh"
    starting.parent.mkdir()
    starting.write_text("read\n")
    (place.folder / "pid").write_text("")
    words = base64.b64encode(f"signal {place.folder}/pid TERM".encode()).decode()
    assert place.run("ssh.sh", f"--on-node {words}") == (0, "")
    assert (place.folder / "pid.early").read_text() == "TERM\n"
    with subprocess.Popen(["bash", str(starting)], stdin=subprocess.PIPE) as process:
        (place.folder / "pid").write_text(f"{process.pid}\n")
        assert place.run("ssh.sh", f"--on-node {words}") == (0, "")
        assert process.wait(60) == -signal.SIGTERM


# A connection that brings a signal only once the training of its node has ended.
LATE = """#!/bin/bash
eval "words=($(base64 -d <<<"${@: -1}"))"
if [[ ${words[0]} == signal ]]; then
  touch "$CALLS.end"
  while [[ -e ${words[1]} ]]; do sleep 0.05; done
fi
echo "${words[0]} ${words[1]}" >>"$CALLS"
HOST=$1 exec "${@:2}"
"""


def test_a_signal_that_finds_the_training_ended_leaves_nothing(place):
    place.tool("late", LATE)
    script = 'echo ready >>"$CALLS"; while [[ ! -e $CALLS.end ]]; do sleep 0.05; done; exit 0'
    process = place.start("ssh.sh", "--cpu --no_preflight", HOSTS="a", SSH="late", SCRIPT=script)
    place.wait_for("ready")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=200)
    assert process.returncode == 0
    words = dict(line.split() for line in place.calls() if line.startswith(("start ", "signal ", "forget ")))
    assert words.keys() == {"start", "signal", "forget"}
    assert not list(Path("/tmp").glob(f"{Path(words['signal']).name}*"))


@pytest.mark.parametrize("shell", ["pbs_tmrsh", "ssh"])
def test_pbs_starts_a_node_of_each_host_in_its_file(place, shell):
    (place.folder / "nodes").write_text("a.x\na.x\nb.x\nb.x\n")
    place.tool(
        shell,
        PBS_TMRSH
        if shell == "pbs_tmrsh"
        else SSH.replace("host=$1; shift", "while [[ $1 == -* ]]; do shift 2; done; host=$1; shift"),
    )
    environ = {"PBS_NODEFILE": "nodes", "PBS_JOBID": "123[4].srv", "UNSLOTH_DDP_HOME": str(REPO)}
    (place.folder / "my rows").touch()
    code, text = place.run(
        "pbs.sh", "-d './my rows'", ARGS="""--cpu --no_preflight --method "lora" """, SCRIPT=NODES, **environ
    )
    assert code == 0, text
    assert nodes(place)[-2:] == ["a.x 2 0 a.x 10246", "b.x 2 1 a.x 10246"]
    assert "--dataset ./my rows --method lora --run_name pbs-123-4-" in place.calls_file.read_text()


def test_a_pbs_job_that_stopped_itself_asks_for_another_start(place):
    (place.folder / "nodes").write_text("a\n")
    place.tool("pbs_tmrsh", PBS_TMRSH)
    place.tool("qrerun", '#!/bin/sh\necho "qrerun $1" >>"$CALLS"\n')
    environ = {"PBS_NODEFILE": "nodes", "PBS_JOBID": "7.srv", "UNSLOTH_DDP_HOME": str(REPO), "REQUEUE": "1"}
    script = 'echo 75 >"$UNSLOTH_DDP_EXIT_CODE_FILE"; exit 1'
    assert place.run("pbs.sh", "--cpu --no_preflight --run_name x", SCRIPT=script, **environ)[0] == 75
    assert "qrerun 7.srv" in place.calls_file.read_text()
    assert "pbs-7" not in place.calls_file.read_text()


def test_options_that_cannot_be_split_into_words_are_refused(place):
    (place.folder / "nodes").write_text("a\n")
    environ = {"PBS_NODEFILE": "nodes", "PBS_JOBID": "7.srv", "UNSLOTH_DDP_HOME": str(REPO)}
    code, text = place.run("pbs.sh", ARGS="""--cpu -d "my rows""", **environ)
    assert (code, text) == (2, 'pbs.sh: error: ARGS has a quote that does not end: --cpu -d "my rows\n')
    assert place.calls_file.read_text() == ""
