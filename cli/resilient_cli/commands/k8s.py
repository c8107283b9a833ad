"""``resilient k8s``: a run as manifests of Kubernetes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from resilient.errors import ConfigError, UsageError
from resilient_cli.doctor import budget
from resilient_cli.given import given_to_train
from resilient_cli.kubernetes.manifests import manifests
from resilient_cli.kubernetes.run import (
    Flavor,
    KubeRun,
    Resources,
    Spot,
    check_command,
    check_image,
    check_names,
    check_resources,
    fit_times,
    parse_environment,
    parse_pods,
)
from resilient_cli.places import output_of
from resilient_cli.render import show
from resilient_cli.views.k8s import rendered

_EXAMPLE = "resilient k8s render --image IMAGE -- train --repo s3://lab/run /app/train.py"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Write a training as manifests of Kubernetes.",
)


@app.callback()
def _group() -> None:
    """Keep the name of the only command."""


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, **more)


Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- train ...", help="The command, without `resilient`."),
]
Image = Annotated[str, _option("Image of the run; by digest, so that all pods have the same.")]
FlavorOf = Annotated[Flavor, _option("What holds the pods.", "--flavor")]
Name = Annotated[str, _option("Name of all that is made.")]
Namespace = Annotated[str, _option("Namespace; else that of whoever applies it.")]
Pods = Annotated[str, _option("Pods: N, or MIN:MAX for what there is room for.")]
Gpus = Annotated[int, _option("GPUs of each pod.", min=0)]
Cpu = Annotated[str, _option("Processors of each pod.")]
Memory = Annotated[str, _option("Memory of each pod, shared memory included.")]
Shm = Annotated[str, _option("Shared memory of each pod: twice the state of its workers.")]
Disk = Annotated[str, _option("Scratch space of each pod.")]
SpotOf = Annotated[Spot, _option("Spot nodes of whom; sets what a notice leaves.", "--spot")]
Env = Annotated[list[str] | None, _option("NAME=VALUE to set; nothing secret.", "--env")]
Secret = Annotated[
    list[str] | None, _option("A Secret whose entries become variables.", "--secret")
]
Claim = Annotated[str, _option("A PersistentVolumeClaim, mounted at /checkpoints.")]
Queue = Annotated[str, _option("LocalQueue of Kueue, for --flavor kueue.")]
MaxFailures = Annotated[
    int, _option("Failures until the run is given up, for each pod; preemptions are free.", min=0)
]
Deadline = Annotated[float, _option("Hours that the run may take with all its lives.", min=0.01)]
Events = Annotated[
    Path | None, _option("Event files of a run, which say what its saves took: sets --grace.")
]


@app.command("render")
def render_manifests(  # noqa: PLR0913 - one parameter per option; Typer reads the signature
    ctx: typer.Context,
    command: Command = None,
    *,
    image: Image = "",
    flavor: FlavorOf = Flavor.JOB,
    name: Name = "train",
    namespace: Namespace = "",
    pods: Pods = "1",
    gpus: Gpus = 0,
    cpu: Cpu = "4",
    memory: Memory = "16Gi",
    shm: Shm = "4Gi",
    disk: Disk = "10Gi",
    spot: SpotOf = Spot.NONE,
    env: Env = None,
    secret: Secret = None,
    claim: Claim = "",
    queue: Queue = "",
    max_failures: MaxFailures = 6,
    deadline: Deadline = 168.0,
    events: Events = None,
) -> int:
    """Write the manifests of a training to stdout, for kubectl.

    A preempted pod is replaced and counts nothing; a code after which another start would end the
    same way fails the run at once. Nothing secret is in it. No cluster is asked.

    Example: resilient k8s render --image IMAGE -- train --repo s3://lab/run train.py |
    kubectl apply -f -
    """
    resources = Resources(cpu, memory, shm, disk, gpus)
    asked = _Asked(name, namespace, image, claim, queue, tuple(secret or ()))
    words = tuple(command or ())
    given = _check(words, asked, flavor, resources)
    fewest, most = parse_pods(pods)
    took = _took(events)
    run = KubeRun(
        *(name, image, words[1:], fewest, most, namespace, resources),
        times=fit_times(given.get("grace"), took, spot, int(deadline * 3600)),
        spot=spot,
        failures_max=max_failures,
        environment=parse_environment(env or ()),
        secrets=asked.secrets,
        claim=claim,
        queue=queue,
        given=frozenset(given),
    )
    show(rendered(run, flavor, manifests(run, flavor)), output_of(ctx))
    return 0


@dataclass(frozen=True, slots=True)
class _Asked:
    """Names as they were given."""

    name: str
    namespace: str
    image: str
    claim: str
    queue: str
    secrets: tuple[str, ...]


def _check(
    words: tuple[str, ...], asked: _Asked, flavor: Flavor, resources: Resources
) -> dict[str, Any]:
    """Return the options that the command gives, once all was held against what there can be."""
    if words[:1] != ("train",) or not words[1:]:
        raise UsageError("k8s needs a training to run", hint=_EXAMPLE)
    check_image(asked.image)
    named = {"--namespace": asked.namespace, "--claim": asked.claim, "--queue": asked.queue}
    check_names({"--name": asked.name, **named})
    for one in asked.secrets:
        check_names({"--secret": one})
    if bool(asked.queue) != (flavor is Flavor.KUEUE):
        raise ConfigError("--queue and --flavor kueue go together")
    check_resources(resources)
    given = given_to_train(words[1:])
    check_command(words[1:], given)
    return given


def _took(events: Path | None) -> budget.Took:
    took = budget.read_events(events) if events else budget.Took()
    if events and not took.saves:
        raise ConfigError(f"--events {events}: no save is told of there")
    return took
