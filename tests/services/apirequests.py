"""Requests to the API server of the tests: discovery, objects, logs, and faults in their place."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.services.apiserver import ApiServer, Fault

    Object = dict[str, Any]

TOKEN = "tests-s3cret-token"  # noqa: S105 - of a server that lives for one test
_AGGREGATED = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<version>[^/]+/[^/]+))(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+))?(?P<log>/log)?"
)
_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    422: "Invalid",
    500: "InternalError",
}
_GONE = struct.pack("ii", 1, 0)


class Refused(Exception):
    """What is answered with a Status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Handler(BaseHTTPRequestHandler):
    """Requests to what the server has."""

    api: ApiServer
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet for an answer

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer discovery, objects, lists and logs."""
        self._answer()

    def do_PATCH(self) -> None:
        """Answer a server-side apply."""
        self._answer()

    def do_DELETE(self) -> None:
        """Answer a deletion."""
        self._answer()

    def _answer(self) -> None:
        api, parts = self.api, urlsplit(self.path)
        api.seen.append(f"{self.command} {parts.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = next((one for one in api.faults if one.left and one.path in parts.path), None)
        if fault:
            fault.left -= 1
        if fault and not fault.code:
            self._cut()
            return
        try:
            self._require_allowed(fault)
            asked = {name: one[0] for name, one in parse_qs(parts.query).items()}
            self._route(unquote(parts.path), asked, body)
        except Refused as error:
            reason = _REASONS[error.code]
            status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
            self._send({**status, "message": str(error), "reason": reason, "code": error.code})

    def _require_allowed(self, fault: Fault | None) -> None:
        if fault:
            raise Refused(fault.code, fault.message)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise Refused(401, "Unauthorized")

    def _route(self, path: str, asked: dict[str, str], body: bytes) -> None:
        if path in ("/api", "/apis") or path.removeprefix("/apis/") in self.api.served:
            self._discover(path)
            return
        if path.startswith("/openapi/v3"):
            self._send(_openapi(path.removeprefix("/openapi/v3").strip("/"), self.api.served))
            return
        found = _PATH.fullmatch(path)
        version = found and (found["core"] or found["version"])
        if not found or found["resource"] not in self.api.served.get(version, {}):
            raise Refused(404, "the server could not find the requested resource")
        if found["log"]:
            self._log(found["name"], asked)
            return
        key = (found["resource"], found["namespace"] or "", found["name"] or "")
        dry = asked.get("dryRun") == "All"
        if self.command == "PATCH":
            self._send(self.api.apply(key, yaml.safe_load(body), asked, dry=dry))
        elif self.command == "DELETE":
            options = json.loads(body or b"{}")
            self._send(self.api.delete(key, dry=dry or bool(options.get("dryRun"))))
        elif found["name"]:
            self._send(self.api.get(key))
        else:
            kind = self.api.served[version][key[0]]
            items = self.api.select(key[0], key[1], asked)
            listed = {"kind": f"{kind}List", "apiVersion": version, "items": items}
            self._send({**listed, "metadata": {"resourceVersion": "1"}})

    def _discover(self, path: str) -> None:
        if (version := path.removeprefix("/apis/")) in self.api.served:
            listed = _resources(*version.split("/"), self.api.served[version])
            named = [{**one, "name": one["resource"]} for one in listed]
            self._send({"kind": "APIResourceList", "groupVersion": version, "resources": named})
            return
        groups: dict[str, list[tuple[str, dict[str, str]]]] = {}
        for version, kinds in self.api.served.items():
            group, _, number = version.rpartition("/")
            if bool(group) == (path == "/apis"):
                groups.setdefault(group, []).append((number, kinds))
        if "apidiscovery" in self.headers.get("Accept", ""):
            items = [
                {
                    "metadata": {"name": group},
                    "versions": [
                        {"version": number, "resources": list(_resources(group, number, kinds))}
                        for number, kinds in versions
                    ],
                }
                for group, versions in groups.items()
            ]
            made = {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2"}
            self._send({**made, "metadata": {}, "items": items}, _AGGREGATED)
            return
        listed = [
            {"name": group, "versions": [{"groupVersion": f"{group}/{one}"} for one, _ in versions]}
            for group, versions in groups.items()
        ]
        self._send({"kind": "APIGroupList", "apiVersion": "v1", "groups": listed})

    def _log(self, pod: str, asked: dict[str, str]) -> None:
        lines = self.api.logs.get((pod, asked.get("previous") == "true"))
        if lines is None:
            raise Refused(400, f'previous terminated container in pod "{pod}" not found')
        tail = int(asked.get("tailLines", len(lines)))
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Connection", "close")
        self.end_headers()
        # A time in a request has no fractions: all lines of its second come.
        since = asked.get("sinceTime", "").rstrip("Z")
        sent = max(0, len(lines) - tail) if tail >= 0 else 0
        cuts = self.api.cuts
        while True:
            there = lines[sent:]
            fresh = [one for one in there if one[: len(since)] >= since]
            self.wfile.write("".join(f"{one}\n" for one in fresh).encode())
            self.wfile.flush()
            sent += len(there)
            if asked.get("follow") != "true" or self._ended(pod):
                break
            if self.api.cuts != cuts:
                self._cut()
                return
            time.sleep(0.02)
        self.close_connection = True

    def _ended(self, name: str) -> bool:
        pods = [one for key, one in self.api.objects.items() if key[::2] == ("pods", name)]
        return not pods or pods[0]["status"]["phase"] in ("Succeeded", "Failed")

    def _send(self, made: Object, kind: str = "application/json") -> None:
        body = json.dumps(made).encode()
        self.send_response(made["code"] if made.get("kind") == "Status" else 200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _cut(self) -> None:
        """End the connection with a reset and without an answer."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _GONE)
        self.connection.close()
        self.close_connection = True
        self.wfile.close = lambda: None  # type: ignore[method-assign]


def _resources(group: str, number: str, kinds: dict[str, str]) -> Iterator[Object]:
    for resource, kind in kinds.items():
        yield {
            "resource": resource,
            "responseKind": {"group": group, "version": number, "kind": kind},
            "scope": "Namespaced",
            "singularResource": kind.lower(),
            "verbs": ["get", "list", "patch", "delete", "create", "watch"],
        }


def _openapi(version: str, served: dict[str, dict[str, str]]) -> Object:
    """Return what kubectl looks up before it applies: that PATCH can be strict and dry."""
    if not version:
        paths = {f"apis/{one}" if "/" in one else f"api/{one}": one for one in served}
        return {"paths": {one: {"serverRelativeURL": f"/openapi/v3/{one}"} for one in paths}}
    group, _, number = version.partition("/")[2].rpartition("/")
    names = ("fieldValidation", "dryRun", "fieldManager", "force")
    parameters = [{"name": one, "in": "query", "schema": {"type": "string"}} for one in names]
    paths = {}
    for resource, kind in served[version.partition("/")[2]].items():
        patch = {
            "parameters": parameters,
            "x-kubernetes-group-version-kind": {"group": group, "version": number, "kind": kind},
            "responses": {},
        }
        paths[f"/{version}/namespaces/{{namespace}}/{resource}/{{name}}"] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": "v1"}, "paths": paths}
