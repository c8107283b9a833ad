"""Which tensors of a file are copied at once, and which can wait; kept for files known again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from resilient.state.copying import Copy, HostCopies
from resilient.state.steady import may_wait

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from resilient.state.drafts import Draft

_TOGETHER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The copies that fill one file.

    Attributes:
        steady: addresses of the storages that can wait.
        small: of those of them that can wait however small a tensor in them is.
        waiting: copies within host memory that can wait, some together.
        on_device: copies from a device that can wait.
        sources: what cannot wait.
        targets: where each of these goes.
    """

    steady: Collection[int]
    small: Collection[int]
    waiting: list[HostCopies]
    on_device: list[Copy]
    sources: list[torch.Tensor]
    targets: list[torch.Tensor]

    @classmethod
    def of(
        cls,
        file: Draft,
        into: Sequence[torch.Tensor],
        steady: Collection[int],
        small: Collection[int],
    ) -> Split:
        """Return the copies of a file, those that wait for what is ``steady``."""
        waiting: list[Copy] = []
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for entry, source, target in zip(file.entries, file.sources, into, strict=True):
            if may_wait(source, steady, small):
                waiting.append(Copy(entry.name, source, target))
            else:
                sources.append(source)
                targets.append(target)
        together = [*map(HostCopies, _together(one for one in waiting if not one.source.is_cuda))]
        on_device = [one for one in waiting if one.source.is_cuda]
        return cls(steady, small, together, on_device, sources, targets)


def _together(copies: Iterable[Copy]) -> Iterator[list[Copy]]:
    """Yield copies, small ones together, so that books are kept of few and two threads share."""
    some: list[Copy] = []
    size_bytes = 0
    for one in copies:
        some.append(one)
        size_bytes += one.source.nbytes
        if size_bytes >= _TOGETHER_BYTES:
            yield some
            some, size_bytes = [], 0
    if some:
        yield some


class Splits:
    """Remembers how the files that are there were split, as long as somebody else knows them."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Draft, Split] = WeakKeyDictionary()

    def of(
        self,
        file: Draft,
        into: Sequence[torch.Tensor],
        steady: Collection[int],
        small: Collection[int] = frozenset(),
    ) -> Split:
        """Return the copies of a file; none of those made before is under way.

        Args:
            file: what is staged.
            into: where its sources go; the same memory until ``forget`` is called.
            steady: addresses of storages that nobody changes for a while.
            small: of those of them that wait however small a tensor in them is.
        """
        known = self._known.get(file)
        if known is None or (known.steady, known.small) != (steady, small):
            known = self._known[file] = Split.of(file, into, steady, small)
            return known
        for one in known.waiting:
            one.renew()
        return known

    def forget(self, name: str) -> None:
        """Keep nothing that points into the memory of a file of this name."""
        for file in [one for one in self._known if one.name == name]:
            del self._known[file]


def has_core_left(ranks: int, cores: float) -> bool:
    """Say whether something can be copied while training goes on that takes no core from it.

    Args:
        ranks: of this host, that compute with as many threads as this one.
        cores: that they may use.
    """
    # Work on a device leaves the host's cores alone, and a device copies by itself.
    has_device = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return has_device or ranks * torch.get_num_threads() < cores
