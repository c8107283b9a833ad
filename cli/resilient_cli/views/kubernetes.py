"""The answers of ``k8s status``, ``wait`` and ``logs``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from resilient.exit_codes import EXIT_CODES
from resilient.showing import quoted, without_users
from resilient_cli.kubernetes.manifests import REQUEUE
from resilient_cli.kubernetes.run import Flavor
from resilient_cli.render import Answer, Facts, Table
from resilient_cli.views.words import NONE, count

if TYPE_CHECKING:
    from resilient_cli.kubernetes.follow import Line
    from resilient_cli.kubernetes.kubectl import Cluster
    from resilient_cli.kubernetes.states import PodState, RunState

_BRIEF = {one.number: one.brief for one in EXIT_CODES}
# Of a pod, and not of a command that answers.
_BRIEF[1] = "the script failed"
_SIGNALS = {137: "killed: out of memory, or beyond the grace", 139: "crashed: segmentation fault"}
_EVENTS = 8
_COLUMNS = ("INDEX", "POD", "PHASE", "NODE", "STARTS", "PREEMPTED", "FAILED", "LAST EXIT")


def state_of_run(run: RunState, cluster: Cluster) -> Answer:
    """Return a run, a row for each index, what warns, and what to do next."""
    rows = tuple(_row(run, index) for index in sorted(run.newest()))
    shown = run.events[-_EVENTS:]
    warnings = tuple(
        (one.last_at, f"{one.count}x", one.about, one.reason, without_users(one.message))
        for one in shown
    )
    blocks = (
        Facts(_facts(run)),
        Table(_COLUMNS, rows),
        Table(("LAST SEEN", "TIMES", "ABOUT", "WARNING", "MESSAGE"), warnings),
        f"next: {_next(run, cluster)}",
    )
    return Answer("k8s.status", "run", _document(run, cluster), blocks, (run.state,))


def ended(run: RunState, cluster: Cluster) -> Answer:
    """Return how a run ended, and what to do next."""
    blocks = (Facts(_facts(run)), f"next: {_next(run, cluster)}")
    return Answer("k8s.wait", "run", _document(run, cluster), blocks, (run.state,))


def printed(line: Line) -> Answer:
    """Return a line that a pod printed."""
    text = without_users(line.text)
    document = {**asdict(line), "text": text}
    return Answer("k8s.logs", "line", document, (Facts(((f"[{line.index}]", text),)),), (text,))


def meaning(code: int | None) -> str:
    """Return an exit code and what it means; a dash for none."""
    if code is None:
        return NONE
    said = _BRIEF.get(code) or _SIGNALS.get(code)
    return f"{code} {said}" if said else str(code)


def _facts(run: RunState) -> tuple[tuple[str, str], ...]:
    why = f"{run.state} ({run.reason})" if run.reason else run.state
    preempted = sum(one.was_preempted for one in run.pods)
    failed = sum(one.has_failed for one in run.pods)
    pairs = [
        ("run", f"{run.flavor.value} {run.namespace}/{run.name}"),
        ("state", why),
    ]
    if run.message and run.state != "complete":
        pairs.append(("because", without_users(run.message)))
    if run.queue:
        pairs.append(("queue", f"{run.queue}: {run.admission}"))
    if run.exit_code is not None:
        pairs.append(("exit", meaning(run.exit_code)))
    ends = f"{count(preempted, 'preemption')}, {count(failed, 'failure')}"
    pairs.append(("pods", f"{len(run.newest())}; {ends} among the pods that are left"))
    return tuple(pairs)


def _row(run: RunState, index: int) -> tuple[str, ...]:
    pods = [one for one in run.pods if one.index == index]
    newest = pods[-1]
    last = max(pods, key=lambda one: (one.ended_at, one.created_at))
    starts = len(pods) + sum(one.restarts for one in pods)
    return (
        *(str(index), newest.name, newest.phase, newest.node or NONE, str(starts)),
        str(sum(one.was_preempted for one in pods)),
        str(sum(one.has_failed for one in pods)),
        _last(last),
    )


def _last(pod: PodState) -> str:
    if pod.disrupted and pod.exit_code not in (None, REQUEUE):
        return f"{pod.exit_code} preempted"
    return meaning(pod.exit_code)


def _document(run: RunState, cluster: Cluster) -> dict[str, Any]:
    # Only here, so that no word of a cluster shows who is named in a URL.
    made = asdict(run)
    made["message"], made["repository"] = without_users(run.message), without_users(run.repository)
    for pod, state in zip(made["pods"], run.pods, strict=True):
        pod |= {"preempted": state.was_preempted, "failed": state.has_failed}
        pod["meaning"] = _last(state) if state.exit_code is not None else ""
    for event in made["events"]:
        event["message"] = without_users(event["message"])
    return {
        **made,
        "exit": run.exit_code,
        "preemptions": sum(one.was_preempted for one in run.pods),
        "failures": sum(one.has_failed for one in run.pods),
        "next": _next(run, cluster),
    }


def _next(run: RunState, cluster: Cluster) -> str:
    """Return the command that most people want next."""
    ours = ("resilient", "k8s")
    failed = [str(one.index) for one in run.pods if one.exit_code == run.exit_code] or ["0"]
    suspend = '{"spec":{"suspend":false}}'
    if run.flavor is Flavor.PYTORCHJOB:
        suspend = f'{{"spec":{{"runPolicy":{suspend[8:-1]}}}}}'
    kind = "job" if run.flavor is Flavor.KUEUE else run.flavor.value
    waiting = ("pod", run.pods[0].name) if run.pods else (kind, run.name)
    if run.state == "complete" and run.repository:
        return f"resilient ckpt ls {quoted(without_users(run.repository))}"
    words = {
        "complete": (*ours, "delete", run.name),
        "failed": (*ours, "logs", run.name, "--index", failed[-1], "--tail", "50"),
        "queued": ("kubectl", "describe", "localqueue", run.queue),
        "suspended": (
            "kubectl",
            "patch",
            run.flavor.value,
            run.name,
            "--type=merge",
            "-p",
            suspend,
        ),
        "pending": ("kubectl", "describe", *waiting),
        "running": (*ours, "logs", run.name, "--follow"),
    }
    return cluster.spell(*words[run.state])
