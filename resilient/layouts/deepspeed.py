"""Folders of DeepSpeed's engine: the model's states, and the optimizer's cut over the ranks.

Source of the names: ``deepspeed.runtime.engine`` and ``deepspeed.checkpoint.constants`` (0.19).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.layouts.archives import Archive, open_archive, tensors_in
from resilient.layouts.documents import decimal, read_text, whole
from resilient.layouts.engine_files import (
    LATEST,
    Engine,
    Part,
    cuts_of,
    disagreements,
    missing,
)
from resilient.layouts.pickles import leaves
from resilient.layouts.progress import required, schedule_of
from resilient.layouts.rebuilding import shape_of
from resilient.layouts.values import (
    MODEL,
    OPTIMIZER,
    Contents,
    Cure,
    Optimizer,
    Problem,
    Tensor,
    Unreadable,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.storage.folder import Folder, Listing

MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d{1,7})_)?mp_rank_(\d{1,7})_model_states\.pt")
OPTIMIZER_STATES = re.compile(
    r"(?:bf16_)?zero_pp_rank_(\d{1,7})_mp_rank_(\d{1,7})_optim_states\.pt"
)
SKIPPED = "fp16 steps that were skipped"
_TITLE = "an engine of DeepSpeed"
_RESUME = "engine.load_checkpoint('{path}')"
_MOMENTS = "the optimizer's state"


def is_engine(listing: Listing, prefix: str = "") -> bool:
    """Say whether a folder has the files of an engine directly in it."""
    return any(MODEL_STATES.fullmatch(one[len(prefix) :]) for one in _below(listing, prefix))


def tag_of(folder: Folder, listing: Listing) -> str:
    """Return the folder that ``latest`` names, or the only one there is; empty without."""
    tag = read_text(folder, listing, LATEST)
    if tag and is_engine(listing, f"{tag}/"):
        return f"{tag}/"
    tags = {one.rpartition("/")[0] for one in listing.sizes if MODEL_STATES.search(one)}
    tags = {one for one in tags if "/" not in one and is_engine(listing, f"{one}/")}
    return f"{max(tags, key=_number)}/" if tags else ""


def read_engine(folder: Folder, listing: Listing, prefix: str = "") -> Contents:
    """Return what one tag of an engine holds.

    Args:
        folder: where it is.
        listing: what is there.
        prefix: the tag's folder in it, with a ``/`` at its end.

    Raises:
        StoreError: it could not be read.
    """
    models = _matching(listing, prefix, MODEL_STATES)
    if not models:
        what = "the engine's model states are missing"
        return Contents("deepspeed", _TITLE, problems=(Problem(prefix, what, is_fatal=True),))
    opened, problems = _open(folder, listing, models)
    if not opened:
        return Contents("deepspeed", _TITLE, problems=tuple(problems))
    engine = Engine(folder, listing, prefix, opened)
    problems += _lost_models(engine, models)
    return _with_optimizer(engine, replace(model_of(opened[0]), problems=tuple(problems)))


def _open(
    folder: Folder, listing: Listing, names: Iterable[str]
) -> tuple[list[Archive], list[Problem]]:
    opened, problems = [], []
    for name in names:
        try:
            opened.append(open_archive(folder, listing, name))
        except Unreadable as error:
            problems.append(Problem(name, str(error), is_fatal=True))
    return opened, problems


def _lost_models(engine: Engine, models: Mapping[str, re.Match[str]]) -> list[Problem]:
    """Return whose states of the model are missing: with ZeRO 3 each rank has its own."""
    cut = [one for one in models.values() if one[1]]
    held = {(int(one[1] or 0), int(one[2])) for one in cut or models.values()}
    world, rows = _sizes(engine)
    ranks = max(world or 1, max(rank for rank, _ in held) + 1) if cut else 1
    return missing(
        "the model's states of {} are missing: DeepSpeed stops there",
        engine.prefix,
        held,
        ranks,
        rows,
    )


def _sizes(engine: Engine) -> tuple[int | None, int]:
    """Return how many ranks there were, and over how many of them each layer was cut."""
    said = engine.models[0].value
    fields = said if isinstance(said, dict) else {}
    return whole(fields.get("dp_world_size")), whole(fields.get("mp_world_size")) or 1


def model_of(archive: Archive) -> Contents:
    """Return what the file of the model's states says."""
    fields = archive.value if isinstance(archive.value, dict) else {}
    tensors = tensors_in(archive, fields.get("module"), MODEL)
    if not any(one.elements for one in tensors):
        # With ZeRO 3 the weights are in the optimizer's files, and their shapes here.
        tensors = tuple(
            Tensor(name, MODEL, "F32", shape, (archive.name,))
            for name, shape in shapes_in(fields.get("param_shapes"))
        )
    version = fields.get("ds_version")
    skipped = whole(fields.get("skipped_steps"))
    facts = {SKIPPED: skipped} if skipped else {}
    return Contents(
        "deepspeed",
        _TITLE,
        _RESUME,
        tensors,
        step=whole(fields.get("global_steps")),
        world=whole(fields.get("dp_world_size")),
        schedule=schedule_of(fields.get("lr_scheduler")),
        data={"samples": found} if (found := whole(fields.get("global_samples"))) else {},
        versions={"deepspeed": version[:40]} if isinstance(version, str) else {},
        facts=facts,
    )


