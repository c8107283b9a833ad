"""``ckpt verify --sample --max-duration``: checkpoints, some of whose bytes were read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import SystemRandom
from typing import TYPE_CHECKING, Any, Self

from resilient.clock import SystemClock
from resilient.errors import UsageError
from resilient.vault.health.sampling import read_sample
from resilient_cli.lengths import seconds_of, share_of
from resilient_cli.progress import Progress
from resilient_cli.survey import Level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.storage.store import Store
    from resilient.vault.health.sampling import Sample
    from resilient_cli.survey import Survey


@dataclass(frozen=True, slots=True)
class Wish:
    """How much to read.

    Attributes:
        share: of all chunks.
        seconds: for how long at most; 0 for as long as it takes.
    """

    share: float = 1.0
    seconds: float = 0.0

    @property
    def is_some(self) -> bool:
        """Whether not all is to be read."""
        return self.share < 1 or self.seconds > 0

    @classmethod
    def of(cls, sample: str, max_duration: str, level: Level) -> Self:
        """Return what the options say.

        Raises:
            UsageError: they are no share and no length, or the level does not read part of a file.
        """
        if (sample or max_duration) and level is not Level.FULL:
            raise UsageError(
                f"--sample and --max-duration read some of the bytes; --level {level} does not",
                hint="resilient ckpt verify --all REPO --sample 5%",
            )
        return cls(
            share_of(sample, "--sample") if sample else 1.0,
            seconds_of(max_duration, "--max-duration") if max_duration else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """What was read.

    Attributes:
        wish: how much was to be.
        sample: what was.
        surveys: the checkpoints, with what was found in it.
        is_over: the time was, before everything was read that had been chosen.
    """

    wish: Wish
    sample: Sample
    surveys: list[Survey]
    is_over: bool

    def to_json(self) -> dict[str, Any]:
        """Return how much was read."""
        return {
            "share": self.wish.share,
            "chunks": self.sample.chunks,
            "of": self.sample.of,
            "size_bytes": self.sample.size_bytes,
            "is_over": self.is_over,
        }


def read_some(store: Store, surveys: Sequence[Survey], wish: Wish) -> Part:
    """Read some of the bytes of checkpoints whose presence and sizes were looked at.

    Args:
        store: the repository.
        surveys: the checkpoints; those without a manifest have nothing to read.
        wish: how much.
    """
    clock = SystemClock()
    until = clock.monotonic_seconds() + wish.seconds
    over = []
    with Progress("reading", clock) as told:

        def goes_on(done: int, of: int) -> bool:
            told(done, of)
            if wish.seconds and clock.monotonic_seconds() >= until:
                over.append(done)
            return not over

        manifests = [one.manifest for one in surveys if one.manifest]
        sample = read_sample(store, manifests, wish.share, SystemRandom(), goes_on)
    return Part(wish, sample, [_with(one, sample) for one in surveys], bool(over))


def _with(one: Survey, sample: Sample) -> Survey:
    """Add what was found in the bytes; a file that is short or missing was told of already."""
    known = {finding.file for finding in one.findings}
    new = [it for it in sample.findings.get(one.checkpoint, ()) if it.file not in known]
    return replace(one, findings=(*one.findings, *new))
