"""Detection of checkpoints whose save did not end, such as staging folders (``tmp-...``).

All functions are pure.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from resilient.layouts.model import Problem, Remedy
from resilient.redaction import shell_quote
from resilient.storage.urls import protocol_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from resilient.storage.folder import DirectoryListing

SENTINEL = "checkpoint-is-incomplete.txt"
"""Transformers writes this file before a save on SIGTERM, and deletes it afterwards."""
_STEP = r"(?:checkpoint|ckpt|epoch|global_?step|iter|step)"
_PREFIXED = re.compile(rf"(?i)(?:tmp|temp|partial|staging)[-_.]+(?P<name>{_STEP}[-_=.]?\d.*)")
_SUFFIXED = re.compile(
    rf"(?i)(?P<name>{_STEP}[-_=.]?\d.*?)[-_.]+"
    r"(?:orbax-checkpoint-tmp|tmp|temp|partial|staging|incomplete|unfinished)(?:[-_.]?\d{1,20})?"
)
_OF_TRAINER = re.compile(r"checkpoint-\d{1,12}")
_OF_ANY = re.compile(
    rf"(?i){_STEP}[-_=.]?\d.*|weights-\d{{1,12}}|(?:pytorch_model_fsdp|optimizer)_\d{{1,4}}"
)
"""Names of checkpoints, and of folders of slices inside a checkpoint."""
_STATE, _SCHEDULE = "trainer_state.json", "scheduler.pt"
_RANDOM = re.compile(r"rng_state(?:_\d{1,7})?\.pth")
_ENGINE = re.compile(r"global_step\d{1,12}/.*")
_PARTS = {
    "weights": re.compile(
        r"(?:adapter_model|model|pytorch_model)(?:[-.].*|_fsdp.*)|global_step\d{1,12}/.*"
        r"|[^/]+/adapter_model\..*"
    ),
    "optimizer.pt": re.compile(r"optimizer(?:\.(?:pt|bin)|_\d{1,4}/.*)|global_step\d{1,12}/.*"),
    _SCHEDULE: re.compile(r"scheduler\.pt|global_step\d{1,12}/.*"),
    "random states": _RANDOM,
    _STATE: re.compile(re.escape(_STATE)),
}
"""Parts of a save of the Trainer of Transformers, in write order."""
_MISSING = ("it is missing", "it contains no weights", "no random states are saved")


def saved_name(url: str) -> str:
    """Return the final name of a staging folder; empty for any other folder.

    For example, Transformers 4.36 to 4.38 would rename ``tmp-checkpoint-18`` to ``checkpoint-18``.

    Args:
        url: URL or name of the folder.
    """
    base = url.rstrip("/").rpartition("/")[2]
    match = _PREFIXED.fullmatch(base) or _SUFFIXED.fullmatch(base)
    return match["name"] if match else ""


def is_cut_short(url: str, listing: DirectoryListing) -> bool:
    """Return True for a folder of the Trainer whose save ended before the state was written."""
    base = url.rstrip("/").rpartition("/")[2]
    name = saved_name(url) or base
    names = listing.sizes
    is_begun = any(item.endswith((".safetensors", ".bin", ".pt", ".json")) for item in names)
    lacks = not {_STATE, _SCHEDULE} & set(names) and not any(map(_RANDOM.fullmatch, names))
    return _OF_TRAINER.fullmatch(name) is not None and is_begun and lacks


def is_empty(url: str, listing: DirectoryListing) -> bool:
    """Return True for an empty folder with the name of a tool's checkpoint.

    An object store has no empty folders, so only a folder on this machine can be empty.
    """
    base = url.rstrip("/").rpartition("/")[2]
    is_nothing = not listing.sizes and not listing.outside and not listing.is_file
    is_named = _OF_ANY.fullmatch(saved_name(url) or base) is not None
    return is_nothing and is_named and protocol_of(url) == "file"


def unfinished(
    url: str, listing: DirectoryListing, problems: Iterable[Problem]
) -> tuple[Problem, ...]:
    """Return the problems of a checkpoint, with an unfinished save first.

    A repair cannot restore the missing parts of an unfinished save. The remedy for every problem is
    therefore an earlier checkpoint.

    Args:
        url: URL of the folder.
        listing: Its files.
        problems: Other problems of the checkpoint.
    """
    place, reason = _reason(url, listing)
    if not reason:
        return tuple(problems)
    missing_parts = [
        name for name, part in _PARTS.items() if not any(map(part.fullmatch, listing.sizes))
    ]
    of_trainer = _OF_TRAINER.fullmatch(saved_name(url) or url.rstrip("/").rpartition("/")[2])
    is_named = missing_parts and of_trainer and listing.sizes
    lacking_text = f"; it lacks {', '.join(missing_parts)}" if is_named else ""
    first = Problem(place, f"{reason}{lacking_text}", is_fatal=True, cure=Remedy.EARLIER)
    other_problems = (
        replace(problem, help="", cure=Remedy.EARLIER)
        for problem in problems
        if not any(problem.what.startswith(rule) for rule in _MISSING)
    )
    return (first, *other_problems)


def is_incomplete(problems: Iterable[Problem]) -> bool:
    """Return True if :func:`unfinished` found an unfinished save."""
    return any(problem.what.startswith(_INCOMPLETE) for problem in problems)


_INCOMPLETE = "it is an incomplete checkpoint"


def _reason(url: str, listing: DirectoryListing) -> tuple[str, str]:
    """Return the place and the reason of an incomplete checkpoint; empty texts for any other."""
    if SENTINEL in listing.sizes:
        return SENTINEL, f"{_INCOMPLETE}: its save was never finished"
    if listing.is_file:
        return "", ""
    if is_empty(url, listing):
        reason = "there is no file in it"
    elif name := saved_name(url):
        reason = f"a staging folder, which is renamed to `{name}` at the end of a save"
    elif is_cut_short(url, listing):
        reason = "its save ended early"
    else:
        return "", ""
    return ".", f"{_INCOMPLETE}: {reason}"


def pointers(
    url: str,
    listing: DirectoryListing,
    problems: Iterable[Problem],
    file_names: Iterable[str],
    problem_text: str,
) -> Iterator[Problem]:
    """Yield the problems of a checkpoint that has Git LFS pointers in place of files.

    Args:
        url: URL of the checkpoint.
        listing: Its files.
        problems: Other problems of the checkpoint.
        file_names: Names of the pointers.
        problem_text: Text of the problem.
    """
    names = list(file_names)
    location = url.rstrip("/").rpartition("/")[0] if listing.is_file else url
    fetch = f"cd {shell_quote(location or '.')} && git lfs pull" if names else ""
    places = {problem.place for problem in problems}
    for problem in problems:
        text = problem_text if problem.place in names else problem.what
        yield replace(problem, what=text, help=fetch) if fetch and problem.is_fatal else problem
    for name in names:
        if name not in places:
            yield Problem(name, problem_text, help=fetch)
