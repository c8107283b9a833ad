"""Manifests against the schemas of Kubernetes and of custom resources, strictly."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jsonschema
import kubernetes_validate

SCHEMAS = Path(__file__).resolve().parents[1] / "k8s" / "schemas"
VERSIONS = ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")
_KEPT = (
    *("enum", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("required", "multipleOf", "uniqueItems"),
)
_METADATA = {"type": "object"}


def check_schema(document, version=VERSIONS[-1]):
    """Return what a schema says against a manifest, one line each; core kinds in one version."""
    custom = _custom().get((document.get("apiVersion"), document.get("kind")))
    if custom is None:
        return _check_core(json.dumps(document, sort_keys=True), version)
    strict, scope, schema = custom
    problems = [f"{_path(error)}: {error.message[:200]}" for error in strict.iter_errors(document)]
    if scope == "Cluster" and "namespace" in document.get("metadata", {}):
        problems.append("metadata.namespace: it is of the whole cluster")
    return problems + list(_check_lists(schema, document, ""))


@cache
def _check_core(document, version):
    try:
        kubernetes_validate.validate(json.loads(document), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{_path(error)}: {error.message[:200]}"]
    except kubernetes_validate.SchemaNotFoundError as error:
        return [error.message]
    return []


def _path(error):
    return ".".join(map(str, error.absolute_path))


@cache
def _custom():
    schemas = {}
    for path in SCHEMAS.glob("*.json"):
        crd = json.loads(path.read_text())
        for version, schema in crd["versions"].items():
            validator = jsonschema.Draft7Validator(_strict(schema, is_root=True))
            key = (f"{crd['group']}/{version}", crd["kind"])
            schemas[key] = (validator, crd["scope"], schema)
    return schemas


def _strict(schema, *, is_root=False):
    """Return the JSON schema that a structural one of Kubernetes stands for, without pruning."""
    if schema.get("x-kubernetes-int-or-string"):
        text = {"type": "string", **{k: schema[k] for k in ("pattern",) if k in schema}}
        return {"anyOf": [{"type": "integer"}, text]}
    strict_schema = _combine(schema)
    if "type" in schema:
        strict_schema["type"] = (
            [schema["type"], "null"] if schema.get("nullable") else schema["type"]
        )
    if "items" in schema:
        strict_schema["items"] = _strict(schema["items"])
    return strict_schema | _members(schema, is_root=is_root)


def _members(schema, *, is_root):
    properties = {name: _strict(child) for name, child in schema.get("properties", {}).items()}
    if is_root or schema.get("x-kubernetes-embedded-resource"):
        properties = {"apiVersion": {}, "kind": {}, **properties, "metadata": _METADATA}
    members = {"properties": properties} if properties else {}
    more = schema.get("additionalProperties")
    if isinstance(more, dict):
        members["additionalProperties"] = _strict(more)
    elif properties and not more and not schema.get("x-kubernetes-preserve-unknown-fields"):
        members["additionalProperties"] = False
    return members


def _combine(schema):
    combined = {key: schema[key] for key in _KEPT if key in schema}
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            combined[key] = [_part(alternative) for alternative in schema[key]]
    if "not" in schema:
        combined["not"] = _part(schema["not"])
    return combined


def _part(schema):
    """Return a part of a schema that is combined with others, and closes nothing."""
    part = {key: schema[key] for key in (*_KEPT, "type") if key in schema}
    if "properties" in schema:
        part["properties"] = {name: _part(child) for name, child in schema["properties"].items()}
    return part


def _check_lists(schema, value, path):
    """Yield entries of a list that have the key of another one."""
    if isinstance(value, dict):
        for name, child in value.items():
            more = schema.get("additionalProperties")
            below = schema.get("properties", {}).get(name, more if isinstance(more, dict) else None)
            if below:
                yield from _check_lists(below, child, f"{path}.{name}")
    elif isinstance(value, list) and "items" in schema:
        keys = schema.get("x-kubernetes-list-map-keys", ())
        keys_of_items = [[child.get(key) for key in keys] for child in value if keys]
        if any(keys_of_items.count(child) > 1 for child in keys_of_items):
            yield f"{path}: two entries with one key"
        for number, child in enumerate(value):
            yield from _check_lists(schema["items"], child, f"{path}[{number}]")
