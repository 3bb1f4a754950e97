"""The Kubernetes manifests of new projects, against the fields that the API has for a Job and KubeRay for a RayJob."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from outrider.scaffold.project import TEMPLATES, create_project

NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
TEXTS = {"type": "array", "items": {"type": "string"}}
QUANTITY = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^\d+(\.\d+)?(m|Ki|Mi|Gi|Ti)?$"}]}


def fields(required: str = "", **known: Any) -> dict[str, Any]:
    """An object with these fields and no other."""
    return {"type": "object", "properties": known, "required": required.split(), "additionalProperties": False}


CONTAINER = fields(
    "name image",
    name=NAME,
    image={"type": "string", "pattern": "^[a-z0-9._/-]+:[A-Za-z0-9._-]+$"},
    command=TEXTS,
    args=TEXTS,
    resources=fields(limits={"type": "object", "additionalProperties": QUANTITY}),
    volumeMounts={"type": "array", "items": fields("name mountPath", name=NAME, mountPath={"type": "string"})},
)
VOLUME = fields(
    "name",
    name=NAME,
    emptyDir=fields(medium={"enum": ["Memory"]}, sizeLimit=QUANTITY),
    persistentVolumeClaim=fields("claimName", claimName=NAME),
)
POD = fields(
    "containers",
    restartPolicy={"enum": ["Never", "OnFailure"]},
    containers={"type": "array", "minItems": 1, "items": CONTAINER},
    volumes={"type": "array", "items": VOLUME},
)
COUNT = {"type": "integer", "minimum": 0}
JOB = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "batch/v1"},
    kind={"const": "Job"},
    metadata=fields("name", name=NAME),
    spec=fields("template", backoffLimit=COUNT, template=fields("spec", spec={**POD, "required": ["restartPolicy"]})),
)
GROUP = {"rayStartParams": {"type": "object"}, "template": fields("spec", spec=POD)}
RAY_JOB = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=fields("name", name=NAME),
    spec=fields(
        "entrypoint rayClusterSpec",
        entrypoint={"type": "string"},
        shutdownAfterJobFinishes={"type": "boolean"},
        backoffLimit=COUNT,
        rayClusterSpec=fields(
            "headGroupSpec",
            headGroupSpec=fields("template", **GROUP),
            workerGroupSpecs={
                "type": "array",
                "items": fields(
                    "groupName template",
                    groupName=NAME,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    **GROUP,
                ),
            },
        ),
    ),
)


def pods(node: Any) -> list[dict[str, Any]]:
    """All pod specs inside a manifest."""
    if isinstance(node, list):
        return [pod for item in node for pod in pods(item)]
    if not isinstance(node, dict):
        return []
    return [node] if "containers" in node else [pod for value in node.values() for pod in pods(value)]


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_manifest_has_only_fields_that_kubernetes_knows(template: str, tmp_path: Path) -> None:
    project = create_project("My_Project", parent=tmp_path, template=template)
    manifest = yaml.safe_load((project / "jobs" / "kubernetes.yaml").read_text())
    jsonschema.validate(manifest, RAY_JOB if template == "ray" else JOB)


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_mounted_volume_is_declared(template: str, tmp_path: Path) -> None:
    project = create_project("stripes", parent=tmp_path, template=template)
    found = pods(yaml.safe_load((project / "jobs" / "kubernetes.yaml").read_text()))
    assert found
    for pod in found:
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
