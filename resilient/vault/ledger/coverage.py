"""Records to the samples that they cover: each once, in order, none between them (pure)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from resilient.format.ledger import Place

if TYPE_CHECKING:
    from collections.abc import Callable

ORDERS = ("computed anew", "one in all lives", "not known")


@dataclass(slots=True)
class Epoch:
    """What became of the samples of one epoch.

    Attributes:
        number: from 0.
        size: samples in the dataset; 0 where it has no length, or nobody said.
        before: samples that were used up before the ledger began.
        trained: samples that steps used up, each once.
        left_out: samples that were left out on purpose.
        repeated: samples that were trained on once more, to complete a last round for all ranks.
        order: how its order is known, one of ``ORDERS``.
        digest: of its order.
    """

    number: int
    size: int = 0
    before: int = 0
    trained: int = 0
    left_out: int = 0
    repeated: int = 0
    order: str = ORDERS[2]
    digest: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether every sample was used up or left out on purpose."""
        return self.size > 0 and self.before + self.trained + self.left_out == self.size


class Gap(Exception):
    """A record does not go on where the one before it ended."""


@dataclass(slots=True)
class Coverage:
    """Follows records in the order of the chain; the one that does not fit raises ``Gap``.

    Attributes:
        place: where the last record ended.
        expected: digest of an order by kind, size, seed and epoch; empty if nobody can compute it.
        epochs: by number.
        ranks: numbers of ranks that shared the data, one after the other, without repetition.
        left_out: reasons for which samples were left out, with how many.
        steps: optimizer steps.
        idle: of them, those that changed nothing, as of an overflow in half precision.
    """

    place: Place
    expected: Callable[[str, int, int, int], str]
    epochs: dict[int, Epoch] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    idle: int = 0

    def __post_init__(self) -> None:
        if self.place.samples:
            number, before = self.place.epoch, self.place.samples
            self.epochs[number] = Epoch(number, before=before)

    def follow(self, row: str) -> None:
        """Take the next record.

        Raises:
            Gap: it does not fit what came before.
        """
        kind, *values = json.loads(row)
        try:
            if kind == "step":
                self._step(*values)
            elif kind == "skip":
                self._skip(*values)
            elif kind == "order":
                self._order(*values)
            else:
                raise Gap(f"a record of unknown kind {kind!r}")
        except (TypeError, ValueError) as error:
            raise Gap(f"no record of kind `{kind}`: {error}") from error

    def finish(self, epoch: int, samples: int) -> None:
        """Hold the end of the records against where the checkpoint says that its data is.

        Raises:
            Gap: it is elsewhere.
        """
        place = self.place
        if (epoch, samples) == (place.epoch, place.samples):
            return
        if (epoch, samples) == (place.epoch + 1, 0):
            self._leave(place.epoch)
            return
        raise Gap(
            f"the checkpoint is at epoch {epoch}, sample {samples}, and the ledger ends at "
            f"epoch {place.epoch}, sample {place.samples}"
        )

    def _step(self, *values: int) -> None:
        first, last, epoch, start, stop, rounds, batch, seats, ranks, updates, _loss = values
        if first != self.place.step + 1 or last < first:
            raise Gap(f"steps {first} to {last} come after step {self.place.step}")
        which = "step " + (f"{first}" if first == last else f"{first} to {last}")
        one = self._enter(which, epoch, start)
        self._advance(which, one, start, stop)
        dealt, taken = rounds * batch * seats, stop - start
        # A round that is not full is the last of its epoch; one rank alone does not fill it.
        is_tail = dealt > taken and (not one.size or stop == one.size)
        if not 0 < taken <= dealt or (dealt > taken and not is_tail):
            raise Gap(
                f"{which} used up samples {start} to {stop} of epoch {epoch} with {rounds} rounds "
                f"of {seats} x {batch}: they are {dealt}"
            )
        one.trained += taken
        one.repeated += dealt - taken if seats > 1 else 0
        if self.ranks[-1:] != [ranks]:
            self.ranks.append(ranks)
        self.place = Place(last, epoch, stop)
        self.steps += last - first + 1
        self.idle += last - first + 1 - updates

    def _skip(self, epoch: int, start: int, stop: int, reason: str) -> None:
        one = self._enter(f"what was left out ({reason})", epoch, start)
        self._advance(reason, one, start, stop)
        one.left_out += stop - start
        self.left_out[reason] = self.left_out.get(reason, 0) + stop - start
        self.place = replace(self.place, epoch=epoch, samples=stop)

    def _order(self, epoch: int, size: int, seed: int, kind: str, digest: str) -> None:
        one = self.epochs.setdefault(epoch, Epoch(epoch))
        if (one.digest and digest and one.digest != digest) or (one.size and one.size != size):
            raise Gap(
                f"epoch {epoch} goes on in another order than it began in, so that samples come "
                "twice or never"
            )
        if digest and not one.digest:
            expected = self.expected(kind, size, seed, epoch)
            if expected and expected != digest:
                raise Gap(f"the order of epoch {epoch} is not that of seed {seed}")
            one.order, one.digest = ORDERS[0 if expected else 1], digest
        one.size = size

    def _enter(self, what: str, epoch: int, start: int) -> Epoch:
        """Return the epoch of a record that begins at ``start``."""
        place = self.place
        if epoch == place.epoch + 1 and place.samples:
            self._leave(place.epoch)
            place = Place(place.step, epoch, 0)
        if (epoch, start) == (place.epoch, place.samples):
            return self.epochs.setdefault(epoch, Epoch(epoch))
        if epoch == place.epoch:
            seen = "twice" if start < place.samples else "never"
            low, high = sorted((start, place.samples))
            raise Gap(f"{what} begins at sample {start} of epoch {epoch} where {place.samples} "
                      f"comes next: samples {low} to {high} were trained {seen}")  # fmt: skip
        raise Gap(
            f"{what} is at epoch {epoch}, sample {start}, and the record before it ends at "
            f"epoch {place.epoch}, sample {place.samples}"
        )

    def _leave(self, epoch: int) -> None:
        one = self.epochs.get(epoch, Epoch(epoch))
        if one.size and self.place.samples != one.size:
            raise Gap(
                f"epoch {epoch} ends at sample {self.place.samples} of {one.size}, and nothing "
                "says that the rest was left out"
            )

    def _advance(self, what: str, one: Epoch, start: int, stop: int) -> None:
        if stop < start or (one.size and stop > one.size):
            raise Gap(f"{what}: samples {start} to {stop} of {one.size} cannot be")
