"""What an API server refuses in a manifest beyond its schema, and what a run needs of one."""

from __future__ import annotations

import re
from decimal import Decimal

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?")
_KEY = re.compile(r"(?:([a-z0-9.-]{1,253})/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_QUANTITY = re.compile(r"([+-]?[0-9.]+)([eE][-+]?[0-9]+|[KMGTPE]i|[numkMGTPE]?)")
_SUFFIXES = {
    **{f"{one}i": Decimal(1024) ** power for power, one in enumerate("KMGTPE", 1)},
    **dict(
        zip("numkMGTPE", (Decimal(10) ** p for p in (-9, -6, -3, 3, 6, 9, 12, 15, 18)), strict=1)
    ),
    "": Decimal(1),
}
_HANDLERS = {"httpGet", "exec", "tcpSocket", "grpc"}
_OWN = {"cpu", "memory", "ephemeral-storage", "pods"}
_CRON = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))


def amount(text):
    """Return the number that a quantity says, or None."""
    match = _QUANTITY.fullmatch(str(text))
    if not match or match[1].count(".") > 1:
        return None
    suffix = match[2]
    if suffix[:1] in ("e", "E") and suffix[1:]:
        return Decimal(match[1]) * Decimal(10) ** int(suffix[1:])
    return Decimal(match[1]) * _SUFFIXES[suffix]


def pods(value):
    """Yield every pod, and every template of one, in a manifest."""
    if isinstance(value, dict):
        spec = value.get("spec")
        if isinstance(spec, dict) and isinstance(spec.get("containers"), list):
            yield value
        for child in value.values():
            yield from pods(child)
    elif isinstance(value, list):
        for child in value:
            yield from pods(child)


def jobs(value):
    """Yield the spec of every Job in a manifest, also of those that others make."""
    if isinstance(value, dict):
        for name, child in value.items():
            is_job = (
                name == "spec"
                and isinstance(child, dict)
                and isinstance(child.get("template"), dict)
            )
            if (
                is_job
                and "containers" in (child["template"].get("spec") or {})
                and not child.get("selector")
            ):
                yield child
            yield from jobs(child)
    elif isinstance(value, list):
        for child in value:
            yield from jobs(child)


def check_rules(document):
    """Return what an API server would refuse, one line each."""
    problems = [*_check_names(document), *_check_selector(document)]
    for pod in pods(document):
        problems += _check_pod(pod["spec"])
    if document.get("kind") in ("Job", "CronJob", "JobSet"):
        for job in jobs(document):
            problems += _check_job(job)
    checks = {"CronJob": _check_cron, "ClusterQueue": _check_queue, "Service": _check_ports}
    problems += checks.get(document.get("kind"), lambda _: [])(document.get("spec", {}))
    if "Runtime" in document.get("kind", ""):
        policy = document["spec"].get("mlPolicy", {}).keys() & {"torch", "mpi", "jax", "xgboost"}
        problems += [f"spec.mlPolicy: only one of {sorted(policy)}"] if len(policy) > 1 else []
    problems += _check_tolerations(document.get("spec", {}).get("tolerations", []))
    return problems


def _check_names(document):
    metadata = document.get("metadata", {})
    name, kind = metadata.get("name", ""), document.get("kind")
    pattern = _LABEL if kind == "Service" else _SUBDOMAIN
    if not pattern.fullmatch(name):
        yield f"metadata.name: {name!r} is no name"
    metas = [metadata, *(pod.get("metadata", {}) for pod in pods(document))]
    for meta in metas:
        for key, value in (meta.get("labels") or {}).items():
            if not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
                yield f"labels: {key!r}: {value!r} is no label"


def _check_selector(document):
    spec = document.get("spec", {})
    match_labels = (spec.get("selector") or {}).get("matchLabels") if "template" in spec else None
    labels = (spec.get("template", {}).get("metadata") or {}).get("labels") or {}
    if match_labels and not match_labels.items() <= labels.items():
        yield f"spec.selector: {match_labels} does not select {labels}"


def _check_pod(spec):
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    volumes = [item["name"] for item in spec.get("volumes", [])]
    yield from _twice("volumes", volumes)
    yield from _twice("containers", [item["name"] for item in containers])
    yield from _check_tolerations(spec.get("tolerations", []))
    for item in containers:
        mounts = item.get("volumeMounts", [])
        yield from _twice("mountPath", [mount["mountPath"] for mount in mounts])
        yield from (
            f"volumeMounts: no volume {m['name']}" for m in mounts if m["name"] not in volumes
        )
        yield from _check_resources(item.get("resources", {}))
        for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
            handlers = _HANDLERS & item.get(probe, {"exec": 0}).keys()
            if len(handlers) != 1:
                yield f"{probe}: {sorted(handlers)} is not one handler"


