"""What only says where things are: indexes of weights, tags that are the latest, names of steps."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from resilient.layouts import deepspeed, universal
from resilient.layouts.documents import JSON_BYTES_MAX, read_json
from resilient.layouts.layers import LOSES as RENAMED
from resilient.layouts.shards import ORPHAN, SHARD, STALE
from resilient.layouts.values import Unreadable
from resilient.layouts.weights import read_file
from resilient.mending.case import AGREEMENT, looked_through

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.mending.case import Case
    from resilient.mending.drafts import Draft

_RUN_WIDE = ("metadata.json", "config.json")
"""What every step of a run says alike."""
_MARKS = {b"\xef\xbb\xbf": "utf-8-sig", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
"""What an editor sets before a text -> the encoding that reads it."""
_COUNTING = ("hf-trainer", "torchtitan", "megatron")
"""Layouts whose folders are named for a step."""
_STEP_NAME = re.compile(r"((?:checkpoint|step|iter)[-_])(\d{1,12})")


def mend_index(case: Case) -> None:
    """Write the index of a model in shards anew, from the headers of the shards."""
    for one in [one for one in case.problems if one.what in (STALE, ORPHAN)]:
        case.draft.drop(one.place)
        case.done(one.place, "left out: nothing reads it", "what names the weights")
    shards: dict[tuple[str, str, str], dict[int, str]] = {}
    for name in case.listing.sizes:
        if match := SHARD.fullmatch(name):
            shards.setdefault((match[2], match[4], match[5]), {})[int(match[3])] = name
    for (stem, count, end), found in shards.items():
        index = f"{stem}{end}.index.json"
        is_lost = not case.is_layout_known or index in case.broken()
        is_single = f"{stem}{end}" in case.listing.sizes
        if not is_lost or is_single:
            continue
        if why := _why_not(case, int(count), found):
            case.refused[index] = why
            continue
        try:
            text = _index(case, [found[one] for one in sorted(found)])
        except Unreadable as error:
            case.refused[index] = str(error)
            continue
        case.draft.put(index, text)
        case.done(index, "written anew", f"the headers of {len(found)} shards")


def _why_not(case: Case, count: int, found: Mapping[int, str]) -> str:
    """Return why an index of these shards would not be right; empty if it would."""
    lacking = [one for one in range(1, count + 1) if one not in found]
    if lacking:
        return f"shards of {count} are missing: {', '.join(map(str, lacking[:8]))}"
    if any(one.loses == RENAMED for one in case.problems):
        return "a name in a shard is wrong, and so would be an index of it"
    return ""


def _index(case: Case, shards: list[str]) -> bytes:
    mapped: dict[str, str] = {}
    size_bytes = elements = 0
    for name in shards:
        for one in read_file(case.draft, case.listing, name):
            if mapped.setdefault(one.name, name) != name:
                raise Unreadable(f"`{one.name[:80]}` is in two shards")
            size_bytes, elements = size_bytes + one.size_bytes, elements + one.elements
    metadata = {"total_parameters": elements, "total_size": size_bytes}
    document = {"metadata": metadata, "weight_map": dict(sorted(mapped.items()))}
    return json.dumps(document, indent=2, sort_keys=True).encode() + b"\n"


def mend_latest(case: Case) -> None:
    """Say again which tag is the latest: the one of the highest number that is whole."""
    for name, tags in (
        (deepspeed.LATEST, _engines(case.draft)),
        (universal.LATEST, [one.rstrip("/") for one in universal.tag_in(case.listing)]),
    ):
        if not case.is_broken(name):
            continue
        for tag in sorted(tags, key=_number, reverse=True):
            trial = case.draft.copy()
            trial.put(name, tag.encode())
            _, problems = looked_through(trial)
            if not any(one.is_fatal for one in problems):
                case.draft.take(trial)
                case.done(name, f"names `{tag}` again", "the newest folder beside it that is whole")
                break
        else:
            if tags:
                case.refused[name] = "no tag beside it is whole"


def _engines(draft: Draft) -> list[str]:
    listing = draft.list()
    heads = {one.partition("/")[0] for one in listing.sizes if "/" in one}
    return [one for one in heads if deepspeed.is_engine(listing, f"{one}/")]


def _number(name: str) -> int:
    digits = re.search(r"(\d{1,12})$", name)
    return int(digits[1]) if digits else -1


def mend_encodings(case: Case) -> None:
    """Write documents without the mark that an editor set at their beginning, in UTF-8."""
    for name in sorted(case.broken()):
        if not name.endswith(".json") or name not in case.listing.sizes:
            continue
        data = case.draft.read(name, 0, min(case.listing.sizes[name], JSON_BYTES_MAX))
        marks = (mark for mark in _MARKS if data.startswith(mark))
        try:
            text = data.decode(_MARKS[next(marks)])
        except (StopIteration, UnicodeDecodeError):
            continue
        trial = case.draft.copy()
        trial.put(name, text.encode())
        with suppress(Unreadable):
            read_json(trial, trial.list(), name)
            case.draft.take(trial)
            case.done(name, "in UTF-8, and without a mark before it", "its own text")


def mend_documents(case: Case) -> None:
    """Take what all steps of a run say alike from another step."""
    for name in _RUN_WIDE:
        if name not in case.broken():
            continue
        for other in case.near:
            try:
                read_json(other.folder, other.listing, name)
            except Unreadable:
                continue
            trial = case.draft.copy()
            trial.put(name, other.folder.read(name, 0, other.listing.sizes[name]))
            _, problems = looked_through(trial)
            if any(one.place == name for one in problems):
                continue  # it says the same, or is of another model as well
            case.draft.take(trial)
            case.done(name, "the same in each step of the run", other.url)
            break
        else:
            case.refused[name] = "no other step of the run is here, which says the same"


def mend_name(case: Case) -> None:
    """Give a folder the name of the step that its files agree on."""
    name = case.draft.url.rstrip("/").rpartition("/")[2]
    match = _STEP_NAME.fullmatch(name)
    if match is None or case.contents.layout not in _COUNTING or not _is_at_odds(case):
        return
    found = case.contents
    said = (
        found.step,
        found.schedule.step if found.schedule else None,
        found.optimizer.step if found.optimizer else None,
    )
    counted = Counter(one for one in said if one is not None)
    step, votes = counted.most_common(1)[0] if counted else (None, 0)
    if step is None or votes < 2 or step == int(match[2]):  # noqa: PLR2004 - one alone proves nothing
        return
    width = len(match[2]) if match[2].startswith("0") else 1
    name = f"{match[1]}{step:0{width}d}"
    if why := _why_not_called(case, name, counted):
        case.refused["."] = why
        return
    case.draft.renamed(name)
    case.done(".", f"named for step {step}, as {votes} of its files say", "its files")


def _why_not_called(case: Case, name: str, counted: Counter[int]) -> str:
    """Return why a folder is not given a name; empty if it may be.

    The Trainer's optimizer may have skipped steps, and Megatron's schedule counts samples.
    """
    if len(counted) > 1 and case.contents.layout == "torchtitan":
        return "its files are of different steps, and which is right does not show"
    if any(one.url.rstrip("/").rpartition("/")[2] == name for one in case.near):
        return f"`{name}` is beside it: files of that one may be in this one; `--from` another copy"
    return ""


def _is_at_odds(case: Case) -> bool:
    return any(one.place == "." and one.loses == AGREEMENT for one in case.problems)
