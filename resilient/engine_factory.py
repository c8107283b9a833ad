"""Creation of a CheckpointEngine from a URL and options."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient import events
from resilient.checkpoint.context import CheckpointContext, CheckpointOptions
from resilient.checkpoint.daemon.factory import make_save_executor, use_daemon_promotion
from resilient.checkpoint.daemon.messages import DaemonAddress
from resilient.checkpoint.promotion import add_near_tier
from resilient.checkpoint.promotion_policy import TieringOptions, parse_tiering
from resilient.checkpoint.resume_policy import Claimant
from resilient.checkpoint.retention import Retention, parse_retention, require_count
from resilient.checkpoint.signing import read_signing
from resilient.checkpoint_engine import CheckpointEngine
from resilient.clock import SystemClock
from resilient.distributed.coordination import ControlGroup
from resilient.distributed.kv_store import InMemoryKVStore
from resilient.distributed.launch_env import World, read_storage_options
from resilient.errors import ConfigError
from resilient.processes import identify, identify_self
from resilient.storage.open import open_store
from resilient.storage.retry import with_retry_events

if TYPE_CHECKING:
    from resilient.distributed.kv_store import KVStore
    from resilient.distributed.launch_env import LaunchEnv
    from resilient.distributed.rank_group import RankGroup


def open_engine(  # noqa: PLR0913 - the composition root of library use
    url: str,
    world: World | None = None,
    board: KVStore | None = None,
    emit: events.Emitter | None = None,
    *,
    scope: str = "0",
    keep_last: int | None = None,
    retention: Retention | Mapping[str, Any] | None = None,
    within_seconds: float = 600.0,
    single_writer: bool = False,
    parity: int = 0,
    repair_on_restore: bool = True,
    save_unchanged: str = "refer",
    pace_seconds_max: float = 60.0,
    host_bytes_max: int | None = None,
    keeper: DaemonAddress | None = None,
    near_url: str = "",
    tiering: TieringOptions | Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    require_signature: bool = False,
) -> CheckpointEngine:
    """Return a checkpoint engine for the repository at ``url``.

    Crash: nothing was stored.

    Args:
        url: Repository of the checkpoints; a path or any fsspec URL.
        world: Rank and number of ranks; a single rank by default.
        board: Key-value store that connects the ranks; the engine opens its own connection.
            Required with several ranks.
        emit: Emitter of events; to stderr by default.
        scope: Name that is new for every attempt and every engine on the same key-value store, and
            equal on all ranks. The scope separates the answers of an earlier engine.
        keep_last: Number of checkpoints to keep; None keeps all.
        retention: Retention policy in place of ``keep_last``, or its fields by name for
            :func:`resilient.checkpoint.retention.parse_retention`.
        within_seconds: Deadline for one phase of a save or resume.
        single_writer: Promise of the user that no other job writes to this repository.
        parity: Number of lost files per rank that can be reconstructed bit for bit. Each costs
            about the size of the rank's longest file per save.
        repair_on_restore: Reconstruct damaged files from parity, in memory, instead of resuming
            from an older checkpoint.
        save_unchanged: ``refer`` does not write bytes again that the store already has, such as
            those of frozen weights. ``write`` makes every checkpoint self-contained.
        pace_seconds_max: Longest delay of a save by pauses of its thread or daemon while training
            uses all cores. The delay is at most half of the time between two saves, and no pause
            occurs while training waits. 0 disables the pauses.
        host_bytes_max: Memory of this process that a save without a saver daemon may use, without
            parity buffers. Larger state is streamed to the store while training waits. For a
            daemon, use ``resilient train --host-bytes-max``.
        keeper: Address of this host's saver daemon, as the launcher publishes it. All ranks have a
            daemon or none has.
        near_url: Second repository that takes every save and is read first, usually a folder on a
            local disk. ``url`` then receives only some saves and decides which run may write. All
            ranks must see the same near repository.
        tiering: Rule for the saves that are promoted to ``url`` and for those that stay near. By
            default all saves are promoted and two stay near. A
            :class:`~resilient.checkpoint.promotion_policy.TieringOptions`, or its fields by name,
            as ``{"durable_every": 5}``.
        storage_options: Endpoint, credentials and similar options for
            :func:`resilient.storage.open.open_store`; by default from
            ``RESILIENT_STORAGE_OPTIONS``. These options are never shown and never stored.
        require_signature: Read only checkpoints signed with the key of ``RESILIENT_SIGNING_KEY``
            or ``RESILIENT_SIGNING_KEY_FILE``. With a key every save is signed in any case.
            ``RESILIENT_REQUIRE_SIGNATURE`` has the same effect.

    Raises:
        ConfigError: The URL names no installed kind of storage, or several ranks have no key-value
            store. Also if a value is not accepted, or a required signature has no key.
    """
    world, clock = world or World(), SystemClock()
    _require_shared_repository(url, world, board)
    if retention is not None and keep_last is not None:
        raise ConfigError("`keep_last` and `retention` mean the same: use one of them")
    retention_policy = Retention(keep_last) if retention is None else _retention(retention)
    bounds = (within_seconds, single_writer, save_unchanged)
    limits = CheckpointOptions(
        retention_policy, *bounds, parity, repair_on_restore, pace_seconds_max
    )
    # A user's own loop has no other source of storage options.
    is_given = storage_options is not None
    options = mapping_of(storage_options) if is_given else read_storage_options(os.environ)
    signing = read_signing(os.environ, require_signature=require_signature)
    emit = emit or events.Emitter(clock, (events.console(),))
    context = CheckpointContext(
        store=with_retry_events(open_store(url, storage_options=options), emit),
        comms=ControlGroup(
            board.another() if board else InMemoryKVStore(), world, f"checkpointer/{scope}"
        ),
        limits=limits,
        clock=clock,
        emit=emit,
        signing=signing,
    )
    tiers = parse_tiering(tiering)
    if not near_url:
        return CheckpointEngine(context, make_save_executor(keeper, url, options, host_bytes_max))
    context = add_near_tier(context, open_store(near_url), tiers)
    if keeper is not None:
        keeper = replace(keeper, near_url=near_url, tiering=tiers)
    return CheckpointEngine(
        *use_daemon_promotion(context, make_save_executor(keeper, url, options, host_bytes_max))
    )


ARGUMENTS_OF_THE_LIBRARY = frozenset({"url", "world", "board", "scope", "keeper"})
"""Arguments of :func:`open_engine` that a user's own loop does not pass."""

