"""Which tensors of a file are copied at once, and which can wait; kept for files known again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from resilient.state.copying import Copy
from resilient.state.steady import address_of, is_worth_waiting

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import torch

    from resilient.state.drafts import Draft


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The copies that fill one file.

    Attributes:
        steady: addresses of the storages that can wait.
        waiting: copies that can wait.
        sources: what cannot wait, or is not worth it.
        targets: where each of these goes.
    """

    steady: Collection[int]
    waiting: list[Copy]
    sources: list[torch.Tensor]
    targets: list[torch.Tensor]

    @classmethod
    def of(cls, file: Draft, into: Sequence[torch.Tensor], steady: Collection[int]) -> Split:
        """Return the copies of a file, those that wait for what is ``steady``."""
        split = cls(steady, [], [], [])
        for entry, source, target in zip(file.entries, file.sources, into, strict=True):
            if is_worth_waiting(source) and address_of(source) in steady:
                split.waiting.append(Copy(entry.name, source, target))
            else:
                split.sources.append(source)
                split.targets.append(target)
        return split


class Splits:
    """Remembers how the files that are there were split, as long as somebody else knows them."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Draft, Split] = WeakKeyDictionary()

    def of(self, file: Draft, into: Sequence[torch.Tensor], steady: Collection[int]) -> Split:
        """Return the copies of a file; none of those made before is under way.

        Args:
            file: what is staged.
            into: where its sources go; the same memory until ``forget`` is called.
            steady: addresses of storages that nobody changes for a while.
        """
        known = self._known.get(file)
        if known is None or known.steady != steady:
            known = self._known[file] = Split.of(file, into, steady)
            return known
        for one in known.waiting:
            one.renew()
        return known

    def forget(self, name: str) -> None:
        """Keep nothing that points into the memory of a file of this name."""
        for file in [one for one in self._known if one.name == name]:
            del self._known[file]
