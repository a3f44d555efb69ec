"""Check cluster/jobset.yaml and cluster/trainjob.yaml against the CRDs that a cluster has installed.

    git clone --depth 1 --branch v0.12.0 https://github.com/kubernetes-sigs/jobset
    git clone --depth 1 --branch v2.3.0 https://github.com/kubeflow/trainer
    uv run --no-project --with jsonschema --with pyyaml python tests/cluster_scripts/crds.py \
        jobset/config/components/crd/bases/*.yaml trainer/manifests/base/crds/*.yaml

`kubectl get crd jobsets.jobset.x-k8s.io -o yaml` gives those of a cluster. Fields that a CRD does not have are refused
too, which an API server would drop. Rules in CEL (x-kubernetes-validations) and of webhooks are not evaluated.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

FILES = ("jobset.yaml", "trainjob.yaml")
CLUSTER = Path(__file__).parents[2] / "cluster"


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a CRD as JSON Schema that refuses unknown fields."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    made = {name: value for name, value in schema.items() if not name.startswith("x-kubernetes")}
    if "properties" in schema:
        made["properties"] = {name: strict(value) for name, value in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            made[name] = strict(schema[name])
    return made


def problems(document: dict[str, Any], definitions: list[dict[str, Any]]) -> list[str]:
    """Return what the CRD of a document's kind refuses in it, a sentence each."""
    import jsonschema

    group, _, version = document["apiVersion"].partition("/")
    for definition in definitions:
        spec = definition["spec"]
        if (spec["group"], spec["names"]["kind"]) == (group, document["kind"]):
            served = [one for one in spec["versions"] if one["name"] == version and one["served"]]
            if not served:
                return [f"version {version} is not served"]
            schema = strict(served[0]["schema"]["openAPIV3Schema"])
            # The API server has a schema of its own for it.
            schema["properties"]["metadata"] = {"type": "object"}
            found = jsonschema.Draft202012Validator(schema).iter_errors(document)
            return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found]
    return [f"no CRD of {group}/{document['kind']} is given"]


def main(paths: list[str]) -> int:
    """Check the files against the CRDs in the files of `paths`; return the exit code."""
    definitions = [one for path in paths for one in yaml.safe_load_all(Path(path).read_text()) if one]
    definitions = [one for one in definitions if one.get("kind") == "CustomResourceDefinition"]
    failed = 0
    for name in FILES:
        for document in yaml.safe_load_all((CLUSTER / name).read_text()):
            refused = problems(document, definitions)
            failed += bool(refused)
            print(f"{name}, {document['kind']}: {'; '.join(refused) or 'valid'}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