_OPTIONS = frozenset(inspect.signature(open_engine).parameters) - ARGUMENTS_OF_THE_LIBRARY
_KEEP_LAST_ALIAS = "save_total_limit"
# A name close to one of these was meant as the option, for any value.
_OPTION_BY_NAME = {
    **{name: name for name in (*_OPTIONS, _KEEP_LAST_ALIAS, "overlap", "rng")},
    **{field.name: "retention" for field in fields(Retention) if field.name not in _OPTIONS},
    # Names of the same option in other libraries.
    **dict.fromkeys(
        ("keep_n", "max_checkpoints", "max_to_keep", "save_top_k", "total_limit"), "keep_last"
    ),
    # Names of the same option in the Trainer.
    **dict.fromkeys(("durable_every", "durable_every_seconds", "near_total_limit"), "tiering"),
    "near_repo": "near_url",
    "save_overlap": "overlap",
    "save_parity": "parity",
    "save_retention": "retention",
    "save_within_seconds": "within_seconds",
}
# Options of the Trainer that have another counterpart here.
_OTHER_COUNTERPARTS = {
    "on_save_failure": "save(), wait() and close() raise SaveFailed: catch it to continue training",
}
_SECRET = re.compile(
    r"secret|passw|credential|token$|(^|_)(api|access|account|signing|hmac|private)_?key",
    re.IGNORECASE,
)
_SIMILARITY_MIN = 0.8
_PLAIN_TYPES = (bool, int, float, str, bytes, list, tuple, dict, Retention, TieringOptions)


