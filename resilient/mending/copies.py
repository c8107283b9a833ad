"""What is damaged here and whole in another copy of the same checkpoint: another tier, a backup.

That it is the same one has to show: a file that is whole in both places, and not the same, means
two checkpoints, or a damage that nothing else shows. Then nothing is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.layouts.plain import ALONE
from resilient.mending.case import looked_through, names_of
from resilient.mending.drafts import BLOCK_BYTES, Span

if TYPE_CHECKING:
    from resilient.mending.case import Case, Near
    from resilient.storage.folder import Folder

_ROUNDS_MAX = 4
"""One damage may hide behind another one: an index behind a missing shard."""
DIFFERENT = (
    "and not the same: they are two checkpoints, or one of the two files is damaged where no "
    "checksum shows it"
)


def take_from_copies(case: Case) -> None:
    """Take what is damaged from copies, where they have it whole.

    Raises:
        StoreError: one of the places could not be read.
    """
    for copy in case.copies:
        if not case.steps and _is_whole(case, copy):
            return
        for _ in range(_ROUNDS_MAX):
            if not _take(case, copy):
                break


def _is_whole(case: Case, copy: Near) -> bool:
    return not case.problems and not _different(case, copy)


def _take(case: Case, copy: Near) -> bool:
    """Take what can be taken; return whether something was."""
    different = _different(case, copy)
    _, theirs = looked_through(copy.folder)
    known = names_of(theirs)
    spoiled = {one.place for one in case.problems if (one.place, one.what) not in known}
    hurt = {one.place for one in theirs if one.is_fatal and one.what != ALONE}
    is_general = case.is_layout_known and "." in spoiled and _is_little(case, copy, different)
    wanted: list[str] = []
    doubtful: list[str] = []
    for name in different:
        if name in hurt:
            case.refused[name] = f"it is damaged in {copy.url} too"
        elif name not in case.listing.sizes or name in spoiled or is_general:
            wanted.append(name)
        elif name in copy.listing.sizes and case.is_layout_known:
            is_moved = _is_another(case, copy, name, different)
            (wanted if is_moved else doubtful).append(name)
    for name in doubtful:
        case.refused[name] = f"it is whole here and in {copy.url}, {DIFFERENT}"
    if doubtful or not wanted:
        return False
    for name in wanted:
        _replace(case, copy, name)
    what = f"{len(wanted)} files taken whole" if len(wanted) > 1 else "taken whole"
    case.done(", ".join(sorted(wanted)), what, copy.url)
    return True


def _is_little(case: Case, copy: Near, different: list[str]) -> bool:
    """Say whether most files are the same in both places."""
    names = set(case.listing.sizes) | set(copy.listing.sizes)
    return len(different) < len(names) - len(different) or len(names) == 1


def _is_another(case: Case, copy: Near, name: str, different: list[str]) -> bool:
    """Say whether a file is what the copy has under another name: two were swapped."""
    size_bytes = case.listing.sizes[name]
    return any(
        copy.listing.sizes.get(other) == size_bytes
        and all(
            case.draft.read(name, at, BLOCK_BYTES) == copy.folder.read(other, at, BLOCK_BYTES)
            for at in range(0, size_bytes, BLOCK_BYTES)
        )
        for other in different
        if other != name
    )


def _replace(case: Case, copy: Near, name: str) -> None:
    if name not in copy.listing.sizes:
        case.draft.drop(name)
        return
    case.draft.put(name, Span(copy.folder, name, 0, copy.listing.sizes[name]))


def _different(case: Case, copy: Near) -> list[str]:
    """Return the files that are not the same in both places, and those that one of them lacks."""
    ours, theirs = case.listing.sizes, copy.listing.sizes
    if len(theirs) == 1 and copy.listing.is_file and not case.listing.is_file:
        return []
    return [
        name
        for name in sorted(set(ours) | set(theirs))
        if ours.get(name) != theirs.get(name)
        or not _same(case.draft, copy.folder, name, theirs[name])
    ]


def _same(one: Folder, other: Folder, name: str, size_bytes: int) -> bool:
    return all(
        one.read(name, at, BLOCK_BYTES) == other.read(name, at, BLOCK_BYTES)
        for at in range(0, size_bytes, BLOCK_BYTES)
    )