def _twice(noun, names):
    return [f"{noun}: {name} twice" for name in sorted({n for n in names if names.count(n) > 1})]


def _check_resources(resources):
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for name, text in (*limits.items(), *requests.items()):
        number = amount(text)
        if number is None:
            yield f"resources: {name}: {text!r} is no quantity"
        elif name not in _OWN and not name.startswith("hugepages-") and number % 1:
            yield f"resources: {name}: {text!r} is no whole number"
    for name in limits.keys() & requests.keys():
        requested_amount, most = amount(requests[name]), amount(limits[name])
        if requested_amount is not None and most is not None and requested_amount > most:
            yield f"resources: {name}: asks for {requests[name]}, limit {limits[name]}"


def _check_tolerations(tolerations):
    for toleration in tolerations:
        if toleration.get("operator", "Equal") not in ("Equal", "Exists", "Lt", "Gt"):
            yield f"tolerations: operator {toleration['operator']!r}"
        if toleration.get("effect", "NoSchedule") not in (
            "NoSchedule",
            "PreferNoSchedule",
            "NoExecute",
        ):
            yield f"tolerations: effect {toleration['effect']!r}"


def _check_ports(spec):
    for port in spec.get("ports", []):
        if not 1 <= port["port"] < 1 << 16:
            yield f"ports: {port['port']}"


def _check_job(job):
    pod = job["template"]["spec"]
    policy = pod.get("restartPolicy", "Always")
    if policy not in ("Never", "OnFailure"):
        yield f"restartPolicy: {policy} in a Job"
    if job.get("completionMode") == "Indexed" and job.get("completions") is None:
        yield "completions: an Indexed Job needs a number"
    if "successPolicy" in job and job.get("completionMode") != "Indexed":
        yield "successPolicy: needs an Indexed Job"
    rules = job.get("podFailurePolicy", {}).get("rules", [])
    if rules and policy != "Never":
        yield "podFailurePolicy: needs restartPolicy Never"
    if rules and job.get("podReplacementPolicy", "Failed") != "Failed":
        yield "podReplacementPolicy: has to be Failed beside a podFailurePolicy"
    names = {entry["name"] for entry in pod["containers"]}
    for codes in filter(None, (entry.get("onExitCodes") for entry in rules)):
        yield from _check_codes(codes, names)


def _check_codes(codes, containers):
    values = codes["values"]
    if values != sorted(set(values)) or (codes["operator"] == "In" and 0 in values):
        yield f"podFailurePolicy: {values} are not in order, or have 0"
    if codes.get("containerName", "") not in {"", *containers}:
        yield f"podFailurePolicy: no container {codes['containerName']}"


def _check_cron(spec):
    fields = spec["schedule"].split()
    for text, (least, most) in zip(fields, _CRON, strict=False):
        if any(not least <= int(number) <= most for number in re.findall(r"(?<!/)\b\d+", text)):
            yield f"schedule: {text!r} is not within {least} to {most}"
    if len(fields) != len(_CRON):
        yield f"schedule: {spec['schedule']!r} has not five fields"


def _check_queue(spec):
    preemption = spec.get("preemption", {})
    borrows = preemption.get("borrowWithinCohort", {}).get("policy", "Never")
    if preemption.get("reclaimWithinCohort", "Never") == "Never" and borrows != "Never":
        yield "preemption: borrows and never reclaims"
    for group in spec.get("resourceGroups", []):
        for flavor in group["flavors"]:
            if [resource["name"] for resource in flavor["resources"]] != group["coveredResources"]:
                yield f"resourceGroups: flavor {flavor['name']} does not cover what its group does"


def check_restricted(pod):
    """Return what Pod Security's level `restricted` refuses in a pod's spec."""
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key):
            yield f"{key}: true"
    volume_kinds = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "projected",
        "secret",
    }
    for volume in pod.get("volumes", []):
        if not (volume.keys() - {"name"}) <= volume_kinds | {"persistentVolumeClaim"}:
            yield f"volumes: {volume}"
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        if any("hostPort" in port for port in container.get("ports", [])):
            yield "hostPort"
        yield from _check_context(
            {**pod.get("securityContext", {}), **container.get("securityContext", {})}
        )


def _check_context(context):
    """Yield what is not restricted in what a container and its pod say together."""
    if context.get("privileged") or context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation: is not false"
    if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
        yield "runAsNonRoot: is not true"
    if context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile: is not RuntimeDefault"
    capabilities = context.get("capabilities", {})
    capabilities_added = set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}
    if "ALL" not in capabilities.get("drop", []) or capabilities_added:
        yield "capabilities: are not dropped"
