"""Paths and variables with spaces, quotes and commands in them reach every launch file as the text that they are."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from tests.cluster_scripts.stand_ins import Workplace
from tests.cluster_scripts.test_job_files import PBS_TMRSH, SSH
from tests.conftest import REPO

# Evaluated once too often, each makes a file of this name in the folder that it is evaluated in.
COMMANDS = [
    "a $(touch planted) b",
    "a'; touch planted; 'b",
    'a"; touch planted; "b',
    "a`touch planted`b",
    "a;touch planted",
]
NODE = "--cpu --no_preflight"


@pytest.fixture
def place(tmp_path) -> Workplace:
    """A folder to run the scripts in."""
    return Workplace(tmp_path)


def kit_in(folder: Path) -> Path:
    """Return a copy of what the launch files need of the kit."""
    for name in ("cluster", "accelerate_configs"):
        shutil.copytree(REPO / name, folder / name)
    (folder / "train_ddp.py").touch()
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_node_removes_its_temporary_folder_and_nothing_else(place, name):
    odd = place.folder / name
    odd.mkdir()
    (odd / "keep").touch()
    (place.folder / "a").mkdir()
    code, text = place.run("node.sh", NODE, TMPDIR=str(odd))
    assert code == 0, text
    assert [path.name for path in odd.iterdir()] == ["keep"], "its own folder is left, or another one is gone"
    assert (place.folder / "a").is_dir()
    assert not list(place.folder.rglob("planted"))


def test_node_finds_its_processes_where_the_temporary_folder_looks_like_a_pattern(place):
    odd = place.folder / "a[b]*c+"
    odd.mkdir()
    script = "setsid sleep 300 & exit 1"
    code, text = place.run("node.sh", NODE, TMPDIR=str(odd), SCRIPT=script)
    assert code == 1
    assert "ending processes that outlived their launcher" in text


@pytest.mark.parametrize("shell", ["remote", "pbs_tmrsh"])
@pytest.mark.parametrize("name", COMMANDS)
def test_the_kit_is_found_on_every_host_in_a_folder_of_any_name(place, name, shell):
    place.tool("remote", SSH)
    place.tool("pbs_tmrsh", PBS_TMRSH)
    kit = kit_in(place.folder / name)
    code, text = place.run(
        "ssh.sh", NODE, kit, HOSTS="a b", SSH=shell, SCRIPT='echo "ran on $HOST" >>"$CALLS"', LOGS="logs"
    )
    assert code == 0, text
    assert sorted(line for line in place.calls() if line.startswith("ran")) == ["ran on a", "ran on b"]
    assert not list(place.folder.rglob("planted"))


@pytest.mark.parametrize("name", COMMANDS)
def test_job_files_take_the_kit_from_a_folder_of_any_name(place, name):
    place.tool("pbs_tmrsh", PBS_TMRSH)
    place.tool("srun", '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nSLURM_NODEID=0 exec "$@"\n')
    place.tool("squeue", "#!/bin/sh\necho RUNNING\n")
    kit = kit_in(place.folder / name)
    (place.folder / "nodes").write_text("a\n")
    pbs = {"PBS_NODEFILE": "nodes", "PBS_JOBID": "7.srv"}
    code, text = place.run("pbs.sh", NODE, kit, UNSLOTH_DDP_HOME=str(kit), **pbs)
    assert code == 0, text
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "a", "MASTER_ADDR": "a"}
    code, text = place.run("slurm.sbatch", NODE, kit, UNSLOTH_DDP_HOME=str(kit), GPUS_PER_NODE="1", **slurm)
    assert code == 0, text
    assert sum("train_ddp.py" in line for line in place.calls()) == 2
    assert not list(place.folder.rglob("planted"))


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT", "MAX_REQUEUES"])
def test_numbers_of_slurm_are_not_evaluated(place, name):
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "a", "MASTER_ADDR": "a"}
    code, text = place.run("slurm.sbatch", NODE, UNSLOTH_DDP_HOME=str(REPO), **slurm | {name: "x[$(touch planted)]"})
    assert (code, text) == (2, f"slurm.sbatch: error: {name} is 'x[$(touch planted)]', but it takes a whole number.\n")
    assert not list(place.folder.rglob("planted"))


# ---- hosts ----


def test_a_list_of_hosts_from_windows_is_read(place):
    place.tool("remote", SSH)
    (place.folder / "hosts.txt").write_bytes(b"first # the master\r\n\r\nsecond\r\n")
    script = 'echo "$HOST $MASTER_ADDR" >>"$CALLS"'
    for hosts in ("hosts.txt", "first\r\nsecond\r\n"):
        place.calls_file.write_text("")
        code, text = place.run("ssh.sh", NODE, HOSTS=hosts, SSH="remote", SCRIPT=script, LOGS="logs")
        assert code == 0, text
        assert sorted(line for line in place.calls() if line[0] != "-") == ["first first", "second first"]


@pytest.mark.parametrize("hosts", ["me@gpu1 gpu1", "gpu1 you@gpu1", "me@gpu1 you@gpu1", "gpu1 GPU1"])
def test_one_host_under_two_names_is_refused(place, hosts):
    code, text = place.run("ssh.sh", NODE, HOSTS=hosts, SSH="remote")
    assert code == 2
    assert "HOSTS has gpu1 twice" in text


# ---- the secret ----

SAY_SECRET = 'echo "secret $UNSLOTH_DDP_SECRET" >>"$CALLS"'
# Writes down its command line too, which other users of a host can read.
SPYING = SSH.replace("HOST=$host", 'words=$(base64 -d <<<"${@: -1}"); echo "line $* $words" >>"$CALLS"; HOST=$host')


def secrets_of(place: Workplace) -> list[str]:
    """Return the secret that each node was given."""
    return [line.split()[1] for line in place.calls() if line.startswith("secret ")]


def test_ssh_gives_all_nodes_one_secret_and_keeps_it_from_command_lines(place):
    place.tool("remote", SPYING)
    code, text = place.run("ssh.sh", NODE, HOSTS="a b", SSH="remote", SCRIPT=SAY_SECRET, LOGS="logs")
    assert code == 0, text
    first, second = secrets_of(place)
    assert first == second
    assert len(first) > 32
    seen = [line for line in place.calls() if line.startswith("line ")]
    assert len(seen) == 2
    assert not any(first in line for line in seen)
    place.calls_file.write_text("")
    place.run("ssh.sh", NODE, HOSTS="a b", SSH="remote", SCRIPT=SAY_SECRET, LOGS="logs")
    assert first not in secrets_of(place), "every job has a secret of its own"


@pytest.mark.parametrize("given", [{}, {"UNSLOTH_DDP_SECRET": "s3cret"}])
def test_job_files_give_all_nodes_one_secret(place, given):
    place.tool("pbs_tmrsh", PBS_TMRSH)
    one = '(SLURM_NODEID=$node "$@")'
    place.tool("srun", f"#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nfor node in 0 1; do {one} || exit; done\n")
    (place.folder / "nodes").write_text("a\nb\n")
    home = {"UNSLOTH_DDP_HOME": str(REPO), "SCRIPT": SAY_SECRET, "GPUS_PER_NODE": "1", "MASTER_ADDR": "a"}
    pbs = {"PBS_NODEFILE": "nodes", "PBS_JOBID": "7.srv"}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "a,b"}
    for script, variables in (("pbs.sh", pbs), ("slurm.sbatch", slurm)):
        place.calls_file.write_text("")
        code, text = place.run(script, NODE, **home, **variables, **given)
        assert code == 0, text
        first, second = secrets_of(place)
        assert first == second
        assert first == given.get("UNSLOTH_DDP_SECRET", first)
        assert first not in text


# ---- files in /tmp ----


def test_a_file_that_a_stranger_put_at_the_place_of_a_process_id_is_not_written_through(place):
    victim = place.folder / "victim"
    victim.write_text("precious")
    # The words of the job are on its command line, so a stranger on the host knows the file's name a moment before.
    planting = SSH.replace("HOST=$host", f'ln -s "{victim}" "$(base64 -d <<<"${{@: -1}}" | cut -d" " -f2)"; HOST=$host')
    place.tool("remote", planting)
    code, _ = place.run("ssh.sh", NODE, HOSTS="a", SSH="remote", LOGS="logs")
    assert code == 0
    assert victim.read_text() == "precious"
    assert stat.S_ISREG(victim.lstat().st_mode)


# ---- one node ----


def test_the_launcher_of_one_node_meets_in_a_file_of_its_own(place):
    script = 'echo "meets $PET_RDZV_ENDPOINT $TORCH_DISABLE_SHARE_RDZV_TCP_STORE" >>"$CALLS"'
    assert place.run("node.sh", NODE, SCRIPT=script)[0] == 0
    launched, meets = place.calls()
    assert "--rdzv_backend c10d --rdzv_conf store_type=file" in launched
    assert meets.startswith(f"meets {place.folder}/unsloth_ddp_node.")
    assert meets.endswith("/meeting 1")
    place.calls_file.write_text("")
    two = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "10.9.8.7"}
    assert place.run("node.sh", NODE, SCRIPT=script, **two)[0] == 0
    launched, meets = place.calls()
    assert "--rdzv_backend" not in launched
    assert meets == "meets  "
