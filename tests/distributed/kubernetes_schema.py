"""Manifests against the models of Kubernetes' own Python client, with no unknown field."""

from __future__ import annotations

import re
from typing import Any

import kubernetes.client as models

KINDS = {
    ("apps/v1", "Deployment"): models.V1Deployment,
    ("apps/v1", "StatefulSet"): models.V1StatefulSet,
    ("v1", "PersistentVolumeClaim"): models.V1PersistentVolumeClaim,
    ("v1", "Secret"): models.V1Secret,
    ("v1", "Service"): models.V1Service,
}
PRIMITIVES = {"str": str, "int": int, "bool": bool, "object": object}


def check(manifest: dict[str, Any]) -> None:
    """Raises AssertionError for a field that the kind does not have, or of another type, and
    ValueError for one that is missing."""
    built(KINDS[manifest["apiVersion"], manifest["kind"]].__name__, manifest, manifest["kind"])


def built(kind: str, value: Any, where: str) -> Any:
    """An object of a type as versions of the client write it: V1Pod, List[V1Container],
    dict(str, str)."""
    if each := re.fullmatch(r"[Ll]ist\[(.*)\]", kind):
        assert isinstance(value, list), where
        return [built(each[1], item, f"{where}[{n}]") for n, item in enumerate(value)]
    if each := re.fullmatch(r"[Dd]ict[(\[]str, (.*)[)\]]", kind):
        assert isinstance(value, dict), where
        if re.search(r"\.(limits|requests)$", where):  # Quantities, which may be numbers.
            value = {name: str(item) for name, item in value.items()}
        return {name: built(each[1], item, f"{where}.{name}") for name, item in value.items()}
    if kind in PRIMITIVES:
        assert isinstance(value, PRIMITIVES[kind]), f"{where} is {value!r}"
        return value
    model = getattr(models, kind)
    assert isinstance(value, dict), where
    names = {there: here for here, there in model.attribute_map.items()}
    assert value.keys() <= names.keys(), f"{where} has {value.keys() - names.keys()}"
    fields = {
        names[name]: built(model.openapi_types[names[name]], item, f"{where}.{name}")
        for name, item in value.items()
    }
    return model(**fields)
