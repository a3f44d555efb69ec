"""The commands of the files for SkyPilot, dstack and Kubernetes train on two hosts, with their platforms' variables.

The platforms themselves are not here: tests/cluster_scripts/platforms.py sets what they set.
"""

from __future__ import annotations

import pytest

from tests.cluster.hosts import wait_for_all
from tests.cluster.jobs import RUN_SECONDS, difference, losses, outputs, train_loss
from tests.cluster.test_nodes import LOSS_TOLERANCE, TOLERANCE
from tests.cluster_scripts.platforms import NAMES, RUN_NAMES, node_command

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]
# The others differ from these in the names of their variables alone.
QUICK = ("trainjob.yaml",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_the_command_of_the_platform_trains_on_two_nodes(two_hosts, one_host, job, tmp_path, name):
    processes = []
    for rank, host in enumerate(two_hosts):
        # The last one given wins over the volume, which is not here.
        training = [*job.words, "--no_preflight", "--output_dir", str(tmp_path / "volume")]
        started = node_command(name, [one.address for one in two_hosts], rank, 1, training)
        processes.append(host.start(started.command, tmp_path / f"{host.name}.txt", started.environ))
    codes = wait_for_all(processes, RUN_SECONDS)
    texts = outputs(two_hosts, tmp_path)
    assert codes == [0, 0], "\n".join(texts)
    assert "2 on 2 nodes" in texts[0] and not losses(texts[1])
    run = tmp_path / "volume" / RUN_NAMES[name]
    assert difference(run, one_host[0]) < TOLERANCE
    assert train_loss(run) == pytest.approx(train_loss(one_host[0]), rel=LOSS_TOLERANCE)
