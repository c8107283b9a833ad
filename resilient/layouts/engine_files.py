"""Whether the files of an engine of DeepSpeed are of all its ranks, and of one save.

DeepSpeed asks little when it loads: it stops where a rank's file is missing, and takes a file of
another step, or of another rank, as what it should be.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from resilient.layouts.archives import Archive, data_start
from resilient.layouts.documents import read_json, read_text, whole
from resilient.layouts.pickled import TensorRef
from resilient.layouts.pickles import leaves
from resilient.layouts.values import ITEM_BITS, Cure, Form, Problem, Unreadable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from resilient.storage.folder import Folder, Listing

LATEST = "latest"
AGREEMENT = "the agreement of its files"
_TRAINER = "trainer_state.json"
_NAMED = re.compile(r"global_step(\d{1,12})")
_REPAIR = "resilient ckpt repair {path}"
_NAMED_MAX = 8
"""Files of one kind of trouble that are named."""
_LOOKED_AT_BYTES = 1 << 20
"""Of one tensor, to see whether there is anything but zeros in it."""
_ODD = "DeepSpeed loads it as it is, and goes on from a state that never was"


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank keeps of the optimizer.

    Attributes:
        archive: its file.
        rank: its data-parallel rank.
        row: its rank among those that the layers are cut over.
        step: updates it made, None where it does not say.
        cuts: into how many parts each group was cut.
    """

    archive: Archive
    rank: int
    row: int
    step: int | None
    cuts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Engine:
    """The files of one tag that could be opened.

    Attributes:
        folder: where they are.
        listing: what is there.
        prefix: the tag's folder in it, with a ``/`` at its end.
        models: the model's states, by rank.
        parts: the optimizer's.
    """

    folder: Folder
    listing: Listing
    prefix: str
    models: Sequence[Archive]
    parts: Sequence[Part] = ()


def missing(
    what: str, place: str, held: Collection[tuple[int, int]], ranks: int, rows: int
) -> list[Problem]:
    """Return which ranks have no file; DeepSpeed stops at the first of them.

    Args:
        what: they should have, with ``{}`` in place of the rank.
        place: the tag's folder.
        held: the ranks that have one, and their ranks among those that layers are cut over.
        ranks: how many there are.
        rows: over how many layers are cut.
    """
    last = max((row for _, row in held), default=0) + 1
    rows = max(rows, last)
    # Both are as large as a file says.
    wanted = ((rank, row) for rank in range(max(ranks, 1)) for row in range(rows))
    lost = islice((one for one in wanted if one not in held), _NAMED_MAX)
    return [
        Problem(place or ".", what.format(_rank(rank, row, rows)), is_fatal=True, cure=Cure.COPY)
        for rank, row in lost
    ]


def _rank(rank: int, row: int, rows: int) -> str:
    return f"rank {rank}" if rows == 1 else f"rank {rank}, model-parallel rank {row}"


def cuts_of(state: Mapping[Any, Any]) -> tuple[int, ...]:
    """Return into how many parts a rank says that each group was cut."""
    found = state.get("partition_count")
    counts = found if isinstance(found, list | tuple) else [found]
    return tuple(one for one in map(whole, counts) if one is not None)


def disagreements(engine: Engine) -> list[Problem]:
    """Return which files are of another save than the others, or of another rank.

    Raises:
        StoreError: it could not be read.
    """
    problems = _pointer(engine) or _steps_of_models(engine)
    for field in ("dp_world_size", "mp_world_size"):
        problems += _odd_ones(field, _said(engine, field))
    versions = {one.name: _version(one) for one in engine.models}
    problems += _odd_ones("ds_version", versions, loses=AGREEMENT)
    cuts = {one.archive.name: one.cuts or None for one in engine.parts}
    problems += _odd_ones("partition_count", cuts)
    return [*problems, *_steps_of_parts(engine), *_copies(engine)]


def _pointer(engine: Engine) -> list[Problem]:
    """Return what is wrong with what a Trainer's folder says which tag is to be loaded."""
    if not engine.prefix or _trainer_step(engine) is None:
        return []
    told, tag = read_text(engine.folder, engine.listing, LATEST), engine.prefix.rstrip("/")
    right = f"global_step{_trainer_step(engine)}"
    is_there = any(one.startswith(f"{right}/") for one in engine.listing.sizes)
    mend = _REPAIR if is_there else ""
    if told != tag and "latest_universal" not in engine.listing.sizes:
        what = f"it names `{told[:80]}`, which is not there" if told else "it names no tag"
        what = f"{what}: DeepSpeed loads nothing, and the Trainer stops"
        return [Problem(LATEST, what, is_fatal=True, help=mend)]
    if is_there and _named_step(tag) not in (None, _trainer_step(engine)):
        what = f"it names `{tag[:80]}`, and `{right}` of the Trainer's step is beside it"
        what = f"{what}: DeepSpeed would train on from the other one"
        return [Problem(LATEST, what, is_fatal=True, help=mend)]
    return []


def _steps_of_models(engine: Engine) -> list[Problem]:
    said = _said(engine, "global_steps")
    steps = {one for one in said.values() if one is not None}
    if len(steps) > 1:
        return _odd_ones("global_steps", said, _expected(engine))
    found, problems = next(iter(steps), None), []
    for source, step in _claims(engine).items():
        if found is not None and step is not None and step != found:
            place = engine.models[0].name if len(said) == 1 else engine.prefix or "."
            what = f"its model states are of step {found}, and {source} of {step}: {_ODD}"
            # A tag can be named by whoever saves it; a Trainer's step is what it goes on from. It
            # may count the short step at an epoch's end, which the engine alone then does not.
            is_mixed = source == _TRAINER and _named_step(engine.prefix.rstrip("/")) != found
            is_fatal = is_mixed or not _fits(engine, found)
            problems.append(_odd(place, what, is_fatal=is_fatal))
    return problems[:1]


