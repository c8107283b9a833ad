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
    found = [f"{_path(one)}: {one.message[:200]}" for one in strict.iter_errors(document)]
    if scope == "Cluster" and "namespace" in document.get("metadata", {}):
        found.append("metadata.namespace: it is of the whole cluster")
    return found + list(_check_lists(schema, document, ""))


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
    found = {}
    for path in SCHEMAS.glob("*.json"):
        crd = json.loads(path.read_text())
        for version, schema in crd["versions"].items():
            validator = jsonschema.Draft7Validator(_strict(schema, is_root=True))
            key = (f"{crd['group']}/{version}", crd["kind"])
            found[key] = (validator, crd["scope"], schema)
    return found


def _strict(schema, *, is_root=False):
    """Return the JSON schema that a structural one of Kubernetes stands for, without pruning."""
    if schema.get("x-kubernetes-int-or-string"):
        text = {"type": "string", **{k: schema[k] for k in ("pattern",) if k in schema}}
        return {"anyOf": [{"type": "integer"}, text]}
    made = _combined(schema)
    if "type" in schema:
        made["type"] = [schema["type"], "null"] if schema.get("nullable") else schema["type"]
    if "items" in schema:
        made["items"] = _strict(schema["items"])
    return made | _members(schema, is_root=is_root)


def _members(schema, *, is_root):
    known = {name: _strict(one) for name, one in schema.get("properties", {}).items()}
    if is_root or schema.get("x-kubernetes-embedded-resource"):
        known = {"apiVersion": {}, "kind": {}, **known, "metadata": _METADATA}
    made = {"properties": known} if known else {}
    more = schema.get("additionalProperties")
    if isinstance(more, dict):
        made["additionalProperties"] = _strict(more)
    elif known and not more and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    return made


def _combined(schema):
    made = {key: schema[key] for key in _KEPT if key in schema}
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            made[key] = [_part(one) for one in schema[key]]
    if "not" in schema:
        made["not"] = _part(schema["not"])
    return made


def _part(schema):
    """Return a part of a schema that is combined with others, and closes nothing."""
    made = {key: schema[key] for key in (*_KEPT, "type") if key in schema}
    if "properties" in schema:
        made["properties"] = {name: _part(one) for name, one in schema["properties"].items()}
    return made


def _check_lists(schema, value, path):
    """Yield entries of a list that have the key of another one."""
    if isinstance(value, dict):
        for name, one in value.items():
            more = schema.get("additionalProperties")
            below = schema.get("properties", {}).get(name, more if isinstance(more, dict) else None)
            if below:
                yield from _check_lists(below, one, f"{path}.{name}")
    elif isinstance(value, list) and "items" in schema:
        keys = schema.get("x-kubernetes-list-map-keys", ())
        seen = [[one.get(key) for key in keys] for one in value if keys]
        if any(seen.count(one) > 1 for one in seen):
            yield f"{path}: two entries with one key"
        for number, one in enumerate(value):
            yield from _check_lists(schema["items"], one, f"{path}[{number}]")
