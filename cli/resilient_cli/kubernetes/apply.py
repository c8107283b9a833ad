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

_APPLY = ("apply", "--server-side", "--field-manager=resilient", "-f", "-", "-o", "json")
_GET = ("get", "-f", "-", "--ignore-not-found", "-o", "json")
# Fields that the server itself writes at each change.
_BOOKKEEPING = ("managedFields", "resourceVersion", "generation", "uid", "creationTimestamp")
_OWN = ("serviceaccounts", "services", "networkpolicies.networking.k8s.io")
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


def plan(cluster: Cluster, made: Sequence[Object]) -> tuple[list[ObjectChange], list[Object]]:
    """Return the changes that applying objects would make, and the objects to apply.

    The cluster finds out with a dry run.

    Raises:
        ConfigError: The cluster refuses an object; the message quotes the cluster.
        ClusterConflict: Another tool set a field to another value.
    """
    before = _by_name(_ask(cluster, made, *_GET))
    wanted = [_as_queued(one, before.get(_key(one))) for one in made]
    after = _by_name(_ask(cluster, wanted, *_APPLY, "--dry-run=server"))
    return [_change(before.get(key), one, key) for key, one in after.items()], wanted


def carry_out(cluster: Cluster, wanted: Sequence[Object]) -> None:
    """Apply objects that the dry run of :func:`plan` has accepted."""
    _ask(cluster, wanted, *_APPLY)


def find_all(cluster: Cluster, name: str) -> list[Object]:
    """Return the objects that were applied for a run; the holder of its pods comes first.

    Raises:
        NotRunning: The cluster has no such object.
    """
    holders = resources(cluster)
    runtimes = [_RUNTIME] if any("trainer." in one for one in holders) else []
    found = find(cluster, name, [*holders, *runtimes, *_OWN])
    own = [one for one in found if not one["metadata"].get("ownerReferences")]
    if not own:
        raise NotRunning(
            f"the cluster has no object of run `{name}`",
            hint=cluster.spell("resilient", "k8s", "status", name),
        )
    return own


def delete(cluster: Cluster, found: Sequence[Object]) -> None:
    """Delete objects. Their pods get SIGTERM, save, and end within their grace period.

    An object that is already deleted is no error.
    """
    options = ("--ignore-not-found", "--wait=false", "--cascade=background", "-o", "name")
    ask(cluster, "delete", "-f", "-", *options, given=_listed(found), is_json=False)


def _ask(cluster: Cluster, wanted: Sequence[Object], *asked: str) -> Any:
    try:
        return ask(cluster, *asked, given=_listed(wanted))
    except ConfigError as error:
        if "immutable" in error.message:
            hint = cluster.spell("resilient", "k8s", "delete", wanted[-1]["metadata"]["name"])
            said = f"{error.message}; delete the run and apply it again: checkpoints stay"
            raise ConfigError(said, hint=hint) from error
        if "no matches for kind" in error.message:
            said = f"{error.message}: its controller is not installed"
            raise ConfigError(said, hint="resilient k8s render --help") from error
        raise


def _as_queued(made: Object, before: Object | None) -> Object:
    """Keep the suspension of an object that exists, because Kueue controls it."""
    if before is None or QUEUE not in made["metadata"].get("labels", {}):
        return made
    suspend = before["spec"].get("suspend", False)
    return {**made, "spec": {**made["spec"], "suspend": suspend}}


def _listed(made: Sequence[Object]) -> str:
    # A stream of documents: for a List, kubectl cannot look up whether a dry run is supported.
    return "\n---\n".join(map(json.dumps, made))


def _key(made: Object) -> tuple[str, str]:
    return made["kind"], made["metadata"]["name"]


def _by_name(answer: Any) -> dict[tuple[str, str], Object]:
    return {_key(one): one for one in items(answer)}


def _change(before: Object | None, after: Object, key: tuple[str, str]) -> ObjectChange:
    if before is None:
        return ObjectChange(*key, "created")
    fields = tuple(_differences(_bare(before), _bare(after), ""))
    return ObjectChange(*key, "changed" if fields else "unchanged", fields)


def _bare(made: Object) -> Object:
    kept = {name: one for name, one in made.items() if name != "status"}
    metadata = {name: one for name, one in made["metadata"].items() if name not in _BOOKKEEPING}
    return {**kept, "metadata": metadata}


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], path: str) -> Iterator[Field]:
    is_hidden = is_secret(str(before.get("name", "")), "")
    for name in sorted({*before, *after}):
        one, other = before.get(name), after.get(name)
        below = f"{path}.{name}" if path else name
        if one != other and name == "value" and is_hidden:
            yield Field(below, _HIDDEN, _HIDDEN)
        elif one != other:
            yield from _deeper(one, other, below)


def _deeper(before: Any, after: Any, path: str) -> Iterator[Field]:
    if isinstance(before, dict) and isinstance(after, dict):
        yield from _differences(before, after, path)
    elif isinstance(before, list) and isinstance(after, list):
        yield from _differences(_numbered(before, after), _numbered(after, before), path)
    else:
        yield Field(path, _spelled(before), _spelled(after))


def _numbered(value: Sequence[Any], other: Sequence[Any]) -> Mapping[str, Any]:
    """Return a list as a mapping: by the names of its entries if all have one, else by position."""
    named = all(isinstance(one, dict) and "name" in one for one in (*value, *other))
    return {one["name"] if named else str(nth): one for nth, one in enumerate(value)}


def _spelled(value: Any) -> str:
    if isinstance(value, dict) and is_secret(str(value.get("name", "")), str(value.get("value"))):
        return json.dumps({**value, "value": _HIDDEN})
    return "" if value is None else json.dumps(value)