def _steps_of_parts(engine: Engine) -> list[Problem]:
    said = {one.archive.name: one.step for one in engine.parts if one.step is not None}
    models = [one for one in _said(engine, "global_steps").values() if one is not None]
    likely = [_expected(engine), *models[:1]]
    wanted = next((one for one in likely if one is not None and _fits(engine, one)), None)
    wanted = models[0] if wanted is None and models else wanted
    if wanted is None or not said:
        return _odd_ones("step", said)
    is_mixed = len(set(said.values())) > 1
    low = wanted - _skipped(engine)
    problems = []
    for name, step in said.items():
        if low <= step <= wanted and not (is_mixed and step != _common(said.values(), wanted)):
            continue
        what = f"its optimizer made {step} updates by step {wanted}: {_ODD}"
        # Who loads without the optimizer's state begins it anew in the middle of a run.
        is_fatal = is_mixed or step > wanted or _trainer_step(engine) is not None
        problems.append(_odd(name, what, is_fatal=is_fatal))
    return problems[:_NAMED_MAX]


def _fits(engine: Engine, step: int) -> bool:
    """Say whether a part made as many updates as belong to a step, less those that fp16 skips."""
    low = step - _skipped(engine)
    return any(one.step is not None and low <= one.step <= step for one in engine.parts)


def _copies(engine: Engine) -> Iterator[Problem]:
    """Yield the parts of the optimizer that are the copy of another rank's, byte for byte."""
    first: dict[Any, Part] = {}
    for part in engine.parts:
        sums = tuple(sorted(part.archive.sums.items()))
        if not any(number for _, number in sums):
            continue  # checksums were switched off
        other = first.setdefault(sums, part)
        # Ranks with nothing but what fills their part are alike.
        if other is not part and not _is_blank(part.archive):
            what = f"it is the same as `{other.archive.name[:200]}` of another rank: {_ODD}"
            yield _odd(part.archive.name, what, is_fatal=True)


def _is_blank(archive: Archive) -> bool:
    """Say whether the beginning of every vector is zeros; the flat vectors here have no strides."""
    for _, one in leaves(archive.value):
        if isinstance(one, TensorRef) and len(one.shape) > 0:
            for piece in archive.pieces(one):
                start = piece.start
                if piece.form is Form.MEMBER:
                    start = data_start(archive.folder, archive.name, start)
                item_bytes = max(ITEM_BITS.get(one.dtype, 8) // 8, 1)
                size_bytes = min(math.prod(one.shape) * item_bytes, _LOOKED_AT_BYTES)
                start += piece.first * item_bytes
                if any(archive.folder.read(archive.name, start, size_bytes)):
                    return False
    return True


def _odd_ones(
    field: str, said: Mapping[str, Any], wanted: Any = None, loses: str = ""
) -> list[Problem]:
    """Return the files that say another thing than most, or than what is wanted."""
    known = {name: one for name, one in said.items() if one is not None}
    if len(set(known.values())) < 2:  # noqa: PLR2004 - two of them differ
        return []
    right = _common(known.values(), wanted)
    return [
        Problem(
            name,
            f"its `{field}` is {_shown(one)}, and that of others {_shown(right)}: {_ODD}",
            loses,
            is_fatal=not loses,
            cure=Cure.COPY,
        )
        for name, one in known.items()
        if one != right
    ][:_NAMED_MAX]


def _odd(place: str, what: str, *, is_fatal: bool) -> Problem:
    return Problem(place, what, "" if is_fatal else AGREEMENT, is_fatal=is_fatal, cure=Cure.COPY)


def _common(found: Iterable[Any], wanted: Any) -> Any:
    counts = Counter(found)
    return wanted if wanted in counts else counts.most_common(1)[0][0]


def _shown(value: Any) -> str:
    return ", ".join(map(str, value[:4])) if isinstance(value, tuple) else str(value)


def _claims(engine: Engine) -> dict[str, int | None]:
    """Return what says the step from outside of the engine's files."""
    tag = engine.prefix.rstrip("/")
    return {_TRAINER: _trainer_step(engine), f"the tag `{tag}`": _named_step(tag)}


def _expected(engine: Engine) -> int | None:
    return next((one for one in _claims(engine).values() if one is not None), None)


def _named_step(tag: str) -> int | None:
    named = _NAMED.fullmatch(tag)
    return int(named[1]) if named else None


def _trainer_step(engine: Engine) -> int | None:
    """Return the step of the Trainer around it; None without one, or when its state is broken."""
    if _TRAINER not in engine.listing.sizes:
        return None
    try:
        return whole(read_json(engine.folder, engine.listing, _TRAINER).get("global_step"))
    except Unreadable:
        return None


def _skipped(engine: Engine) -> int:
    return max((one or 0 for one in _said(engine, "skipped_steps").values()), default=0)


def _said(engine: Engine, field: str) -> dict[str, int | None]:
    return {one.name: whole(_field(one, field)) for one in engine.models}


def _version(model: Archive) -> str | None:
    found = _field(model, "ds_version")
    return found[:40] if isinstance(found, str) else None


def _field(archive: Archive, name: str) -> Any:
    return archive.value.get(name) if isinstance(archive.value, dict) else None