def split_options(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the arguments of a loop into options and things to save.

    Args:
        arguments: Arguments by name; ``save_total_limit`` is Hugging Face's name for ``keep_last``.

    Returns:
        The options and the things, both by name.

    Raises:
        ConfigError: A name is reserved, or a limit is given twice or invalid. Also raised if the
            name of a plain value resembles the name of an option or of a secret.
    """
    reserved_names = sorted(ARGUMENTS_OF_THE_LIBRARY & set(arguments))
    if reserved_names:
        raise ConfigError(f"`{reserved_names[0]}` is not allowed as a name: choose another name")
    options = {name: value for name, value in arguments.items() if name in _OPTIONS}
    objects = {
        name: value
        for name, value in arguments.items()
        if name not in _OPTIONS and name != _KEEP_LAST_ALIAS
    }
    for name, stateful in objects.items():
        _refuse_likely_mistake(name, stateful)
    limit = arguments.get(_KEEP_LAST_ALIAS)
    if limit is not None:
        require_count(_KEEP_LAST_ALIAS, limit)
        for name in ("keep_last", "retention"):
            if options.get(name) is not None:
                raise ConfigError(
                    f"`{_KEEP_LAST_ALIAS}` and `{name}` mean the same: use one of them"
                )
        options["keep_last"] = limit
    return options, objects


def mapping_of(storage_options: Any) -> Mapping[str, Any]:
    """Return storage options as a mapping; empty for None.

    Raises:
        ConfigError: The value is not a mapping. The error does not show the value, which may be a
            secret.
    """
    if storage_options is None:
        return {}
    if isinstance(storage_options, Mapping):
        return storage_options
    raise ConfigError(
        f"`storage_options` is a {type(storage_options).__name__}, not a mapping",
        hint='give names and values: storage_options={"endpoint": "http://127.0.0.1:9000"}',
    )


def _refuse_likely_mistake(name: str, value: Any) -> None:
    """Raise if the name of a plain value is a misspelt option or looks like that of a secret."""
    if value is not None and not isinstance(value, _PLAIN_TYPES):
        return
    override_hint = (
        f"to save it under that name anyway, pass {name}=Part(value), with resilient.Part"
    )
    if isinstance(value, str | bytes) and _SECRET.search(name):
        raise ConfigError(
            f"`{name}` would be saved in the checkpoint, in plain text for all its readers",
            hint="pass credentials in storage_options or RESILIENT_STORAGE_OPTIONS, and a signing "
            f"key in RESILIENT_SIGNING_KEY; {override_hint}",
        )
    if name in _OTHER_COUNTERPARTS:
        raise ConfigError(
            f"`{name}` is not an option here, and would be saved as state: "
            f"{_OTHER_COUNTERPARTS[name]}",
            hint=override_hint,
        )
    similar_names = get_close_matches(name.lower(), _OPTION_BY_NAME, n=1, cutoff=_SIMILARITY_MIN)
    if similar_names:
        raise ConfigError(
            f"`{name}` is not an option, and would be saved as state: did you mean "
            f"`{_OPTION_BY_NAME[similar_names[0]]}`?",
            hint=override_hint,
        )


def _retention(option: Any) -> Retention:
    """Return a retention policy from a policy or from its fields by name.

    Raises:
        ConfigError: The value is neither.
    """
    if isinstance(option, Retention):
        return option
    if isinstance(option, Mapping):
        return parse_retention(option)
    raise ConfigError(
        f"`retention`={option!r} is not accepted: it is a {type(option).__name__}",
        hint='give resilient.Retention(keep_last=3), or its fields: retention={"keep_last": 3}',
    )


def _require_shared_repository(url: str, world: World, kv_store: KVStore | None) -> None:
    """Require that several ranks have a key-value store and save to one place.

    Raises:
        ConfigError: The ranks have no key-value store, or ``url`` is the memory of one process.
    """
    if kv_store is None and world.size > 1:
        raise ConfigError(f"{world.size} ranks need a key-value store to agree on checkpoints")
    if url.startswith("memory:") and world.size > 1:
        raise ConfigError(
            f"`{url}` is the memory of one process, and {world.size} ranks would each save to "
            "their own",
            hint="use a folder or a bucket that all ranks reach",
        )


def events_file(rank_group: RankGroup) -> Path | None:
    """Return the events file of this rank, if the launcher set a folder."""
    folder = rank_group.launch.events
    return Path(folder).absolute() / f"rank-{rank_group.world.rank}.jsonl" if folder else None


def keeper_of(rank_group: RankGroup) -> DaemonAddress | None:
    """Return the address of this host's saver daemon, if the launcher has started one."""
    launch = rank_group.launch
    if not launch.keeper:
        return None
    return DaemonAddress(launch.keeper, launch.host, events=str(events_file(rank_group) or ""))


def claimant_of(launch: LaunchEnv) -> Claimant:
    """Return the process that claims the generation: the agent, or else this process."""
    process = identify(launch.agent_pid) if launch.agent_pid else identify_self()
    return Claimant(
        process, takes_over=launch.takes_over, heartbeat_seconds=launch.heartbeat_seconds
    )
