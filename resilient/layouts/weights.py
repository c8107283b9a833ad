"""Weights of a model in one file or in many, as safetensors or as torch saves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.layouts.archives import open_archive
from resilient.layouts.documents import read_header, read_json
from resilient.layouts.shards import (
    ORPHAN,
    STALE,
    STEMS,
    contradictions,
    doubled,
    shards_in,
    unnamed,
)
from resilient.layouts.values import MODEL, Problem, Tensor, Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from resilient.storage.folder import Folder, Listing

SAFE = ".safetensors"
TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pth.tar", ".pt.tar")
_INDEXES = tuple(f"{stem}{end}.index.json" for stem in STEMS for end in (SAFE, ".bin"))


def read_file(folder: Folder, listing: Listing, name: str, part: str = MODEL) -> tuple[Tensor, ...]:
    """Return the tensors of one file.

    Raises:
        Unreadable: it is damaged, or hostile.
        StoreError: it could not be read.
    """
    if name.endswith(SAFE):
        return read_header(folder, listing, name, part)[0]
    return open_archive(folder, listing, name).tensors(part)


def read_weights(
    folder: Folder, listing: Listing, prefix: str = ""
) -> tuple[tuple[Tensor, ...], list[Problem]]:
    """Return the tensors of a model by the names Transformers gives its files, and what is wrong.

    Args:
        folder: where they are.
        listing: what is there.
        prefix: the folder in it, with a ``/`` at its end.
    """
    index = next((prefix + one for one in _INDEXES if prefix + one in listing.sizes), "")
    single = (prefix + stem + end for end in (SAFE, ".bin") for stem in STEMS)
    names = [one for one in single if listing.is_there(one)][:1]
    if names:
        stale = [Problem(index, STALE)] if index else []
        tensors, problems = read_all(folder, listing, names)
        return tensors, [*problems, *stale]
    found = shards_in((*listing.sizes, *listing.outside), prefix)
    if index:
        return _indexed(folder, listing, prefix, index, found.get(index, ()))
    named, shards = next(iter(found.items()), ("", []))
    tensors, problems = read_all(folder, listing, shards)
    lost = [unnamed(named, len(shards))] if shards else []
    return tensors, [*lost, *problems, *doubled(tensors)]


def _indexed(
    folder: Folder, listing: Listing, prefix: str, index: str, beside: Sequence[str]
) -> tuple[tuple[Tensor, ...], list[Problem]]:
    """Return the tensors of the shards that an index names, and what of both is wrong."""
    try:
        document = read_json(folder, listing, index)
    except Unreadable as error:
        return (), [Problem(index, str(error), is_fatal=True)]
    mapped = document.get("weight_map")
    if not isinstance(mapped, dict) or not all(isinstance(one, str) for one in mapped.values()):
        return (), [Problem(index, "it has no `weight_map` of names", is_fatal=True)]
    shards = sorted({f"{prefix}{one}" for one in mapped.values()})
    tensors, problems = read_all(folder, listing, shards)
    lacking = sorted(set(mapped) - {one.name for one in tensors})
    if lacking and not problems:
        what = f"{len(lacking)} of its tensors are in no file, `{lacking[0][:80]}` among them"
        problems.append(Problem(index, what, is_fatal=True))
    elif not problems:
        problems += doubled(tensors) or contradictions(index, document, prefix, tensors)
    return tensors, [*problems, *(Problem(one, ORPHAN) for one in beside if one not in shards)]


def read_all(
    folder: Folder, listing: Listing, names: Iterable[str], part: str = MODEL
) -> tuple[tuple[Tensor, ...], list[Problem]]:
    """Return the tensors of several files, and which files cannot be read."""
    tensors: list[Tensor] = []
    problems = []
    for name in names:
        try:
            tensors += read_file(folder, listing, name, part)
        except Unreadable as error:
            problems.append(Problem(name, str(error), is_fatal=True))
    return tuple(tensors), problems


def without(problems: Sequence[Problem], loses: str) -> list[Problem]:
    """Return the problems as those of a part that training can begin anew."""
    return [Problem(one.place, one.what, loses) for one in problems]
