"""A real sshd on every host, with keys and configuration of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.cluster.hosts import Host, clean_environment
from tests.waiting import wait_until

SERVER = """\
ListenAddress {address}:22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile {folder}/{name}.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
SetEnv {environ}
"""
CLIENT = """\
Host *
  User root
  IdentityFile {folder}/user_key
  StrictHostKeyChecking no
  UserKnownHostsFile {folder}/known_hosts
  LogLevel ERROR
"""


def missing_sshd() -> str | None:
    """What keeps this machine from running sshd, for a skip; None where it can."""
    for tool, package in (("sshd", "openssh-server"), ("ssh", "openssh-client"), ("ssh-keygen", "openssh-client")):
        if shutil.which(tool, path=f"/usr/sbin:{os.environ['PATH']}") is None:
            return f"{tool} is missing (Debian's package {package})"
    return None


def start_sshd(hosts: list[Host], folder: Path) -> str:
    """Start sshd on every host; returns the ssh options that reach them."""
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "client").write_text(CLIENT.format(folder=folder))
    # What a user's own shell start-up files would set on the host.
    wanted = ("PATH", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "UV_OFFLINE", "PYTHONUNBUFFERED", "UV_CACHE_DIR")
    environ = " ".join(f"{name}={value}" for name, value in clean_environment().items() if name in wanted)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for host in hosts:
        config = folder / f"{host.name}.conf"
        config.write_text(SERVER.format(address=host.address, folder=folder, name=host.name, environ=environ))
        host.start(
            [shutil.which("sshd", path="/usr/sbin:/usr/bin") or "sshd", "-D", "-e", "-f", str(config)],
            folder / f"{host.name}.txt",
        )
        wait_until((folder / f"{host.name}.pid").exists, 60, f"sshd on {host.name}")
    return f"-F {folder}/client"
