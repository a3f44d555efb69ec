"""A real Slurm of two nodes on this machine: slurmctld and a slurmd on node1, a slurmd on node2, munge between them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.hosts import Host, make_hosts, missing, wait_until

TOOLS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge", "mungekey": "munge"}
CONF = """\
ClusterName=test
SlurmctldHost=node1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=batch_sched_delay=1,sched_interval=2
KillWait=30
ReturnToService=2
MpiDefault=none
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=90
PartitionName=urgent Nodes=ALL State=UP PriorityTier=9 PreemptMode=OFF
"""


def missing_slurm() -> str | None:
    """What keeps this machine from running Slurm, for a skip; None where it can."""
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            return f"{tool} is missing (Debian's package {package})"
    return missing()


class Slurm:
    """A running cluster; commands are given on node1, as a user would on a login node."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"/usr/sbin:{os.environ['PATH']}"}
        self.commands = 0

    def command(self, *words: str, cwd: Path | None = None, **environ: str) -> str:
        """What a Slurm command prints; the test fails where it fails."""
        self.commands += 1
        output = self.folder / "commands" / f"{self.commands}.txt"
        process = self.hosts[0].start(words, output, self.environ | environ, **({"cwd": cwd} if cwd else {}))
        code, text = process.wait(timeout=60), output.read_text()
        assert code == 0, f"{' '.join(words)}: {text}{self.logs()}"
        return text

    def submit(self, *words: str, cwd: Path, **environ: str) -> str:
        """sbatch these words in folder `cwd`: the job's id."""
        return self.command("sbatch", "--parsable", *words, cwd=cwd, **environ).split()[-1]

    def job(self, job: str) -> dict[str, str]:
        """What scontrol knows of a job: JobState, ExitCode, Restarts, ..."""
        text = self.command("scontrol", "show", "job", "--oneliner", job)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def wait_for(self, job: str, *states: str, timeout: float) -> dict[str, str]:
        """Wait until the job is in one of these states, and tell what scontrol knows then."""
        found: dict[str, str] = {}

        def reached() -> bool:
            found.update(self.job(job))
            time.sleep(0.5)
            return found["JobState"] in states

        wait_until(reached, timeout, f"job {job} to be {' or '.join(states)}")
        return found

    def wait_until_exists(self, path: Path, job: str, timeout: float) -> None:
        """Wait until a running job has written a file; a job that ends before fails the test with its logs."""

        def there() -> bool:
            time.sleep(0.2)
            if path.exists():
                return True
            found = self.job(job)
            texts = "".join(f"\n== {p}\n{p.read_text()[-3000:]}" for p in path.parents[3].rglob("*node-*.log"))
            assert found["JobState"] in ("PENDING", "RUNNING", "CONFIGURING"), f"job {job}: {found}{texts}"
            return False

        wait_until(there, timeout, f"{path.name} of job {job}")

    def wait_until_gone(self, word: str, timeout: float) -> None:
        """Wait until no process of either node has `word` in its command line."""

        def gone() -> bool:
            lines = []
            for host in self.hosts:
                for pid in host.pids():
                    with contextlib.suppress(OSError):
                        lines.append(Path("/proc", str(pid), "cmdline").read_bytes())
            return not any(word.encode() in line for line in lines)

        wait_until(gone, timeout, f"the processes with {word} to end")

    def start_now(self, job: str) -> None:
        """Spare a requeued job the two minutes that Slurm lets it wait.

        It has revoked the credential of the first start by then, and refuses one that is given in the same second.
        """
        self.command("scontrol", "update", f"JobId={job}", "StartTime=now+5")

    def logs(self) -> str:
        """The daemons' own logs, for a test that fails."""
        return "".join(f"\n== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def run_slurm(folder: Path) -> Iterator[Slurm]:
    """Start a cluster with its files in `folder`, and stop all of it on leaving."""
    for name in ("state", "spool.node1", "spool.node2", "munge"):
        (folder / name).mkdir(mode=0o755)
    with make_hosts(2) as hosts:
        cpus = os.cpu_count() or 1
        lines = "\n".join(
            f"NodeName={h.name} NodeAddr={h.address} CPUs={cpus} RealMemory=1000 State=UNKNOWN" for h in hosts
        )
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, nodes=lines))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        slurm = Slurm(hosts, folder)
        subprocess.run(["mungekey", "--create", "--keyfile", str(folder / "munge" / "key")], check=True)
        munge = [f"--socket={folder}/munge.socket", f"--key-file={folder}/munge/key", f"--log-file={folder}/munge.log"]
        munge += [f"--pid-file={folder}/munge/pid", f"--seed-file={folder}/munge/seed", "--force", "--foreground"]
        hosts[0].start(["munged", *munge], folder / "munged.txt")
        wait_until((folder / "munge.socket").exists, 60, "munged")
        hosts[0].start(["slurmctld", "-D", "-c"], folder / "slurmctld.txt", slurm.environ)
        for host in hosts:
            host.start(["slurmd", "-D", "-N", host.name], folder / f"{host.name}.txt", slurm.environ)
        ready = ["sinfo", "--noheader", "--Node", "--partition=all", "--format=%T"]

        def idle() -> bool:
            output = folder / "sinfo.txt"
            output.unlink(missing_ok=True)
            code, text = hosts[0].run(ready, output, slurm.environ)
            return code == 0 and text.split() == ["idle", "idle"]

        try:
            wait_until(idle, 200, "both nodes to be idle")
        except AssertionError as error:
            raise AssertionError(f"{error}{slurm.logs()}") from None
        yield slurm
