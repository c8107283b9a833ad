"""``resilient k8s``: a run as manifests of Kubernetes, and the run in a cluster, by kubectl."""

from __future__ import annotations

from typing import Annotated

import typer

from resilient.clock import SystemClock
from resilient.errors import UsageError
from resilient_cli.kubernetes.change import carry_out, delete, find_all, plan
from resilient_cli.kubernetes.follow import Asked, Line, follow, read
from resilient_cli.kubernetes.kubectl import Cluster
from resilient_cli.kubernetes.look import look, wait
from resilient_cli.kubernetes.manifests import manifests
from resilient_cli.kubernetes.options import option, takes_a_run
from resilient_cli.kubernetes.run import Flavor, KubeRun, check_names
from resilient_cli.places import is_somebody_there, output_of
from resilient_cli.render import show
from resilient_cli.streams import say
from resilient_cli.views.applying import changes, deletion
from resilient_cli.views.k8s import rendered
from resilient_cli.views.kubernetes import ended, printed, state_of_run

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run a training on Kubernetes, by kubectl: to manifests, to the cluster, to its end.",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the run: `render --name`.")]
Context = Annotated[str, option("Context of the kubeconfig, as for kubectl.", "--context")]
Namespace = Annotated[str, option("Namespace; else the context's.", "-n", "--namespace")]
Kubeconfig = Annotated[str, option("File of contexts, as for kubectl.", "--kubeconfig")]


@app.command("render")
@takes_a_run
def render_manifests(ctx: typer.Context, run: KubeRun, flavor: Flavor) -> int:
    """Write the manifests of a training to stdout, for kubectl.

    A preempted pod is replaced and counts nothing; a code after which another start would end the
    same way fails the run at once. Nothing secret is in it. No cluster is asked.

    Example: resilient k8s render --image IMAGE -- train --repo s3://lab/run /app/train.py |
    kubectl apply -f -
    """
    show(rendered(run, flavor, manifests(run, flavor)), output_of(ctx))
    return 0


@app.command("diff")
@takes_a_run
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
    """Say what `apply` would change in the cluster: the cluster tries it, and changes nothing.

    Exit code 0; with --exit-code 1 if anything would change.

    Example: resilient k8s diff --image IMAGE --name gpt2 -- train --repo s3://lab/r /app/train.py
    """
    cluster = Cluster(context, run.namespace, kubeconfig)
    found, _ = plan(cluster, manifests(run, flavor))
    show(changes("diff", found, run.name, cluster), output_of(ctx))
    return 1 if exit_code and any(one.action != "unchanged" for one in found) else 0


@app.command("apply")
@takes_a_run
def apply(
    ctx: typer.Context,
    run: KubeRun,
    flavor: Flavor,
    *,
    dry_run: Annotated[
        bool, option("Let the cluster try it, and change nothing.", "--dry-run")
    ] = False,
    context: Context = "",
    kubeconfig: Kubeconfig = "",
) -> int:
    """Make a run in the cluster, or change it: what `render` writes, by server-side apply.

    The cluster tries all of it first; when it refuses a part, nothing is changed.

    Example: resilient k8s apply --image IMAGE --name gpt2 -- train --repo s3://lab/r /app/train.py
    """
    cluster = Cluster(context, run.namespace, kubeconfig)
    found, wanted = plan(cluster, manifests(run, flavor))
    if not dry_run:
        carry_out(cluster, wanted)
    show(changes("diff" if dry_run else "apply", found, run.name, cluster), output_of(ctx))
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
    """Delete what `apply` made of a run. Its pods save and leave; checkpoints and claims stay.

    Exit code 0: done. 1: the answer to the question was no.

    Example: resilient k8s delete gpt2 --dry-run
    """
    cluster, output = _cluster(name, context, namespace, kubeconfig), output_of(ctx)
    asks = not (dry_run or output.agrees)
    if asks and not is_somebody_there(output):
        raise UsageError(
            "delete ends the run, and nobody is there to confirm it",
            hint=f"resilient k8s delete {name} --dry-run",
        )
    found = find_all(cluster, name)
    if asks:
        show(deletion(name, found, done=False), output)
        if not typer.confirm(f"Delete {len(found)}?", err=True):
            return 1
    if not dry_run:
        delete(cluster, found)
    show(deletion(name, found, done=not dry_run), output)
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
    """Say how a run in a cluster is: its state, its pods, what their codes mean, what warns.

    All flavors are looked for. Preemptions are told apart from failures. Exit code 1: it failed.

    Example: resilient k8s status gpt2 --namespace lab
    """
    cluster = _cluster(name, context, namespace, kubeconfig)
    found = look(cluster, name, has_events=True)
    show(state_of_run(found, cluster), output_of(ctx))
    return 1 if found.state == "failed" else 0


@app.command("wait")
def wait_for_end(
    ctx: typer.Context,
    name: Name = "train",
    *,
    timeout: Annotated[float, option("Seconds; 0 for as long as it takes.", min=0)] = 0.0,
    context: Context = "",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = "",
) -> int:
    """Wait until a run is complete, has failed or is suspended, and end with its exit code.

    0: complete. 75: suspended, or stopped by its --deadline after a save: it goes on from there.
    Else the code that failed the run; 1 if no pod is left to say it. 69: --timeout, or ten minutes
    without a word of the cluster. 66: there is no such run, or it was deleted. A connection that
    is lost, or a cluster that starts anew, is waited for. A run in a queue of Kueue is too.

    Example: resilient k8s wait gpt2 --timeout 86400 && resilient ckpt verify latest s3://lab/run
    """
    cluster = _cluster(name, context, namespace, kubeconfig)
    found = wait(cluster, name, timeout, SystemClock(), say)
    show(ended(found, cluster), output_of(ctx))
    return found.exit_code or 0


@app.command("logs")
def logs(  # noqa: PLR0913 - the options of a command
    ctx: typer.Context,
    name: Name = "train",
    *,
    index: Annotated[int | None, option("Of this pod only.", "-i", "--index", min=0)] = None,
    follow_: Annotated[
        bool, option("Until the run ends; replaced pods too.", "-f", "--follow")
    ] = False,
    previous: Annotated[
        bool, option("Of the pod before the newest of an index.", "-p", "--previous")
    ] = False,
    tail: Annotated[int, option("The last N lines of each pod; -1 for all.", min=-1)] = -1,
    context: Context = "",
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = "",
) -> int:
    """Print what the pods of a run print, each line with the pod's index in front.

    With --json each line is an object, with pod and time. Whoever is named in a URL is left out.

    Example: resilient k8s logs gpt2 --index 0 --follow
    """
    cluster, output = _cluster(name, context, namespace, kubeconfig), output_of(ctx)
    asked = Asked(index, previous, tail)

    def emit(line: Line) -> None:
        show(printed(line), output)

    if follow_:
        follow(cluster, name, asked, SystemClock(), emit)
        return 0
    for line in read(cluster, look(cluster, name), asked):
        emit(line)
    return 0


def _cluster(name: str, context: str, namespace: str, kubeconfig: str) -> Cluster:
    check_names({"--name": name, "--namespace": namespace})
    return Cluster(context, namespace, kubeconfig)
