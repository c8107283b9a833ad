"""Names and texts inside a checkpoint that talk to the terminal of whoever lists them.

Control characters move its cursor and change its title, and marks of direction let a text read as
another one than it is. Looked at is what readers show: names of tensors and of files, and what a
Trainer's state and a configuration say. The words of a tokenizer may have any characters.
"""

from __future__ import annotations

import unicodedata
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from resilient.layouts.archives import open_archive
from resilient.layouts.distributed import INDEX, read_index
from resilient.layouts.documents import read_header, read_json
from resilient.layouts.values import MODEL, Unreadable
from resilient.layouts.weights import SAFE, TORCH

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from resilient.storage.folder import Folder, Listing

_TALKING = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Classes of Unicode: controls, marks of direction and joiners, halves, ends of lines."""
_DOCUMENTS = ("trainer_state.json", "config.json")
_INDEX = ".index.json"
_SHOWN_MAX = 80
_DEPTH_MAX = 4


def talks(text: str) -> bool:
    """Say whether a text has characters that a terminal obeys, or that hide what it says."""
    return any(unicodedata.category(one) in _TALKING for one in text)


def talking_in(folder: Folder, listing: Listing, name: str) -> tuple[str, int]:
    """Return the first text in a file that talks, harmless, and how many there are.

    Raises:
        StoreError: it could not be read.
    """
    found = [one for one in _texts(folder, listing, name) if talks(one)]
    first = found[0].encode("unicode_escape").decode("ascii")[:_SHOWN_MAX] if found else ""
    return first, len(found)


def _texts(folder: Folder, listing: Listing, name: str) -> Iterable[str]:
    base = name.rpartition("/")[2]
    found: Iterable[str] = ()
    # That a file cannot be read is told by who looks at what it is.
    with suppress(Unreadable):
        if base.endswith(SAFE):
            tensors, meta = read_header(folder, listing, name)
            found = [*(one.name for one in tensors), *map(str, meta), *map(str, meta.values())]
        elif base == INDEX:
            index = read_index(folder, listing, name.removesuffix(INDEX))
            found = [*(one.name for one in index.tensors), *index.values]
        elif base.endswith(_INDEX) or base in _DOCUMENTS:
            found = list(_strings(read_json(folder, listing, name)))
        elif base.endswith(TORCH):
            found = [one.name for one in open_archive(folder, listing, name).tensors(MODEL)]
    return found


def _strings(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield the texts of a document, keys among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and depth < _DEPTH_MAX:
        for key, one in value.items():
            yield str(key)
            yield from _strings(one, depth + 1)
    elif isinstance(value, list) and depth < _DEPTH_MAX:
        for one in value:
            yield from _strings(one, depth + 1)
