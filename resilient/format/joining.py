"""Receipts of all ranks, joined into what one manifest says."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.errors import IntegrityError
from resilient.format.regions import covers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from resilient.format.manifest import FileEntry, Receipt, StoredRegion, TensorEntry


def merge_files(receipts: Iterable[Receipt]) -> tuple[FileEntry, ...]:
    """Join the files that ranks stored; what several refer to stands there once.

    Raises:
        IntegrityError: two ranks disagree on a file.
    """
    merged: dict[str, FileEntry] = {}
    for receipt in receipts:
        for one in receipt.files:
            if merged.setdefault(one.name, one) != one:
                raise IntegrityError(f"ranks disagree on `{one.name}`", key=one.name)
    return tuple(merged.values())


def merge_tensors(receipts: Iterable[Receipt]) -> tuple[TensorEntry, ...]:
    """Join the regions that ranks wrote into whole tensors, in the order of names.

    Raises:
        IntegrityError: two ranks disagree on a tensor's dtype or shape, or a part is missing.
    """
    first: dict[str, TensorEntry] = {}
    regions: defaultdict[str, list[StoredRegion]] = defaultdict(list)
    for receipt in receipts:
        for one in receipt.tensors:
            known = first.setdefault(one.name, one)
            if (known.dtype, known.shape, known.part) != (one.dtype, one.shape, one.part):
                raise IntegrityError(
                    f"ranks disagree on `{one.name}`: {known.dtype}{list(known.shape)} and, "
                    f"on rank {receipt.rank}, {one.dtype}{list(one.shape)}",
                    tensor=one.name,
                )
            regions[one.name] += one.regions
    for tensor in first.values():
        if not covers(tensor.shape, [one.region for one in regions[tensor.name]]):
            raise IntegrityError(f"ranks left holes in `{tensor.name}`", tensor=tensor.name)
    return tuple(replace(first[name], regions=tuple(regions[name])) for name in sorted(first))
