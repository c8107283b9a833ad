"""``resilient k8s``: Kubernetes manifests of a run, and control of the run through kubectl."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.clock import SystemClock
from resilient.errors import EXIT_CODES, UsageError
from resilient.redaction import redact_userinfo, shell_quote
from resilient_cli.kubernetes.apply import carry_out, delete, find_all, plan
from resilient_cli.kubernetes.kubectl import Cluster
from resilient_cli.kubernetes.manifests import REQUEUE, manifests, to_yaml
from resilient_cli.kubernetes.options import accept_run_options, option
from resilient_cli.kubernetes.spec import Flavor, KubeRun, check_names
from resilient_cli.kubernetes.status import claims_of, repository_of
from resilient_cli.kubernetes.watch import LogQuery, PodLogLine, follow, get_run, read, wait
from resilient_cli.output import CommandResult, KeyValues, Table, say, show
from resilient_cli.repositories import is_interactive, output_of
from resilient_cli.views.text import NONE, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient_cli.kubernetes.apply import ObjectChange
    from resilient_cli.kubernetes.status import PodState, RunState

_WOULD = {"created": "create", "changed": "change", "unchanged": "leave"}


def changes(
    command: str, object_changes: Sequence[ObjectChange], name: str, cluster: Cluster
) -> CommandResult:
    """Build the answer of ``k8s apply`` or ``k8s diff``: changed objects, fields, next commands.

    Args:
        command: ``apply`` for changes that were made, ``diff`` for planned changes.
        object_changes: The changes.
        name: Name of the run.
        cluster: The cluster.
    """
    is_applied = command == "apply"
    rows = tuple(
        (change.object, change.action if is_applied else _WOULD[change.action])
        for change in object_changes
    )
    fields = tuple(
        (
            change.object,
            field.path,
            redact_userinfo(field.before) or NONE,
            redact_userinfo(field.after) or NONE,
        )
        for change in object_changes
        for field in change.fields
    )
    words = ("status", "wait", "logs") if is_applied else ()
    next_commands = tuple(cluster.command_text("resilient", "k8s", word, name) for word in words)
    document = {
        "changes": [_change_document(change) for change in object_changes],
        "next": list(next_commands),
    }
    blocks: tuple[Table | str, ...] = (
        Table(("OBJECT", "DONE" if is_applied else "WOULD"), rows),
        Table(("OBJECT", "FIELD", "BEFORE", "AFTER"), fields),
        *(f"next: {next_command}" for next_command in next_commands),
    )
    ids = tuple(change.object for change in object_changes if change.action != "unchanged")
    return CommandResult(f"k8s.{command}", "changes", document, blocks, ids)


def deletion(
    name: str, objects_found: Sequence[dict[str, Any]], *, is_deleted: bool
) -> CommandResult:
    """Build the answer of ``k8s delete``: deleted objects and objects that stay."""
    objects = tuple(
        f"{manifest['kind'].lower()}/{manifest['metadata']['name']}" for manifest in objects_found
    )
    claims = sorted(
        {claim for manifest in objects_found for claim in claims_of(manifest.get("spec"))}
    )
    repositories = {redact_userinfo(repository_of(manifest)) for manifest in objects_found} - {""}
    stays = (
        *sorted(repositories),
        *(f"persistentvolumeclaim/{claim_name}" for claim_name in claims),
    )
    document = {"name": name, "deleted": list(objects), "stays": list(stays), "done": is_deleted}
    word = "deleted" if is_deleted else "would be deleted"
    stays_rows = tuple(
        ("stays", kept_name) for kept_name in (*stays, "Secrets, and every checkpoint")
    )
    blocks = (
        KeyValues((*((word, object_name) for object_name in objects), *stays_rows)),
        "Its pods get SIGTERM, save, and exit within their grace period.",
    )
    return CommandResult("k8s.delete", "deletion", document, blocks, objects)


def _change_document(change: ObjectChange) -> dict[str, Any]:
    document = asdict(change)
    for field in document["fields"]:
        field |= {
            "before": redact_userinfo(field["before"]),
            "after": redact_userinfo(field["after"]),
        }
    return document


def build_render_result(
    run: KubeRun, flavor: Flavor, run_manifests: list[dict[str, Any]]
) -> CommandResult:
    """Build the answer of ``k8s render``: YAML for people and kubectl, objects for programs."""
    document = {
        "flavor": flavor.value,
        "grace_seconds": run.times.grace,
        "termination_seconds": run.times.termination,
        "manifests": run_manifests,
    }
    ids = tuple(
        f"{manifest['kind'].lower()}/{manifest['metadata']['name']}" for manifest in run_manifests
    )
    text = to_yaml(run_manifests)
    return CommandResult(
        "k8s.render", "manifests", document, (text.rstrip("\n"),), ids, is_verbatim=True
    )


_BRIEF = {code.number: code.brief for code in EXIT_CODES}
# Meanings for a pod. Code 1 of commands that answer a question means something else.
_BRIEF[1] = "the script failed"
_SIGNALS = {
    137: "killed: out of memory, or after the grace period",
    139: "crashed: segmentation fault",
}
_EVENTS = 8
_COLUMNS = ("INDEX", "POD", "PHASE", "NODE", "STARTS", "PREEMPTED", "FAILED", "LAST EXIT")


def state_of_run(run: RunState, cluster: Cluster) -> CommandResult:
    """Build the answer of ``k8s status``: the run, a row per index, warnings, the next command."""
    rows = tuple(_row(run, index) for index in sorted(run.newest()))
    events = run.events[-_EVENTS:]
    warnings = tuple(
        (
            event.last_at,
            f"{event.count}x",
            event.about,
            event.reason,
            redact_userinfo(event.message),
        )
        for event in events
    )
    blocks = (
        KeyValues(_facts(run)),
        Table(_COLUMNS, rows),
        Table(("LAST SEEN", "TIMES", "ABOUT", "WARNING", "MESSAGE"), warnings),
        f"next: {_next(run, cluster)}",
    )
    return CommandResult("k8s.status", "run", _run_document(run, cluster), blocks, (run.state,))


def build_wait_result(run: RunState, cluster: Cluster) -> CommandResult:
    """Build the answer of ``k8s wait``: the end of a run, and the next command."""
    blocks = (KeyValues(_facts(run)), f"next: {_next(run, cluster)}")
    return CommandResult("k8s.wait", "run", _run_document(run, cluster), blocks, (run.state,))


def build_logs_result(line: PodLogLine) -> CommandResult:
    """Build the answer of ``k8s logs`` for one line of a pod."""
    text = redact_userinfo(line.text)
    document = {**asdict(line), "text": text}
    return CommandResult(
        "k8s.logs", "line", document, (KeyValues(((f"[{line.index}]", text),)),), (text,)
    )


def meaning(code: int | None) -> str:
    """Return an exit code with its meaning; a dash for None."""
    if code is None:
        return NONE
    text = _BRIEF.get(code) or _SIGNALS.get(code)
    return f"{code} {text}" if text else str(code)


def _facts(run: RunState) -> tuple[tuple[str, str], ...]:
    state = f"{run.state} ({run.reason})" if run.reason else run.state
    preempted_count = sum(pod.was_preempted for pod in run.pods)
    failed_count = sum(pod.has_failed for pod in run.pods)
    pairs = [
        ("run", f"{run.flavor.value} {run.namespace}/{run.name}"),
        ("state", state),
    ]
    if run.message and run.state != "complete":
        pairs.append(("because", redact_userinfo(run.message)))
    if run.queue:
        pairs.append(("queue", f"{run.queue}: {run.admission}"))
    if run.exit_code is not None:
        pairs.append(("exit", meaning(run.exit_code)))
    ends = f"{count(preempted_count, 'preemption')}, {count(failed_count, 'failure')}"
    pairs.append(("pods", f"{len(run.newest())}; {ends} among the remaining pods"))
    return tuple(pairs)


def _row(run: RunState, index: int) -> tuple[str, ...]:
    pods = [pod for pod in run.pods if pod.index == index]
    newest = pods[-1]
    newest_pod = max(pods, key=lambda pod: (pod.ended_at, pod.created_at))
    starts = len(pods) + sum(pod.restarts for pod in pods)
    return (
        *(str(index), newest.name, newest.phase, newest.node or NONE, str(starts)),
        str(sum(pod.was_preempted for pod in pods)),
        str(sum(pod.has_failed for pod in pods)),
        _last(newest_pod),
    )


def _last(pod: PodState) -> str:
    if pod.disrupted and pod.exit_code not in (None, REQUEUE):
        return f"{pod.exit_code} preempted"
    return meaning(pod.exit_code)


def _run_document(run: RunState, cluster: Cluster) -> dict[str, Any]:
    # Redact here: text of the cluster may contain a URL with a user name or password.
    document = asdict(run)
    document["message"], document["repository"] = (
        redact_userinfo(run.message),
        redact_userinfo(run.repository),
    )
    for pod, state in zip(document["pods"], run.pods, strict=True):
        pod |= {"preempted": state.was_preempted, "failed": state.has_failed}
        pod["meaning"] = _last(state) if state.exit_code is not None else ""
    for event in document["events"]:
        event["message"] = redact_userinfo(event["message"])
    return {
        **document,
        "exit": run.exit_code,
        "preemptions": sum(pod_status.was_preempted for pod_status in run.pods),
        "failures": sum(pod_status.has_failed for pod_status in run.pods),
        "next": _next(run, cluster),
    }


def _next(run: RunState, cluster: Cluster) -> str:
    """Return the command that most users need next."""
    program = ("resilient", "k8s")
    failed_indexes = [str(pod.index) for pod in run.pods if pod.exit_code == run.exit_code] or ["0"]
    suspend = '{"spec":{"suspend":false}}'
    if run.flavor is Flavor.PYTORCHJOB:
        suspend = f'{{"spec":{{"runPolicy":{suspend[8:-1]}}}}}'
    kind = "job" if run.flavor is Flavor.KUEUE else run.flavor.value
    pending_object = ("pod", run.pods[0].name) if run.pods else (kind, run.name)
    if run.state == "complete" and run.repository:
        return f"resilient ckpt ls {shell_quote(redact_userinfo(run.repository))}"
    arguments = {
        "complete": (*program, "delete", run.name),
        "failed": (*program, "logs", run.name, "--index", failed_indexes[-1], "--tail", "50"),
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
        "pending": ("kubectl", "describe", *pending_object),
        "running": (*program, "logs", run.name, "--follow"),
    }
    return cluster.command_text(*arguments[run.state])


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run a training on Kubernetes with kubectl: render, apply, watch and wait.",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the run: `render --name`.")]
Context = Annotated[str, option("Context of the kubeconfig, as for kubectl.", "--context")]
Namespace = Annotated[
    str, option("Namespace; by default that of the context.", "-n", "--namespace")
]
Kubeconfig = Annotated[str, option("Kubeconfig file, as for kubectl.", "--kubeconfig")]


@app.command("render")
@accept_run_options
def render_manifests(ctx: typer.Context, run: KubeRun, flavor: Flavor) -> int:
    """Write the manifests of a training to stdout, for kubectl.

    A preempted pod is replaced and does not count as a failure. An exit code that another start
    would repeat fails the run at once. The manifests hold no secrets. The command contacts no
    cluster.

    Example: resilient k8s render --image IMAGE -- train --repo s3://lab/run /app/train.py |
    kubectl apply -f -
    """
    show(build_render_result(run, flavor, manifests(run, flavor)), output_of(ctx))
    return 0


@app.command("diff")
@accept_run_options
def diff(
    ctx: typer.Context,
    run: KubeRun,
    flavor: Flavor,
    *,
    exit_code: Annotated[
        bool, option("Exit with 1 if anything would change.", "--exit-code")
    ] = False,
    context: Context = "",
    kubeconfig: Kubeconfig = "",
) -> int:
    """Show what `apply` would change in the cluster: a server-side dry run that changes nothing.

    Exit code 0. With --exit-code: 1 if anything would change.

    Example: resilient k8s diff --image IMAGE --name gpt2 -- train --repo s3://lab/r /app/train.py
    """
    cluster = Cluster(context, run.namespace, kubeconfig)
    object_changes, _ = plan(cluster, manifests(run, flavor))
    show(changes("diff", object_changes, run.name, cluster), output_of(ctx))
    return 1 if exit_code and any(change.action != "unchanged" for change in object_changes) else 0


@app.command("apply")
@accept_run_options
def apply(
    ctx: typer.Context,
    run: KubeRun,
    flavor: Flavor,
    *,
    dry_run: Annotated[
        bool, option("Run a server-side dry run, and change nothing.", "--dry-run")
    ] = False,
    context: Context = "",
    kubeconfig: Kubeconfig = "",
) -> int:
    """Create or change a run in the cluster: apply the manifests of `render` on the server side.

    A dry run of all manifests comes first. If the cluster rejects one of them, nothing is changed.

    Example: resilient k8s apply --image IMAGE --name gpt2 -- train --repo s3://lab/r /app/train.py
    """
    cluster = Cluster(context, run.namespace, kubeconfig)
    object_changes, desired = plan(cluster, manifests(run, flavor))
    if not dry_run:
        carry_out(cluster, desired)
    show(changes("diff" if dry_run else "apply", object_changes, run.name, cluster), output_of(ctx))
    return 0


@app.command("delete")
def delete_run(
    ctx: typer.Context,
    name: Name = "train",
    *,
    dry_run: Annotated[bool, option("Only show the plan.", "--dry-run")] = False,
    context: Context = "",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = "",
) -> int:
    """Delete what `apply` created for a run. Its pods save and exit; checkpoints and claims stay.

    Exit code 0: done. 1: the user answered no.

    Example: resilient k8s delete gpt2 --dry-run
    """
    cluster, output = _cluster(name, context, namespace, kubeconfig), output_of(ctx)
    asks = not (dry_run or output.agrees)
    if asks and not is_interactive(output):
        raise UsageError(
            "delete ends the run, and no terminal is there to confirm it",
            hint=f"resilient k8s delete {name} --dry-run",
        )
    run_objects = find_all(cluster, name)
    if asks:
        show(deletion(name, run_objects, is_deleted=False), output)
        if not typer.confirm(f"Delete {len(run_objects)}?", err=True):
            return 1
    if not dry_run:
        delete(cluster, run_objects)
    show(deletion(name, run_objects, is_deleted=not dry_run), output)
    return 0


@app.command("status")
def status(
    ctx: typer.Context,
    name: Name = "train",
    *,
    context: Context = "",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = "",
) -> int:
    """Show the state of a run in a cluster: its pods, the meaning of exit codes, and warnings.

    The command searches for all flavors. The command counts preemptions and failures separately.
    Exit code 1: the run failed.

    Example: resilient k8s status gpt2 --namespace lab
    """
    cluster = _cluster(name, context, namespace, kubeconfig)
    run = get_run(cluster, name, has_events=True)
    show(state_of_run(run, cluster), output_of(ctx))
    return 1 if run.state == "failed" else 0


@app.command("wait")
def wait_for_end(
    ctx: typer.Context,
    name: Name = "train",
    *,
    timeout: Annotated[float, option("Deadline in seconds; 0 for none.", min=0)] = 0.0,
    context: Context = "",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = "",
) -> int:
    """Wait until a run is complete, failed or suspended, and exit with its exit code.

    0: complete. 75: suspended, or stopped by its --deadline after a save; the run can resume. Other
    codes: the code that failed the run, or 1 if no pod is left to show it. 69: --timeout, or no
    answer of the cluster for 10 minutes. 66: the run does not exist or was deleted. The command
    waits through lost connections, a restart of the cluster, and a queue of Kueue.

    Example: resilient k8s wait gpt2 --timeout 86400 && resilient ckpt verify latest s3://lab/run
    """
    cluster = _cluster(name, context, namespace, kubeconfig)
    run = wait(cluster, name, timeout, SystemClock(), say)
    show(build_wait_result(run, cluster), output_of(ctx))
    return run.exit_code or 0


@app.command("logs")
def logs(  # noqa: PLR0913 - the options of a command
    ctx: typer.Context,
    name: Name = "train",
    *,
    index: Annotated[
        int | None, option("Only the pod of this index.", "-i", "--index", min=0)
    ] = None,
    follow_: Annotated[
        bool, option("Follow until the run ends, also in replacement pods.", "-f", "--follow")
    ] = False,
    previous: Annotated[
        bool, option("Show the pod before the newest of an index.", "-p", "--previous")
    ] = False,
    tail: Annotated[int, option("Last N lines of each pod; -1 for all.", min=-1)] = -1,
    context: Context = "",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = "",
) -> int:
    """Print the output of the pods of a run, each line with the pod's index in front.

    With --json each line is an object with pod and time. User names in URLs are removed.

    Example: resilient k8s logs gpt2 --index 0 --follow
    """
    cluster, output = _cluster(name, context, namespace, kubeconfig), output_of(ctx)
    query = LogQuery(index, previous, tail)

    def emit(line: PodLogLine) -> None:
        show(build_logs_result(line), output)

    if follow_:
        follow(cluster, name, query, SystemClock(), emit)
        return 0
    for line in read(cluster, get_run(cluster, name), query):
        emit(line)
    return 0


def _cluster(name: str, context: str, namespace: str, kubeconfig: str) -> Cluster:
    check_names({"--name": name, "--namespace": namespace})
    return Cluster(context, namespace, kubeconfig)
