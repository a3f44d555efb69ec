"""The files for SkyPilot, dstack and Kubernetes: what they start with the variables that their platforms set.

Launchers are stand-ins; tests/cluster/test_platforms.py trains with the same commands on two hosts.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster_scripts.crds import problems
from tests.cluster_scripts.platforms import NAMES, RUN_NAMES, Started, container_of, node_command, read
from tests.cluster_scripts.schemas import difference
from tests.cluster_scripts.stand_ins import Workplace
from tests.cluster_scripts.test_node_sh import NVIDIA_SMI
from tests.conftest import REPO

ADDRESSES = ["10.9.8.7", "10.9.8.8"]
PORTS = dict.fromkeys(NAMES, "6001") | {"trainjob.yaml": "29500"}
every_file = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def place(tmp_path):
    """Imitate a machine with 8 GPUs for the commands."""
    made = Workplace(tmp_path)
    made.tool("nvidia-smi", NVIDIA_SMI)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    return made


def start(place: Workplace, started: Started, **variables: str) -> subprocess.Popen[str]:
    """Start a platform's command in the kit's folder, with nothing in its environment but what the platform sets."""
    environ = {
        "PATH": f"{place.folder / 'tools'}:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(place.folder),
        "TMPDIR": str(place.folder),
        "CALLS": str(place.calls_file),
        "GPUS": "8",
    }
    return subprocess.Popen(
        started.command,
        cwd=REPO,
        env=environ | started.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@every_file
def test_a_person_edits_three_places(name):
    text = (REPO / "cluster" / name).read_text()
    assert re.findall(r"^ *# ([0-9])\. ", text, re.MULTILINE) == ["1", "2", "3"]
    assert text.count("\n") < 100


@every_file
def test_the_variables_of_the_platform_become_those_of_node_sh(place, name):
    training = ["-d", str(place.folder / "rows.jsonl"), "--no_preflight", "--trainer_args", '{"a": "b c"}']
    process = start(
        place,
        node_command(name, ADDRESSES, 1, 8, training),
        SCRIPT='echo "$UNSLOTH_DDP_SECRET, ${PET_NNODES-none}" >>"$CALLS"; printf "<%s>" "$@" >>"$CALLS"',
    )
    text, _ = process.communicate(timeout=200)
    assert process.returncode == 0, text
    launch, secret, words = place.calls()
    assert (
        "--num_machines 2 --num_processes 16 --machine_rank 1 --main_process_ip 10.9.8.7 --main_process_port "
        f"{PORTS[name]} " in launch
    )
    assert secret == "told to nobody, none"
    assert '<--trainer_args><{"a": "b c"}>' in words
    assert "--output_dir><" in words.replace("=", "><") and "/checkpoints" in words
    assert f"<--run_name><{RUN_NAMES[name]}>" in words


@pytest.mark.parametrize(("name", "code"), [("skypilot.yaml", 75), ("jobset.yaml", 2), ("trainjob.yaml", 75)])
def test_the_platform_sees_the_exit_code_of_the_training(place, name, code):
    started = node_command(name, ADDRESSES, 0, 8, ["--no_preflight", "--cpu"])
    process = start(place, started, SCRIPT=f'echo {code} >"$UNSLOTH_DDP_EXIT_CODE_FILE"; exit 1')
    process.communicate(timeout=200)
    assert process.returncode == code


def test_dstack_begins_again_after_a_stop_with_a_checkpoint(place):
    script = 'c=75; [[ ! -e $CALLS.2 ]] || c=2; touch "$CALLS.2"; echo $c >"$UNSLOTH_DDP_EXIT_CODE_FILE"; exit $c'
    process = start(place, node_command("dstack.yml", ADDRESSES, 0, 8, ["--no_preflight", "--cpu"]), SCRIPT=script)
    process.communicate(timeout=200)
    assert process.returncode == 2
    assert len(place.calls()) == 2


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_a_pod_that_is_ended_writes_a_checkpoint(place, name):
    """The kubelet sends SIGTERM to the first process of the container alone."""
    started = node_command(name, ADDRESSES, 0, 8, ["--no_preflight", "--cpu"])
    process = start(place, started, SCRIPT='echo ready >>"$CALLS"; while :; do sleep 0.05; done')
    place.wait_for("ready")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=200)
    assert process.returncode == 75
    assert place.calls().count("got TERM") == 1


def test_only_a_stop_with_a_checkpoint_and_failures_are_tried_again():
    (task,) = read("skypilot.yaml")
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75]}
    (jobset,), (runtime, _) = read("jobset.yaml"), read("trainjob.yaml")
    for spec in (jobset["spec"], runtime["spec"]["template"]["spec"]):
        job = spec["replicatedJobs"][0]["template"]["spec"]
        rules = [(rule["action"], rule["onExitCodes"]["values"]) for rule in job["podFailurePolicy"]["rules"]]
        assert rules == [("Ignore", [75]), ("FailJob", [2])]
        # Kubernetes refuses a podFailurePolicy with another restartPolicy.
        assert job["template"]["spec"]["restartPolicy"] == "Never" and job["backoffLimit"] == 0
        assert spec["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]


def test_both_kubernetes_files_have_the_same_pod():
    (jobset,), (runtime, _) = read("jobset.yaml"), read("trainjob.yaml")
    pods = [
        spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        for spec in (jobset["spec"], runtime["spec"]["template"]["spec"])
    ]
    assert {k: v for k, v in pods[0].items() if k != "containers"} == {
        k: v for k, v in pods[1].items() if k != "containers"
    }
    one, other = (container_of(s) for s in (jobset["spec"], runtime["spec"]["template"]["spec"]))
    assert one["volumeMounts"] == other["volumeMounts"] and one["image"] == other["image"]
    assert all(entry in one["env"] for entry in other["env"])


PACKAGES = {
    "skypilot.yaml": "skypilot==0.14.1",
    "dstack.yml": "dstack==0.22.5",
    "jobset.yaml": "kubeflow-trainer-api==2.3.0",
    "trainjob.yaml": "kubeflow-trainer-api==2.3.0",
}


@pytest.mark.slow
@every_file
def test_the_platforms_own_package_reads_the_file(name, tmp_path):
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed, which brings the platform's package")
    with_package = [uv, "run", "--no-project", "--python", sys.executable, "--with", PACKAGES[name], "--with", "pyyaml"]
    brought = subprocess.run([*with_package, "python", "-c", ""], capture_output=True, text=True, cwd=tmp_path)
    if brought.returncode:
        pytest.skip(f"{PACKAGES[name]} cannot be had here: {brought.stderr.strip()[-200:]}")
    schemas = Path(__file__).with_name("schemas.py")

    def read_with_package(path: Path) -> subprocess.CompletedProcess[str]:
        environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        command = [*with_package, "--offline", "python", str(schemas), str(path)]
        cache = subprocess.run([uv, "cache", "dir"], capture_output=True, text=True).stdout.strip()
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env=environ | {"UV_CACHE_DIR": cache}
        )

    found = read_with_package(REPO / "cluster" / name)
    assert found.stdout == f"{name} is valid\n", found.stderr
    # The check can fail.
    broken = tmp_path / name
    broken.write_text((REPO / "cluster" / name).read_text().replace("resources", "resource"))
    assert read_with_package(broken).returncode != 0


# The part of a CRD that the test needs.
CRD = {
    "spec": {
        "group": "example.com",
        "names": {"kind": "Job"},
        "versions": [
            {"name": "v1", "served": False},
            {
                "name": "v2",
                "served": True,
                "schema": {
                    "openAPIV3Schema": {
                        "properties": {
                            **{name: {"type": "string"} for name in ("apiVersion", "kind")},
                            "metadata": {"type": "object"},
                            "spec": {
                                "required": ["nodes"],
                                "properties": {
                                    "nodes": {"type": "integer"},
                                    "action": {"enum": ["Fail"]},
                                    "port": {"x-kubernetes-int-or-string": True},
                                    "free": {"x-kubernetes-preserve-unknown-fields": True, "properties": {}},
                                    "labels": {"additionalProperties": {"type": "string"}},
                                },
                            },
                        }
                    }
                },
            },
        ],
    }
}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"nodes": 1, "action": "Fail", "port": "http", "free": {"any": 1}, "labels": {"a": "b"}}, ""),
        ({"node": 1}, "'node' was unexpected"),
        ({}, "'nodes' is a required property"),
        ({"nodes": "2"}, "spec.nodes: '2' is not of type 'integer'"),
        ({"nodes": 2, "action": "Stop"}, "spec.action: 'Stop' is not one of ['Fail']"),
        ({"nodes": 2, "port": []}, "spec.port: "),
        ({"nodes": 2, "labels": {"a": 1}}, "spec.labels.a: 1 is not of type 'string'"),
    ],
)
def test_what_a_crd_refuses_is_named(spec, said):
    document = {"apiVersion": "example.com/v2", "kind": "Job", "metadata": {"name": "n", "labels": {}}, "spec": spec}
    found = "; ".join(problems(document, [CRD]))
    assert said in found if said else not found


def test_a_version_that_is_not_served_and_a_kind_without_crd_are_named():
    assert problems({"apiVersion": "example.com/v1", "kind": "Job"}, [CRD]) == ["version v1 is not served"]
    assert problems({"apiVersion": "v1", "kind": "Pod"}, [CRD]) == ["no CRD of v1/Pod is given"]


def test_a_field_that_an_api_does_not_keep_is_named():
    assert difference({"a": [{"b": 8, "c": 1}]}, {"a": [{"b": 8.0}]}) == [".a[0].c"]
