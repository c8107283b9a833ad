"""Whether training can go on from a checkpoint of ours, and what to run next."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from resilient.layouts.values import Verdict
from resilient.showing import quoted
from resilient.vault.health.verify import repair_command

if TYPE_CHECKING:
    from resilient.format.manifest import Manifest
    from resilient.storage.store import Store
    from resilient_cli.survey import Survey

_OF_A_TRAINER = "trainer_state"
# What a Trainer goes on without when it is not there, with one as new in its place.
_LOSSES = {
    "optimizer": "the optimizer's state",
    "scheduler": "the schedule",
    "rng_state": "the random state",
    "data": "the place in the data",
}
_NAMED_MAX = 4


def judge_ours(store: Store, manifest: Manifest, found: Survey) -> Verdict:
    """Return the verdict of a checkpoint.

    Args:
        store: the repository.
        manifest: its table of contents.
        found: what is known of its files.
    """
    checkpoint = manifest.checkpoint
    wrong = [one for one in found.findings if one.severity == "damaged"]
    if wrong:
        why = tuple(f"{one.file}: {one.problem}" for one in wrong[:_NAMED_MAX])
        return Verdict("no", why, repair_command(store, checkpoint))
    lost = _losses(manifest)
    repo = shlex.quote(store.url)
    command = f"resilient train SCRIPT --repo {quoted(repo)} --resume {checkpoint}"
    return Verdict("partly" if lost else "yes", lost, command)


def _losses(manifest: Manifest) -> tuple[str, ...]:
    """Return what a Trainer's checkpoint lacks; another loop's holds what it was given."""
    names = {one.name for one in manifest.parts}
    if _OF_A_TRAINER not in names:
        return ()
    # Each rank has random numbers of its own, and a part that is named after it.
    there = names | {name.rpartition("_")[0] for name in names}
    return tuple(said for name, said in _LOSSES.items() if name not in there)
