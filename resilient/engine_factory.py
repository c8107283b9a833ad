"""From a URL to a Checkpointer: the composition root of a loop of one's own."""

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
from resilient.checkpoint.live_writer import Claimant
from resilient.checkpoint.promotion import add_near_tier
from resilient.checkpoint.promotion_policy import TieringOptions, parse_tiering
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
    """Return a checkpointer for the repository at ``url``.

    Crash: nothing was stored.

    Args:
        url: where checkpoints live; a path or any fsspec URL.
        world: who this rank is; alone by default.
        board: where ranks meet; the checkpointer opens a connection of its own. Several ranks
            need one.
        emit: where events go; to stderr by default.
        scope: new for every life and every checkpointer on the same board, and the same on all
            ranks; what an earlier one left on the board is not mistaken for an answer.
        keep_last: how many checkpoints to keep; None keeps all.
        retention: the same and more, in place of ``keep_last``; or its fields by name, as
            :func:`resilient.checkpoint.retention.parse_retention` takes them.
        within_seconds: how long one phase of a save or resume may take.
        single_writer: the user promises that no other job writes there.
        parity: how many files of each rank's may be lost and be computed back, bit for bit; each
            costs about the longest of them per save.
        repair_on_restore: compute damaged files back from parity, in memory, instead of resuming
            from an older checkpoint.
        save_unchanged: ``refer``: bytes that the store has already, as those of frozen weights,
            are not written again; ``write``: every checkpoint stands for itself.
        pace_seconds_max: how long a save may take to be durable because whoever persists it, a
            thread or a keeper, rests while training uses all cores; never more than half of the
            time between two saves, and no rest at all for whoever waits. 0 for saves that never
            rest.
        host_bytes_max: how much memory of this process a save may take where no keeper does it;
            what parity computes comes on top. State that is larger is streamed to the store,
            while training waits. A keeper has ``resilient train --host-bytes-max``.
        keeper: where this host's keeper is, as the launcher says; all ranks have one or none.
        near_url: a second repository that takes every save and is read first, mostly a folder on
            a local disk; ``url`` then gets only some of them and decides who may write. All ranks
            must see the same one.
        tiering: which saves go on from there to ``url``, and what stays near; by default all go
            on and two stay. A :class:`~resilient.checkpoint.promotion_policy.TieringOptions`, or its fields by
            name, as ``{"durable_every": 5}``.
        storage_options: endpoint, credentials and the like, as
            :func:`resilient.storage.open.open_store` takes them; by default those of
            ``RESILIENT_STORAGE_OPTIONS``. Never shown, never stored.
        require_signature: read only what was signed with the key of ``RESILIENT_SIGNING_KEY`` or
            ``RESILIENT_SIGNING_KEY_FILE``; with a key every save is signed in any case.
            ``RESILIENT_REQUIRE_SIGNATURE`` asks for the same.

    Raises:
        ConfigError: the URL names no kind of storage that is installed, several ranks have no
            board, a value is not accepted, or a signature is required and there is no key.
    """
    world, clock = world or World(), SystemClock()
    _require_common(url, world, board)
    if retention is not None and keep_last is not None:
        raise ConfigError("`keep_last` and `retention` say the same: use one of them")
    kept = Retention(keep_last) if retention is None else _retention(retention)
    bounds = (within_seconds, single_writer, save_unchanged)
    limits = CheckpointOptions(kept, *bounds, parity, repair_on_restore, pace_seconds_max)
    # A loop of the user's own has no other place that could ask for them.
    is_said = storage_options is not None
    options = mapping_of(storage_options) if is_said else read_storage_options(os.environ)
    signing = read_signing(os.environ, require_signature=require_signature)
    emit = emit or events.Emitter(clock, (events.console(),))
    desk = CheckpointContext(
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
        return CheckpointEngine(desk, make_save_executor(keeper, url, options, host_bytes_max))
    desk = add_near_tier(desk, open_store(near_url), tiers)
    if keeper is not None:
        keeper = replace(keeper, near_url=near_url, tiering=tiers)
    return CheckpointEngine(
        *use_daemon_promotion(desk, make_save_executor(keeper, url, options, host_bytes_max))
    )


FOUND_BY_THE_LOOP = frozenset({"url", "world", "board", "scope", "keeper"})
"""Arguments of :func:`open_checkpointer` that nobody gives a loop of one's own."""

_OPTIONS = frozenset(inspect.signature(open_engine).parameters) - FOUND_BY_THE_LOOP
_LIMIT = "save_total_limit"
# What is close to one of these was meant to be it, whatever is saved under such a name.
_MEANT = {
    **{name: name for name in (*_OPTIONS, _LIMIT, "overlap", "rng")},
    **{one.name: "retention" for one in fields(Retention) if one.name not in _OPTIONS},
    # What others call it.
    **dict.fromkeys(
        ("keep_n", "max_checkpoints", "max_to_keep", "save_top_k", "total_limit"), "keep_last"
    ),
    # What the trainer calls it.
    **dict.fromkeys(("durable_every", "durable_every_seconds", "near_total_limit"), "tiering"),
    "near_repo": "near_url",
    "save_overlap": "overlap",
    "save_parity": "parity",
    "save_retention": "retention",
    "save_within_seconds": "within_seconds",
}
# What has its place elsewhere.
_ELSEWHERE = {
    "on_save_failure": "save(), wait() and close() raise SaveFailed: catch it to train on",
}
_SECRET = re.compile(
    r"secret|passw|credential|token$|(^|_)(api|access|account|signing|hmac|private)_?key",
    re.IGNORECASE,
)
_ALIKE_MIN = 0.8
_PLAIN = (bool, int, float, str, bytes, list, tuple, dict, Retention, TieringOptions)


def split_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options among what a loop names, and the things that it wants saved.

    Args:
        given: by name; ``save_total_limit`` is ``keep_last``, as Hugging Face calls it.

    Raises:
        ConfigError: a name is taken, a limit is given twice or is none, or a plain value has a
            name so close to an option's that it was meant to be one, or a secret's.
    """
    taken = sorted(FOUND_BY_THE_LOOP & set(given))
    if taken:
        raise ConfigError(f"`{taken[0]}` cannot name a thing to save: choose another name")
    options = {name: one for name, one in given.items() if name in _OPTIONS}
    things = {name: one for name, one in given.items() if name not in _OPTIONS and name != _LIMIT}
    for name, thing in things.items():
        _refuse_slip(name, thing)
    limit = given.get(_LIMIT)
    if limit is not None:
        require_count(_LIMIT, limit)
        for name in ("keep_last", "retention"):
            if options.get(name) is not None:
                raise ConfigError(f"`{_LIMIT}` and `{name}` say the same: use one of them")
        options["keep_last"] = limit
    return options, things


def mapping_of(storage_options: Any) -> Mapping[str, Any]:
    """Return storage options, none for None.

    Raises:
        ConfigError: they are no mapping; what they are is not shown, for it may be a secret.
    """
    if storage_options is None:
        return {}
    if isinstance(storage_options, Mapping):
        return storage_options
    raise ConfigError(
        f"`storage_options` is a {type(storage_options).__name__}, and no mapping",
        hint='give names and values: storage_options={"endpoint": "http://127.0.0.1:9000"}',
    )


def _refuse_slip(name: str, thing: Any) -> None:
    """Raise if a plain value has a name as an option that somebody misspelt, or as a secret."""
    if thing is not None and not isinstance(thing, _PLAIN):
        return
    anyway = (
        f"to save it under that name all the same, give {name}=Part(value), with resilient.Part"
    )
    if isinstance(thing, str | bytes) and _SECRET.search(name):
        raise ConfigError(
            f"`{name}` would be saved as a thing, in plain text for all who read checkpoints",
            hint="credentials go into storage_options or RESILIENT_STORAGE_OPTIONS, and a key that "
            f"signs into RESILIENT_SIGNING_KEY; {anyway}",
        )
    if name in _ELSEWHERE:
        raise ConfigError(
            f"`{name}` is no option here, and would be saved as a thing: {_ELSEWHERE[name]}",
            hint=anyway,
        )
    close = get_close_matches(name.lower(), _MEANT, n=1, cutoff=_ALIKE_MIN)
    if close:
        raise ConfigError(
            f"`{name}` is no option, and would be saved as a thing: did you mean "
            f"`{_MEANT[close[0]]}`?",
            hint=anyway,
        )


def _retention(wished: Any) -> Retention:
    """Return a retention, or what its fields by name say.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(wished, Retention):
        return wished
    if isinstance(wished, Mapping):
        return parse_retention(wished)
    raise ConfigError(
        f"`retention`={wished!r} is not accepted: it is a {type(wished).__name__}",
        hint='give resilient.Retention(keep_last=3), or its fields: retention={"keep_last": 3}',
    )


def _require_common(url: str, world: World, board: KVStore | None) -> None:
    """Require that several ranks meet somewhere and save to one place.

    Raises:
        ConfigError: they do not.
    """
    if board is None and world.size > 1:
        raise ConfigError(f"{world.size} ranks need a board to agree on checkpoints")
    if url.startswith("memory:") and world.size > 1:
        raise ConfigError(
            f"`{url}` is the memory of one process, and {world.size} ranks would each save to "
            "their own",
            hint="use a folder or a bucket that all ranks reach",
        )


def events_file(gang: RankGroup) -> Path | None:
    """Return where this rank's events go, if the launcher says so."""
    folder = gang.launch.events
    return Path(folder).absolute() / f"rank-{gang.world.rank}.jsonl" if folder else None


def keeper_of(gang: RankGroup) -> DaemonAddress | None:
    """Return where this host's keeper is, if the launcher has started one."""
    launch = gang.launch
    if not launch.keeper:
        return None
    return DaemonAddress(launch.keeper, launch.host, events=str(events_file(gang) or ""))


def claimant_of(launch: LaunchEnv) -> Claimant:
    """Return the process that a launch stands for: its agent, or this process without one."""
    process = identify(launch.agent_pid) if launch.agent_pid else identify_self()
    return Claimant(process, takes_over=launch.takes_over)
