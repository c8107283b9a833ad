"""Rank identity, and the environment variables by which a launcher starts a worker.

`resilient train` writes these variables. torchrun writes only its standard variables among them,
such as ``RANK``. A script therefore runs under either launcher, or alone.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from resilient.distributed.start_identity import StartIdentity, inherited_start, write_start
from resilient.environment import read_flag, read_integer, read_seconds, refuse
from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class World:
    """Identity of one rank.

    Attributes:
        rank: 0 to ``size - 1``.
        size: Number of ranks that train together.
        local_rank: Number of the rank among the ranks of its host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_coordinator(self) -> bool:
        """True if this rank decides in agreements and writes the manifest."""
        return self.rank == 0


STORAGE_OPTIONS = "RESILIENT_STORAGE_OPTIONS"
TAKE_OVER = "RESILIENT_TAKE_OVER"
HEARTBEAT = "RESILIENT_HEARTBEAT_SECONDS"
HEARTBEAT_SECONDS = 20.0
"""Default time between two heartbeats of a repository's writer."""
HEARTBEAT_SECONDS_MAX = 60.0
SIGNING_KEY = "RESILIENT_SIGNING_KEY"
SIGNING_KEY_FILE = "RESILIENT_SIGNING_KEY_FILE"
STRICT_RESUME = "RESILIENT_STRICT_RESUME"
ADAPTER = "RESILIENT_ADAPTER"
"""Trainer of another library that saves by our adapter in an unchanged script."""
REQUIRE_SIGNATURE = "RESILIENT_REQUIRE_SIGNATURE"
_SECRET_BYTES_MAX = 1 << 16
_EXAMPLE = f'export {STORAGE_OPTIONS}=\'{{"endpoint": "https://s3.example"}}\''
_REPOSITORY = "repository"
_UNSAVED = "unsaved"
_EVENTS = "events"


@dataclass(frozen=True, slots=True)
class LaunchEnv:
    """Start parameters of one worker.

    Attributes:
        world: Rank, size and local rank.
        host: Address of the rendezvous store; empty if alone.
        port: TCP port of the rendezvous store.
        hosted: Whether the launcher's agent serves the rendezvous store.
        attempt: Name of this attempt of the worker group, new at every restart.
        repo: URL of the checkpoint repository; empty leaves it to the script.
        resume: User's choice: ``auto``, ``never``, a reference or a folder. The choice applies in
            every attempt until this run has a checkpoint.
        cause: Reason of this attempt, as one word.
        events: Folder for event files; empty leaves it to the script.
        single_writer: The user promises that no two jobs write to the repository at once.
        keeper: Socket of this host's saver daemon; empty if there is none.
        storage_options: Endpoint, credentials and similar options of the repository; never shown.
        agent_pid: Process id of the agent, which sets the deadline of a stop; 0 without an agent.
        grace_seconds: The agent's time from SIGTERM to SIGKILL.
        notes: Folder for messages of workers to the agent; empty without an agent.
        require_signature: Whether a resume requires a checkpoint signed with the key.
        strict_resume: Whether a resume with a loss is refused.
        every: Save schedule (``--every``); empty leaves it to the script.
        until_step: Step after which this agent run ends (``--until-step``); 0 for the last step.
        start: Identity of the worker's start; empty without an agent.
        restarts: Restarts of the group so far, as torchrun counts them.
        takes_over: Whether a live writer of the repository is fenced off on purpose.
        heartbeat_seconds: Time between two heartbeats in the repository; 0 for none.
    """

    world: World
    host: str = ""
    port: int = 0
    hosted: bool = False
    attempt: str = "0"
    repo: str = ""
    resume: str = "auto"
    cause: str = "start"
    events: str = ""
    single_writer: bool = False
    keeper: str = ""
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    agent_pid: int = 0
    grace_seconds: float = 0.0
    notes: str = ""
    require_signature: bool = False
    strict_resume: bool = False
    every: str = ""
    until_step: int = 0
    start: StartIdentity = field(default_factory=StartIdentity)
    restarts: int = 0
    takes_over: bool = False
    heartbeat_seconds: float = HEARTBEAT_SECONDS

    @property
    def is_first(self) -> bool:
        """True if no earlier attempt of this start can have written to a repository."""
        return self.cause == "start" and self.restarts == 0


def read_agent_pid(environ: Mapping[str, str]) -> int:
    """Return the process id of the agent; 0 without an agent.

    Raises:
        ConfigError: The variable is no number.
    """
    return read_integer(environ, "RESILIENT_AGENT_PID", 0, least=0)


