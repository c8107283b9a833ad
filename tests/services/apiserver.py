"""A small API server of Kubernetes, for the real kubectl: HTTPS on loopback, objects in memory.

It has discovery, GET, LIST with selectors, server-side apply (dry runs too), DELETE and the logs of
pods, for the kinds of a run. It is no cluster: no controller, no scheduler; a test plays them by
:meth:`ApiServer.put`. Of server-side apply it has owners of fields, conflicts, strict validation
and the immutable template of a Job; a list is one field to it. There is no WATCH: nothing asks.
"""

from __future__ import annotations

import json
import ssl
import threading
import uuid
from copy import deepcopy
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from tests.services.apirequests import TOKEN, Handler, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.services.tls import Certificate

    Object = dict[str, Any]

CORE = {
    "v1": {
        "pods": "Pod",
        "services": "Service",
        "serviceaccounts": "ServiceAccount",
        "events": "Event",
    },
    "batch/v1": {"jobs": "Job"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
}
CUSTOM = {
    "jobset.x-k8s.io/v1alpha2": {"jobsets": "JobSet"},
    "trainer.kubeflow.org/v1alpha1": {
        "trainjobs": "TrainJob",
        "trainingruntimes": "TrainingRuntime",
    },
    "kubeflow.org/v1": {"pytorchjobs": "PyTorchJob"},
    "kueue.x-k8s.io/v1beta2": {"workloads": "Workload"},
}


@dataclass
class Fault:
    """What the next requests of a path get; a code of 0 cuts the connection."""

    code: int
    path: str
    left: int
    message: str = "made by a test"


@dataclass
class ApiServer:
    """Objects by resource, namespace and name, and who may see them.

    Attributes:
        check: returns what is wrong with a manifest that is applied.
        certificate: of the server.
        served: the kinds of each group's version.
        faults: of the requests to come.
        logs: lines by pod, and by pod and ``previous``.
        seen: method and path of all requests.
        cuts: how often the streams of logs were cut; one more cuts those that are open.
    """

    check: Callable[[Object], list[str]]
    certificate: Certificate
    served: dict[str, dict[str, str]] = field(default_factory=lambda: {**CORE, **CUSTOM})
    faults: list[Fault] = field(default_factory=list)
    logs: dict[tuple[str, bool], list[str]] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    cuts: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        """Start with nothing in it."""
        self._lock = threading.RLock()
        self.clear()
        self.start()

    def clear(self) -> None:
        """Forget all objects, logs and faults."""
        self.objects: dict[tuple[str, str, str], Object] = {}
        self._owners: dict[tuple[str, str, str], dict[str, Object]] = {}
        self._version = 0
        self.faults.clear()
        self.logs.clear()
        self.seen.clear()

    def start(self) -> None:
        """Listen, at the port of before if there was one."""
        handler = type("Bound", (Handler,), {"api": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate.certificate, self.certificate.key)
        # The handshake is the thread's of the connection.
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.port = self._server.server_address[1]
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; objects stay."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def kubeconfig(self, namespace: str = "lab", token: str = TOKEN) -> str:
        """Return a kubeconfig whose contexts are ``here`` and ``nowhere``."""
        places = {"here": self.port, "nowhere": 1}
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "users": [{"name": "me", "user": {"token": token}}],
                "clusters": [
                    {
                        "name": name,
                        "cluster": {
                            "server": f"https://127.0.0.1:{port}",
                            "certificate-authority": str(self.certificate.authority),
                        },
                    }
                    for name, port in places.items()
                ],
                "contexts": [
                    {
                        "name": name,
                        "context": {"cluster": name, "user": "me", "namespace": namespace},
                    }
                    for name in places
                ],
            }
        )

    def put(self, made: Object) -> Object:
        """Store an object as a controller would, over what was there."""
        with self._lock:
            resource = next(
                name for name, kind in self.served[made["apiVersion"]].items()
                if kind == made["kind"]
            )  # fmt: skip
            metadata = made["metadata"]
            key = (resource, metadata["namespace"], metadata["name"])
            return self._store(key, deepcopy(made))

    def set_by(self, manager: str, key: tuple[str, str, str], given: Object) -> None:
        """Set fields of an object as another manager would, and take them from who had them."""
        with self._lock:
            owners = self._owners.setdefault(key, {})
            for name, one in owners.items():
                owners[name] = _without(one, given, [])
            owners[manager] = given
            self._store(key, _merge(self.objects[key], given))

    def apply(
        self, key: tuple[str, str, str], given: Object, asked: dict[str, str], *, dry: bool
    ) -> Object:
        """Merge what a manager says into an object; return it as it is or would be."""
        if wrong := self.check(given):
            raise Refused(400, f"strict decoding error: {'; '.join(wrong)}")
        manager = asked.get("fieldManager", "unknown")
        with self._lock:
            known, owners = self.objects.get(key, {}), self._owners.get(key, {})
            others = {name: one for name, one in owners.items() if name != manager}
            if asked.get("force") != "true":
                self._require_own(known, given, others)
            kept = _without(known, owners.get(manager, {}), list(others.values()))
            merged = _merge(kept, given)
            self._require_changeable(known, merged)
            merged["metadata"] |= {"namespace": key[1]}
            if dry:
                return {**merged, "metadata": {"uid": "", **merged["metadata"]}}
            self._owners[key] = {**others, manager: given}
            return known if merged == known else self._store(key, merged)

    def delete(self, key: tuple[str, str, str], *, dry: bool) -> Object:
        """Take an object away."""
        with self._lock:
            found = self.get(key)
            if not dry:
                del self.objects[key]
                self._owners.pop(key, None)
            return found

    def get(self, key: tuple[str, str, str]) -> Object:
        """Return an object."""
        if key not in self.objects:
            raise Refused(404, f'{key[0]} "{key[2]}" not found')
        return self.objects[key]

    def select(self, resource: str, namespace: str, asked: dict[str, str]) -> list[Object]:
        """Return the objects that selectors of labels and of fields name."""
        with self._lock:
            return [
                one for (kind, where, _), one in sorted(self.objects.items())
                if kind == resource and where == namespace
                and _fits(asked.get("labelSelector", ""), one["metadata"].get("labels", {}).get)
                and _fits(asked.get("fieldSelector", ""), lambda path, one=one: _at(one, path))
            ]  # fmt: skip

    def _store(self, key: tuple[str, str, str], made: Object) -> Object:
        self._version += 1
        old = self.objects.get(key, {}).get("metadata", {})
        fixed = {
            "uid": old.get("uid") or str(uuid.uuid5(uuid.NAMESPACE_URL, "/".join(key))),
            "creationTimestamp": old.get("creationTimestamp", "2026-11-23T10:00:00Z"),
        }
        made["metadata"] = {**fixed, **made["metadata"], "resourceVersion": str(self._version)}
        self.objects[key] = made
        return made

    @staticmethod
    def _require_own(known: Object, given: Object, others: dict[str, Object]) -> None:
        for path, value in _leaves(given):
            for name, theirs in others.items():
                if dict(_leaves(theirs)).get(path, value) != value:
                    spelled = "." + ".".join(path)
                    raise Refused(
                        409, f'Apply failed with 1 conflict: conflict with "{name}": {spelled}'
                    )

    @staticmethod
    def _require_changeable(known: Object, merged: Object) -> None:
        is_fixed = known and merged["kind"] == "Job"
        if is_fixed and merged["spec"]["template"] != known["spec"]["template"]:
            name = known["metadata"]["name"]
            raise Refused(422, f'Job.batch "{name}" is invalid: spec.template: field is immutable')


def _merge(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: _merge(old.get(name), one) for name, one in new.items()}}
    return deepcopy(new)


def _without(known: Object, mine: Object, others: list[Object]) -> Object:
    """Return an object without what only its manager had said."""
    kept = deepcopy(known)
    theirs = {path for one in others for path, _ in _leaves(one)}
    for path, _ in _leaves(mine):
        at = kept
        for name in path[:-1]:
            at = at.get(name, {})
        if path not in theirs:
            at.pop(path[-1], None)
    return kept


def _leaves(made: Object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, one in made.items():
        if isinstance(one, dict) and one:
            yield from _leaves(one, (*path, name))
        else:
            yield (*path, name), one


def _fits(selector: str, value: Callable[[str], Any]) -> bool:
    wanted = [one.partition("=") for one in selector.split(",") if one]
    return all(value(name) == text for name, _, text in wanted)


def _at(made: Any, path: str) -> Any:
    for name in path.split("."):
        made = made.get(name, {})
    return made
