"""Let the nodes of a job meet: the port, the store, who is believed there, and the token in a shared folder."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading

import pytest

from tests.conftest import REPO
from tests.ranks import free_port
from unsloth_ddp.preflight.between import rendezvous
from unsloth_ddp.preflight.job import read_process_info
from unsloth_ddp.preflight.node import disks


def test_places_with_and_without_a_launcher():
    alone = read_process_info({"NNODES": "3", "NODE_RANK": "2", "MASTER_ADDR": "m"})
    assert (alone.ranks.rank, alone.ranks.world_size, alone.ranks.local_rank, alone.port) == (2, 3, 0, 6001)
    assert not alone.launched and alone.ranks.is_local_main
    environ = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": "7"}
    worker = read_process_info(environ)
    assert (worker.ranks.nodes, worker.ranks.node_rank, worker.port) == (2, 1, 7)
    assert worker.launched and not worker.ranks.is_local_main


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
    assert "name" in rendezvous.wait_for_port("no-such-host.invalid", 1, 0.3)
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
        with pytest.raises(rendezvous.RendezvousError, match="is not JSON"):
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
from unsloth_ddp.preflight import __main__
from unsloth_ddp.preflight.between import rendezvous
from unsloth_ddp.preflight.job import read_process_info
from unsloth_ddp.preflight.checks import run_or_none, run_with_limit

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
        done = subprocess.run(command, cwd=REPO, env=os.environ | environ, capture_output=True, text=True, timeout=200)
        server.shutdown(socket.SHUT_RDWR)
    assert done.stderr == ""
    told = re.fullmatch(
        rf"Node 0 did not answer at 127.0.0.1:{port} within (\d+) s: another program listens there: .*\n", done.stdout
    )
    assert told and 1 <= int(told[1]) <= 12, done.stdout


def test_the_token_is_found_in_a_shared_folder_only(tmp_path, monkeypatch):
    monkeypatch.setattr(disks, "TOKEN_SECONDS", 0.1)
    (tmp_path / "other").mkdir()
    left = disks.write_token(tmp_path)
    assert left is not None
    assert disks.find_token(tmp_path, left[0].name, left[1]) is True
    assert disks.find_token(tmp_path / "other", left[0].name, left[1]) is False
    assert disks.find_token(tmp_path, ".preflight-token-another", left[1]) is False
    # What is not there yet is made where it will be shared or not.
    left = disks.write_token(tmp_path / "no" / "such")
    assert left is not None and disks.find_token(tmp_path / "no" / "such", left[0].name, left[1]) is True
    assert disks.find_token(tmp_path / "no" / "other", left[0].name, left[1]) is False
    (tmp_path / "file").write_text("")
    assert disks.write_token(tmp_path / "file" / "folder") is None
