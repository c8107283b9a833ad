"""Command-line options that specify a run on Kubernetes, shared by several commands."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.errors import ConfigError, UsageError
from resilient_cli import preemption_budget
from resilient_cli.app import parse_train_options
from resilient_cli.kubernetes.spec import (
    Flavor,
    KubeRun,
    Resources,
    Spot,
    check_command,
    check_image,
    check_names,
    check_resources,
    fit_times,
    parse_egress,
    parse_environment,
    parse_identity,
    parse_pods,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_EXAMPLE = "resilient k8s render --image IMAGE -- train --repo s3://lab/run /app/train.py"


def option(text: str, *names: str, **more: Any) -> Any:
    """Return an option of Typer with its help."""
    return typer.Option(*names, help=text, **more)


Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- train ...", help="Command, without `resilient`."),
]
Image = Annotated[
    str, option("Image of the run; use a digest, so that all pods run the same image.")
]
FlavorOf = Annotated[Flavor, option("Kind of object that manages the pods.", "--flavor")]
Name = Annotated[str, option("Name of all objects.")]
Namespace = Annotated[str, option("Namespace; by default that of the kubectl context.")]
Pods = Annotated[str, option("Number of pods: N, or MIN:MAX.")]
Gpus = Annotated[int, option("GPUs of each pod.", min=0)]
Cpu = Annotated[str, option("Processors of each pod.")]
Memory = Annotated[str, option("Memory of each pod, shared memory included.")]
Shm = Annotated[str, option("Shared memory of each pod: twice the state of its workers.")]
Disk = Annotated[str, option("Scratch space of each pod.")]
SpotOf = Annotated[
    Spot, option("Cloud of spot nodes; sets the length of a preemption notice.", "--spot")
]
Env = Annotated[list[str] | None, option("NAME=VALUE to set; not for secrets.", "--env")]
Secret = Annotated[
    list[str] | None, option("A Secret whose entries become environment variables.", "--secret")
]
IdentityOf = Annotated[
    str,
    option(
        "Identity of the pods for the store: eks (Pod Identity), irsa=ROLE_ARN, "
        "gke=SERVICE_ACCOUNT or azure=CLIENT_ID.",
        "--identity",
    ),
]
Egress = Annotated[
    list[str] | None,
    option("CIDR:PORT that pods may reach, in addition to port 443 everywhere.", "--egress"),
]
Claim = Annotated[str, option("A PersistentVolumeClaim, mounted at /checkpoints.")]
Queue = Annotated[str, option("LocalQueue of Kueue, for --flavor kueue.")]
MaxFailures = Annotated[
    int, option("Failures of a pod until the run fails; preemptions do not count.", min=0)
]
Deadline = Annotated[float, option("Time limit of the run in hours, over all attempts.", min=0.01)]
Events = Annotated[
    Path | None, option("Event files of a run with measured save times: sets --grace.")
]


def accept_run_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options of a run; the command gets ``run`` and ``flavor`` instead.

    Args:
        command: Command whose first parameters are ``ctx``, ``run`` and ``flavor``; its other
            parameters are its own options.
    """
    run_parameters = list(inspect.signature(read_run, eval_str=True).parameters.values())
    own_parameters = list(inspect.signature(command, eval_str=True).parameters.values())
    names = {parameter.name for parameter in run_parameters}

    @wraps(command)
    def wrapper(ctx: typer.Context, **values: Any) -> int:
        of_run = {name: values.pop(name) for name in names}
        return command(ctx, read_run(**of_run), of_run["flavor"], **values)

    parameters = [own_parameters[0], *run_parameters, *own_parameters[3:]]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def read_run(  # noqa: PLR0913 - one parameter per option; Typer reads the signature
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
    identity: IdentityOf = "",
    egress: Egress = None,
    queue: Queue = "",
    max_failures: MaxFailures = 6,
    deadline: Deadline = 168.0,
    events: Events = None,
) -> KubeRun:
    """Check all options of a run, and return the run that they specify.

    Raises:
        UsageError: No training command is given.
        ConfigError: An API server would refuse an option, or a save does not fit into the notice.
    """
    resources = Resources(cpu, memory, shm, disk, gpus)
    names = _GivenNames(name, namespace, image, claim, queue, tuple(secret or ()))
    words = tuple(command or ())
    train_options = _check(words, names, flavor, resources)
    pods_min, pods_max = parse_pods(pods)
    save_times = _took(events)
    return KubeRun(
        *(name, image, words[1:], pods_min, pods_max, namespace, resources),
        times=fit_times(train_options.get("grace"), save_times, spot, int(deadline * 3600)),
        spot=spot,
        failures_max=max_failures,
        environment=parse_environment(env or ()),
        secrets=names.secrets,
        claim=claim,
        queue=queue,
        given=frozenset(train_options),
        identity=parse_identity(identity),
        egress=parse_egress(egress or ()),
    )


@dataclass(frozen=True, slots=True)
class _GivenNames:
    """Names, as the user gave them."""

    name: str
    namespace: str
    image: str
    claim: str
    queue: str
    secrets: tuple[str, ...]


def _check(
    words: tuple[str, ...], names: _GivenNames, flavor: Flavor, resources: Resources
) -> dict[str, Any]:
    """Check the options, and return the options of ``train`` that the command contains."""
    if words[:1] != ("train",) or not words[1:]:
        raise UsageError("k8s needs a training to run", hint=_EXAMPLE)
    check_image(names.image)
    value_by_option = {
        "--namespace": names.namespace,
        "--claim": names.claim,
        "--queue": names.queue,
    }
    check_names({"--name": names.name, **value_by_option})
    for secret in names.secrets:
        check_names({"--secret": secret})
    if bool(names.queue) != (flavor is Flavor.KUEUE):
        raise ConfigError("--queue and --flavor kueue go together")
    check_resources(resources)
    train_options = parse_train_options(words[1:])
    check_command(words[1:], train_options)
    script = str(train_options.get("script", ""))
    if not train_options.keys() & {"module", "no_python"} and not script.startswith("/"):
        raise ConfigError(
            f"{script!r} is a relative path, and pods start in /scratch: give its absolute path "
            f"in the image, such as /app/{script}",
            hint=_EXAMPLE,
        )
    return train_options


def _took(events: Path | None) -> preemption_budget.SaveTimes:
    save_times = preemption_budget.read_events(events) if events else preemption_budget.SaveTimes()
    if events and not save_times.saves:
        raise ConfigError(f"--events {events}: no save is recorded there")
    return save_times
