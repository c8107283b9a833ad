"""The parts of a page that is served which are made when somebody wants to see them."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlencode

from resilient.errors import IncompatibleCheckpoint, IntegrityError, KeyNotFound
from resilient.format.names import parse_checkpoint
from resilient.vault.registry.catalog import read_manifest
from resilient_cli.listed import HeardStore
from resilient_cli.page.desk import Desk
from resilient_cli.page.stored import verified
from resilient_cli.survey import Level, examine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.clock import Clock
    from resilient.comparison.values import Side
    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store

    Told = Callable[[int, int], None]


class Parts:
    """Answers for the checkpoints of one repository, and for nothing else. Any thread.

    Args:
        store: says where they are; asked each time, for a run may just have begun.
        clock: time.
    """

    def __init__(self, store: Callable[[], Store | None], clock: Clock) -> None:
        self._store = store
        self._desk = Desk(clock)

    def close(self) -> None:
        """Make nothing more."""
        self._desk.close()

    def part(self, name: str, asked: Mapping[str, str]) -> tuple[int, str] | None:
        """Return a status and HTML, or None if there is no such part.

        Args:
            name: which one.
            asked: of what: checkpoints and a tensor, by name.
        """
        needs: Mapping[str, tuple[tuple[str, ...], Callable[..., str]]] = {
            "tensors": (("of",), _tensors),
            "histogram": (("of", "name"), _histogram),
            "compare": (("a", "b"), _compare),
            "both": (("a", "b", "name"), _both),
            "verify": (("of",), _verify),
        }
        if name not in needs:
            return None
        fields, make = needs[name]
        store = self._store()
        if store is None or set(asked) != set(fields):
            return 404, "there is nothing of that name"
        ids = [parse_checkpoint(asked[one]) for one in fields if one != "name"]
        known = [one for one in ids if one is not None and _is_there(store, one)]
        if len(known) != len(ids):
            return 404, "there is no such checkpoint any more"
        rest = [asked["name"]] if "name" in fields else []
        key = (name, *(asked[one] for one in fields))
        # What is committed does not change; what has become of its bytes may.
        is_once = make is _verify
        return self._desk.ask(key, lambda told: make(store, told, *known, *rest), is_once=is_once)


def _is_there(store: Store, checkpoint: CheckpointId) -> bool:
    try:
        store.stat(checkpoint.manifest_key)
    except KeyNotFound:
        return False
    return True


def _side(store: Store, checkpoint: CheckpointId) -> Side:
    from resilient.comparison.ours import side_of  # it needs numpy, which nobody else does

    return side_of(store, read_manifest(store, checkpoint))


def _tensors(store: Store, _: Told, of: CheckpointId) -> str:
    from resilient_cli.page.tensors import tensors

    return tensors(
        _side(store, of),
        load=lambda name: f"histogram?{urlencode({'of': of.folder, 'name': name})}",
    )


def _histogram(store: Store, told: Told, of: CheckpointId, name: str) -> str:
    from resilient_cli.page.pictures import picture_of

    return picture_of(_side(store, of), name, told)


def _compare(store: Store, told: Told, a: CheckpointId, b: CheckpointId) -> str:
    from resilient.comparison.comparing import compare
    from resilient_cli.page.compared import comparison

    found = compare(_side(store, a), _side(store, b), told=told)
    pair = {"a": a.folder, "b": b.folder}
    return comparison(found, load=lambda name: f"both?{urlencode({**pair, 'name': name})}")


def _both(store: Store, told: Told, a: CheckpointId, b: CheckpointId, name: str) -> str:
    from resilient_cli.page.pictures import picture_of_both

    return picture_of_both(_side(store, a), _side(store, b), name, told)


def _verify(store: Store, told: Told, of: CheckpointId) -> str:
    try:
        size_bytes = read_manifest(store, of).size_bytes
    except (IncompatibleCheckpoint, IntegrityError):
        size_bytes = 0  # that is what will be found
    heard = HeardStore(store, lambda done: told(min(done, size_bytes), size_bytes))
    return verified(examine(heard, of, Level.DEEP), Level.DEEP)
