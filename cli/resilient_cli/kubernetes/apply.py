"""Creation, change and deletion of a run's objects in a cluster, with a dry run first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError, NotRunning
from resilient_cli.kubernetes.kubectl import ask, items
from resilient_cli.kubernetes.status import QUEUE
from resilient_cli.kubernetes.watch import find, resources
from resilient_cli.launch_checks import is_secret

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from resilient_cli.kubernetes.kubectl import Cluster

    Object = dict[str, Any]

_APPLY_COMMAND = ("apply", "--server-side", "--field-manager=resilient", "-f", "-", "-o", "json")
_GET = ("get", "-f", "-", "--ignore-not-found", "-o", "json")
# Fields that the server itself writes at each change.
_BOOKKEEPING = ("managedFields", "resourceVersion", "generation", "uid", "creationTimestamp")
_OTHER_RESOURCES = ("serviceaccounts", "services", "networkpolicies.networking.k8s.io")
_RUNTIME = "trainingruntimes.trainer.kubeflow.org"
_HIDDEN = "***"


@dataclass(frozen=True, slots=True)
class Field:
    """Changed field: its path, and its values as JSON; an empty text means no value."""

    path: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class ObjectChange:
    """Change of an object: ``created``, ``changed``, ``unchanged`` or ``deleted``."""

    kind: str
    name: str
    action: str
    fields: tuple[Field, ...] = ()

    @property
    def object(self) -> str:
        """Name of the object, as kubectl writes it."""
        return f"{self.kind.lower()}/{self.name}"


def plan(
    cluster: Cluster, run_manifests: Sequence[Object]
) -> tuple[list[ObjectChange], list[Object]]:
    """Return the changes that applying objects would make, and the objects to apply.

    The cluster computes the changes in a dry run.

    Raises:
        ConfigError: The cluster refuses an object; the message quotes the cluster.
        ClusterConflict: Another tool set a field to another value.
    """
    current_by_key = _index_by_key(_ask(cluster, run_manifests, *_GET))
    desired = [
        _keep_suspension(manifest, current_by_key.get(_key(manifest))) for manifest in run_manifests
    ]
    planned_by_key = _index_by_key(_ask(cluster, desired, *_APPLY_COMMAND, "--dry-run=server"))
    return [
        _change(current_by_key.get(key), manifest, key) for key, manifest in planned_by_key.items()
    ], desired


def carry_out(cluster: Cluster, desired: Sequence[Object]) -> None:
    """Apply objects that the dry run of :func:`plan` has accepted."""
    _ask(cluster, desired, *_APPLY_COMMAND)


def find_all(cluster: Cluster, name: str) -> list[Object]:
    """Return the objects that were applied for a run; the holder of its pods comes first.

    Raises:
        NotRunning: The cluster has no such object.
    """
    holders = resources(cluster)
    runtimes = [_RUNTIME] if any("trainer." in holder for holder in holders) else []
    run_objects = find(cluster, name, [*holders, *runtimes, *_OTHER_RESOURCES])
    top_objects = [
        manifest for manifest in run_objects if not manifest["metadata"].get("ownerReferences")
    ]
    if not top_objects:
        raise NotRunning(
            f"the cluster has no object of run `{name}`",
            hint=cluster.command_text("resilient", "k8s", "status", name),
        )
    return top_objects


def delete(cluster: Cluster, run_objects: Sequence[Object]) -> None:
    """Delete objects. Their pods get SIGTERM, save, and end within their grace period.

    An object that is already deleted is no error.
    """
    options = ("--ignore-not-found", "--wait=false", "--cascade=background", "-o", "name")
    ask(
        cluster, "delete", "-f", "-", *options, document=_join_documents(run_objects), is_json=False
    )


def _ask(cluster: Cluster, desired: Sequence[Object], *request: str) -> Any:
    try:
        return ask(cluster, *request, document=_join_documents(desired))
    except ConfigError as error:
        if "immutable" in error.message:
            hint = cluster.command_text(
                "resilient", "k8s", "delete", desired[-1]["metadata"]["name"]
            )
            message = f"{error.message}; delete the run and apply it again: checkpoints stay"
            raise ConfigError(message, hint=hint) from error
        if "no matches for kind" in error.message:
            message = f"{error.message}: its controller is not installed"
            raise ConfigError(message, hint="resilient k8s render --help") from error
        raise


def _keep_suspension(manifest: Object, before: Object | None) -> Object:
    """Keep the suspension of an object that exists, because Kueue controls it."""
    if before is None or QUEUE not in manifest["metadata"].get("labels", {}):
        return manifest
    suspend = before["spec"].get("suspend", False)
    return {**manifest, "spec": {**manifest["spec"], "suspend": suspend}}


def _join_documents(objects: Sequence[Object]) -> str:
    # A stream of documents: for a List, kubectl cannot look up whether a dry run is supported.
    return "\n---\n".join(map(json.dumps, objects))


def _key(manifest: Object) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def _index_by_key(answer: Any) -> dict[tuple[str, str], Object]:
    return {_key(manifest): manifest for manifest in items(answer)}


def _change(before: Object | None, after: Object, key: tuple[str, str]) -> ObjectChange:
    if before is None:
        return ObjectChange(*key, "created")
    fields = tuple(_differences(_without_server_fields(before), _without_server_fields(after), ""))
    return ObjectChange(*key, "changed" if fields else "unchanged", fields)


def _without_server_fields(manifest: Object) -> Object:
    fields = {name: value for name, value in manifest.items() if name != "status"}
    metadata = {
        name: value for name, value in manifest["metadata"].items() if name not in _BOOKKEEPING
    }
    return {**fields, "metadata": metadata}


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], path: str) -> Iterator[Field]:
    is_hidden = is_secret(str(before.get("name", "")), "")
    for name in sorted({*before, *after}):
        old_value, new_value = before.get(name), after.get(name)
        field_path = f"{path}.{name}" if path else name
        if old_value != new_value and name == "value" and is_hidden:
            yield Field(field_path, _HIDDEN, _HIDDEN)
        elif old_value != new_value:
            yield from _nested_differences(old_value, new_value, field_path)


def _nested_differences(before: Any, after: Any, path: str) -> Iterator[Field]:
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _differences(before, after, path)
    elif isinstance(before, list) and isinstance(after, list):
        yield from _differences(_index_entries(before, after), _index_entries(after, before), path)
    else:
        yield Field(path, _to_json_text(before), _to_json_text(after))


def _index_entries(value: Sequence[Any], other_value: Sequence[Any]) -> Mapping[str, Any]:
    """Return a list as a mapping, by entry name if all entries have names, else by position."""
    have_names = all(isinstance(item, dict) and "name" in item for item in (*value, *other_value))
    return {item["name"] if have_names else str(nth): item for nth, item in enumerate(value)}


def _to_json_text(value: Any) -> str:
    if isinstance(value, dict) and is_secret(str(value.get("name", "")), str(value.get("value"))):
        return json.dumps({**value, "value": _HIDDEN})
    return "" if value is None else json.dumps(value)
