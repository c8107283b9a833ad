"""What is known of checkpoints: manifest and findings, as one value each."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from resilient.errors import IntegrityError, KeyNotFound
from resilient.format.names import MANIFEST
from resilient.format.signature import UNSIGNED
from resilient.vault.health.verify import MISSING, verify
from resilient.vault.registry.catalog import lineage, read_manifest
from resilient.vault.registry.tags import list_tags, read_tag

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.format.manifest import Manifest
    from resilient.format.names import CheckpointId
    from resilient.format.signature import Signing
    from resilient.storage.store import Store
    from resilient.vault.health.verify import Finding


class Level(StrEnum):
    """How closely to look."""

    QUICK = "quick"
    FULL = "full"
    DEEP = "deep"


@dataclass(frozen=True, slots=True)
class Survey:
    """One checkpoint; without a manifest when this release cannot read it."""

    checkpoint: CheckpointId
    manifest: Manifest | None
    findings: tuple[Finding, ...]

    @property
    def damaged(self) -> bool:
        """Whether something that was committed is not there any more."""
        return any(one.severity == "damaged" for one in self.findings)

    @property
    def intact(self) -> bool:
        """Whether resume can take it, as far as the level looked."""
        return self.manifest is not None and not self.damaged

    @property
    def state(self) -> str:
        """The word for it."""
        if self.damaged:
            return "DAMAGED"
        return "warning" if self.findings else "ok"

    @property
    def absent_ranks(self) -> tuple[int, ...]:
        """The ranks of which no file is here, if all files of the others are whole; else none.

        So looks what one host holds of a near tier, whose rest is on the other hosts.
        """
        if self.manifest is None or not self.damaged:
            return ()
        wrong = {one.file: one.problem for one in self.findings if one.severity == "damaged"}
        owners = {one.name: one.rank for one in self.manifest.files}
        if not wrong.keys() <= owners.keys() or set(wrong.values()) != {MISSING}:
            return ()
        absent = {owners[name] for name in wrong}
        whole = {rank for name, rank in owners.items() if name not in wrong}
        return () if absent & whole or not whole else tuple(sorted(absent))

    @property
    def size_bytes(self) -> int:
        """Bytes that the manifest speaks of, 0 without one."""
        return self.manifest.size_bytes if self.manifest else 0


def survey(
    store: Store,
    checkpoints: Iterable[CheckpointId],
    level: Level,
    signing: Signing = UNSIGNED,
) -> list[Survey]:
    """Examine checkpoints; one that is rotated away meanwhile is left out, not called damaged."""
    found = []
    for checkpoint in checkpoints:
        with suppress(KeyNotFound):
            found.append(examine(store, checkpoint, level, signing))
    return found


def examine(
    store: Store, checkpoint: CheckpointId, level: Level, signing: Signing = UNSIGNED
) -> Survey:
    """Return what is known of one checkpoint; damage is a value here, not an error.

    Raises:
        KeyNotFound: it has no manifest, or lost it to rotation while it was read.
    """
    findings = tuple(verify(store, checkpoint, level.value, signing))
    if any(one.file == MANIFEST for one in findings):
        return Survey(checkpoint, None, findings)
    # Rotation deletes the manifest first, so files that are gone count only while it is there.
    return Survey(checkpoint, read_manifest(store, checkpoint), findings)


def first_intact(
    store: Store,
    known: Mapping[CheckpointId, bool],
    level: Level,
    signing: Signing = UNSIGNED,
) -> CheckpointId | None:
    """Return where training would resume; reads further candidates only until one is intact.

    Args:
        store: the repository.
        known: checkpoints that were examined, and whether each is intact.
        level: how closely to look at others.
        signing: whether only what is signed counts, and by which key.
    """
    states = dict(known)
    for candidate in lineage(store).candidates:
        if candidate not in states:
            states |= {
                one.checkpoint: one.intact for one in survey(store, [candidate], level, signing)
            }
        if states.get(candidate):
            return candidate
    return None


def tags_of(store: Store) -> dict[str, CheckpointId | None]:
    """Return what each tag names, None for a damaged one."""
    found: dict[str, CheckpointId | None] = {}
    for name in list_tags(store):
        with suppress(KeyNotFound):
            try:
                found[name] = read_tag(store, name).checkpoint
            except IntegrityError:
                found[name] = None
    return found
