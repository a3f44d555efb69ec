"""Read a file of cluster/ with the classes of its own platform; run by test_platform_files.py beside their package.

    uv run --no-project --with skypilot python tests/cluster_scripts/schemas.py cluster/skypilot.yaml

A field that the platform does not know, or a value that it refuses, ends this with an exception.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml


def read_as_skypilot(documents: list[dict[str, Any]]) -> None:
    """Make the task, as `sky jobs launch` does first."""
    from sky.task import Task

    task = Task.from_yaml_config(documents[0], secrets_overrides=[("UNSLOTH_DDP_SECRET", "some")])
    (resources,) = task.resources
    assert resources.job_recovery["recover_on_exit_codes"] == [75], resources.job_recovery
    assert task.num_nodes == 2 and list(task.volumes) == ["/checkpoints"], task


def read_as_dstack(documents: list[dict[str, Any]]) -> None:
    """Make the configuration, as `dstack apply` does first."""
    from dstack._internal.core.models.configurations import TaskConfiguration, parse_apply_configuration

    task = parse_apply_configuration(documents[0])
    assert isinstance(task, TaskConfiguration) and task.nodes == 2, task


def read_as_kubernetes(documents: list[dict[str, Any]]) -> None:
    """Make the objects of JobSet's and Kubeflow Trainer's API and write them again: an unknown field would be gone."""
    import kubeflow_trainer_api.models as models

    kinds = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }
    for document in documents:
        again = kinds[document["kind"]].from_dict(document).to_dict()
        lost = difference(document, again)
        assert not lost, f"{document['kind']} has no field {', '.join(lost)}"


def difference(given: Any, kept: Any, where: str = "") -> list[str]:
    """Return the paths of what `given` has and `kept` has not."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [path for key in given for path in difference(given[key], kept.get(key), f"{where}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [path for i, (ours, theirs) in pairs for path in difference(ours, theirs, f"{where}[{i}]")]
    return [] if given == kept else [where]


READERS = {
    "skypilot.yaml": read_as_skypilot,
    "dstack.yml": read_as_dstack,
    "jobset.yaml": read_as_kubernetes,
    "trainjob.yaml": read_as_kubernetes,
}

if __name__ == "__main__":
    path = Path(sys.argv[1])
    READERS[path.name](list(yaml.safe_load_all(path.read_text())))
    print(f"{path.name} is valid")
