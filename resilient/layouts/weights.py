"""Weights of a model in one file or in many, as safetensors or as torch saves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.layouts.archives import open_archive
from resilient.layouts.documents import read_header, read_json
from resilient.layouts.values import MODEL, Problem, Tensor, Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from resilient.storage.folder import Folder, Listing

SAFE = ".safetensors"
TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
STEMS = ("model", "pytorch_model", "adapter_model", "diffusion_pytorch_model")
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
    names = [one for one in single if one in listing.sizes][:1]
    if names or not index:
        return read_all(folder, listing, names)
    try:
        mapped = read_json(folder, listing, index).get("weight_map")
    except Unreadable as error:
        return (), [Problem(index, str(error), is_fatal=True)]
    if not isinstance(mapped, dict) or not all(isinstance(one, str) for one in mapped.values()):
        return (), [Problem(index, "it has no `weight_map` of names", is_fatal=True)]
    shards = sorted({f"{prefix}{one}" for one in mapped.values()})
    tensors, problems = read_all(folder, listing, shards)
    lacking = sorted(set(mapped) - {one.name for one in tensors})
    if lacking and not problems:
        what = f"{len(lacking)} of its tensors are in no file, `{lacking[0][:80]}` among them"
        problems.append(Problem(index, what, is_fatal=True))
    return tensors, problems


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