def read_launch(environ: Mapping[str, str]) -> LaunchEnv:
    """Parse the start of this worker; a world of one without a launcher.

    Raises:
        ConfigError: A variable has an invalid value, or the rank lies outside the world.
    """
    world = World(
        rank=read_integer(environ, "RANK", 0),
        size=read_integer(environ, "WORLD_SIZE", 1, least=1),
        local_rank=read_integer(environ, "LOCAL_RANK", 0, least=0),
    )
    if not 0 <= world.rank < world.size:
        raise ConfigError(f"RANK={world.rank} is outside WORLD_SIZE={world.size}")
    return LaunchEnv(
        world=world,
        host=environ.get("MASTER_ADDR", ""),
        port=read_integer(environ, "MASTER_PORT", 0, least=0),
        hosted=read_flag(environ, "TORCHELASTIC_USE_AGENT_STORE"),
        attempt=environ.get("RESILIENT_ATTEMPT")
        or environ.get("TORCHELASTIC_RESTART_COUNT")
        or "0",
        repo=environ.get("RESILIENT_REPO", ""),
        resume=environ.get("RESILIENT_RESUME", "auto"),
        cause=environ.get("RESILIENT_CAUSE", "start"),
        events=environ.get("RESILIENT_EVENTS", ""),
        single_writer=read_flag(environ, "RESILIENT_SINGLE_WRITER"),
        keeper=environ.get("RESILIENT_KEEPER", ""),
        storage_options=read_storage_options(environ),
        agent_pid=read_agent_pid(environ),
        grace_seconds=read_seconds(environ, "RESILIENT_GRACE"),
        notes=environ.get("RESILIENT_NOTES", ""),
        require_signature=read_flag(environ, REQUIRE_SIGNATURE),
        strict_resume=read_flag(environ, STRICT_RESUME),
        every=environ.get("RESILIENT_EVERY", ""),
        until_step=read_integer(environ, "RESILIENT_UNTIL_STEP", 0, least=0),
        start=inherited_start(environ),
        restarts=read_integer(environ, "TORCHELASTIC_RESTART_COUNT", 0, least=0),
        takes_over=read_flag(environ, TAKE_OVER),
        heartbeat_seconds=_read_heartbeat(environ),
    )


def _read_heartbeat(environ: Mapping[str, str]) -> float:
    if not environ.get(HEARTBEAT, "").strip():
        return HEARTBEAT_SECONDS
    seconds = read_seconds(environ, HEARTBEAT)
    # A start on another host waits longer than this interval, so the interval has a limit.
    if seconds and not 1.0 <= seconds <= HEARTBEAT_SECONDS_MAX:
        raise refuse(environ, HEARTBEAT, f"expected 0, or 1 to {HEARTBEAT_SECONDS_MAX:g} seconds")
    return seconds


def read_storage_options(environ: Mapping[str, str]) -> dict[str, Any]:
    """Parse the options in ``RESILIENT_STORAGE_OPTIONS``; see :func:`parse_storage_options`."""
    return parse_storage_options(environ.get(STORAGE_OPTIONS, ""), STORAGE_OPTIONS)


def parse_storage_options(text: str, where: str) -> dict[str, Any]:
    """Parse storage options from a JSON object; an empty text gives no options.

    Args:
        text: The JSON; it may contain credentials, so no error shows the text.
        where: Source of the text, for an error.

    Raises:
        ConfigError: The text is not a JSON object.
    """
    try:
        options = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        location = f" at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
        # Not chained: the cause contains the whole text.
        raise ConfigError(f"{where} is not JSON{location}", hint=_EXAMPLE) from None
    if not isinstance(options, dict):
        raise ConfigError(f"{where} is not a JSON object", hint=_EXAMPLE)
    return options