def shapes_in(value: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return the shapes by name; a list has one dictionary for each group of parameters."""
    groups = value if isinstance(value, list) else [value]
    found = []
    for group in groups:
        for name, shape in group.items() if isinstance(group, dict) else ():
            found.append((str(name)[:200], shape_of(shape)))
    return found


def _with_optimizer(engine: Engine, found: Contents) -> Contents:
    names = _matching(engine.listing, engine.prefix, OPTIMIZER_STATES)
    if not names:
        what = "no optimizer states beside the model's"
        lost = Problem(engine.prefix or ".", what, _MOMENTS, cure=Cure.COPY)
        return replace(found, problems=(*found.problems, *disagreements(engine), lost))
    held = {(int(one[1]), int(one[2])) for one in names.values()}
    world, rows = _sizes(engine)
    ranks = max(rank for rank, _ in held) + 1
    lost_ones = missing(
        "the optimizer's part of {} is missing", engine.prefix, held, max(ranks, world or 0), rows
    )
    archives, broken = _open(engine.folder, engine.listing, names)
    tensors: list[Tensor] = []
    parts, optimizer = [], None
    for archive in archives:
        try:
            state = required(_state(archive), "an optimizer of an engine")
            rank, row = int(names[archive.name][1]), int(names[archive.name][2])
            one = _optimizer(state, archive)
            parts.append(Part(archive, rank, row, one.step, cuts_of(state)))
            more = tensors_in(archive, state, OPTIMIZER)
            tensors += [replace(each, name=f"rank {rank}: {each.name}") for each in more]
            optimizer = optimizer or one
        except Unreadable as error:
            broken.append(Problem(archive.name, str(error), is_fatal=True))
    return replace(
        found,
        tensors=(*found.tensors, *tensors),
        optimizer=optimizer,
        world=found.world or ranks,
        problems=(
            *found.problems,
            *lost_ones,
            *broken,
            *disagreements(replace(engine, parts=parts)),
        ),
    )


def _state(archive: Archive) -> dict[Any, Any] | None:
    fields = archive.value if isinstance(archive.value, dict) else {}
    state = fields.get("optimizer_state_dict")
    return state if isinstance(state, dict) else None


def _optimizer(state: dict[Any, Any], archive: Archive) -> Optimizer:
    """Return the numbers of one rank's part; its parameters are flat pieces of many."""
    step: int | None = None
    slots: dict[str, None] = {}
    rates = []
    for path, one in leaves(state):
        name = str(path[-1])[:80] if isinstance(path[-1], str) else ""
        if name == "step" and step is None:
            step = whole(archive.number(one))
        if name == "lr":
            rates.append(decimal(archive.number(one)))
        if name.startswith("exp_avg") or name == "momentum_buffer":
            slots[name] = None
    groups = state.get("param_groups") or state.get("single_partition_of_fp32_groups")
    count = len(groups) if isinstance(groups, list) else 0
    known = tuple(one for one in rates if one is not None)
    return Optimizer(step, 0, 0, max(count, len(known)), known, tuple(slots))


def _matching(listing: Listing, prefix: str, pattern: re.Pattern[str]) -> dict[str, re.Match[str]]:
    found = {one: pattern.fullmatch(one[len(prefix) :]) for one in sorted(_below(listing, prefix))}
    return {name: match for name, match in found.items() if match}


def _below(listing: Listing, prefix: str) -> list[str]:
    return [
        one for one in listing.sizes if one.startswith(prefix) and "/" not in one[len(prefix) :]
    ]


def _number(tag: str) -> int:
    digits = re.search(r"(\d{1,12})$", tag)
    return int(digits[1]) if digits else -1