def read_signing_key(environ: Mapping[str, str]) -> str:
    """Return the secret of ``RESILIENT_SIGNING_KEY``, or of the file that the file variable names.

    Raises:
        ConfigError: Both are set, or the file cannot be read; no error shows any of the secret.
    """
    secret, file = environ.get(SIGNING_KEY, ""), environ.get(SIGNING_KEY_FILE, "")
    if secret and file:
        raise ConfigError(
            f"{SIGNING_KEY} and {SIGNING_KEY_FILE} are both set: use one of them",
            hint=f"unset {SIGNING_KEY}",
        )
    if not file:
        return secret.strip()
    hint = f"openssl rand -hex 32 > {file} && chmod 600 {file}"
    try:
        with Path(file).open("rb") as key_file:
            data = key_file.read(_SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(
            f"{SIGNING_KEY_FILE}: cannot read `{file}`: {error.strerror}", hint=hint
        ) from error
    if len(data) > _SECRET_BYTES_MAX or not data.strip():
        raise ConfigError(f"{SIGNING_KEY_FILE}: `{file}` holds no key", hint=hint)
    # Keep bytes that are no valid text.
    return data.strip().decode("utf-8", "surrogateescape")


def write_launch(launch: LaunchEnv) -> dict[str, str]:
    """Return the variables that :func:`read_launch` parses back to ``launch``."""
    options = launch.storage_options
    return {
        # Do not set an empty value: it would hide the value that the worker inherits.
        **({STORAGE_OPTIONS: json.dumps(dict(options))} if options else {}),
        "RANK": str(launch.world.rank),
        "WORLD_SIZE": str(launch.world.size),
        "LOCAL_RANK": str(launch.world.local_rank),
        "MASTER_ADDR": launch.host,
        "MASTER_PORT": str(launch.port),
        "TORCHELASTIC_USE_AGENT_STORE": str(launch.hosted),
        "RESILIENT_ATTEMPT": launch.attempt,
        "RESILIENT_REPO": launch.repo,
        "RESILIENT_RESUME": launch.resume,
        "RESILIENT_CAUSE": launch.cause,
        "RESILIENT_EVENTS": launch.events,
        "RESILIENT_SINGLE_WRITER": "1" if launch.single_writer else "0",
        "RESILIENT_KEEPER": launch.keeper,
        "RESILIENT_AGENT_PID": str(launch.agent_pid),
        "RESILIENT_GRACE": str(launch.grace_seconds),
        "RESILIENT_NOTES": launch.notes,
        REQUIRE_SIGNATURE: "1" if launch.require_signature else "0",
        STRICT_RESUME: "1" if launch.strict_resume else "0",
        "RESILIENT_EVERY": launch.every,
        "RESILIENT_UNTIL_STEP": str(launch.until_step),
        **write_start(launch.start),
    }


def publish_repository(launch: LaunchEnv, url: str, *, saves_when_stopped: bool = False) -> None:
    """Report to the agent the repository that this worker opened. The agent inspects it.

    The function does not write a URL that may contain a secret, because the secret would be on the
    disk in plain text. Without the secret the URL would be useless to the agent.

    Args:
        launch: Start of this worker.
        url: URL of the repository.
        saves_when_stopped: Whether this worker handles SIGTERM while it trains. If not, SIGTERM
            loses unsaved work, and this function reports that to the agent.
    """
    if not launch.notes:
        return
    if not saves_when_stopped:
        _publish_value(launch, _UNSAVED, launch.attempt)
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query:
        return
    location = (
        url if "://" in url or url.startswith("file:") else str(Path(url).expanduser().absolute())
    )
    _publish_value(launch, _REPOSITORY, location)


def publish_event_file(launch: LaunchEnv, folder: Path) -> None:
    """Report the folder of this worker's events to the agent.

    Args:
        launch: Start of this worker.
        folder: Folder of the event files; it may not exist yet.
    """
    if launch.notes:
        _publish_value(launch, _EVENTS, str(folder.expanduser().absolute()))


def read_published_event_file(agent_folder: str) -> Path | None:
    """Return the folder of the workers' events, None if unknown.

    If a worker published only its repository, its events are beside its checkpoints. This applies
    only to a repository that is a folder of this host.

    Args:
        agent_folder: The agent's folder; empty if unknown.
    """
    if not agent_folder:
        return None
    if folder := _read_published_value(agent_folder, _EVENTS):
        return Path(folder)
    url = _read_published_value(agent_folder, _REPOSITORY)
    location = Path(url.removeprefix("file://"))
    return location / "events" if url.startswith(("/", "file:///")) and location.is_dir() else None


def read_published_repository(agent_folder: str) -> str:
    """Return the URL that a worker published in ``agent_folder``, empty if there is none."""
    return _read_published_value(agent_folder, _REPOSITORY)


def exited_without_save(agent_folder: str) -> str:
    """Return the last attempt in which a worker reported that SIGTERM loses its unsaved work."""
    return _read_published_value(agent_folder, _UNSAVED)


def _publish_value(launch: LaunchEnv, name: str, text: str) -> None:
    temporary_path = Path(launch.notes, f"{name}-{launch.world.local_rank}")
    # If the write fails, the agent only prints a less precise message.
    with suppress(OSError):
        temporary_path.write_text(text, encoding="utf-8")
        temporary_path.replace(Path(launch.notes, name))


def _read_published_value(agent_folder: str, name: str) -> str:
    try:
        return Path(agent_folder, name).read_text(encoding="utf-8")
    except OSError:
        return ""
