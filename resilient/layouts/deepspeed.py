"""Reader of DeepSpeed engine folders: model states, and optimizer partitions of the ranks.

DeepSpeed checks little at a load. It fails at a missing file of a rank, but accepts a file of
another step or of another rank. This module detects such mixtures.

Source of the names: ``deepspeed.runtime.engine`` and ``deepspeed.checkpoint.constants`` (0.19).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from resilient.layouts.field_types import count_fault, miscounted
from resilient.layouts.json_files import decimal, read_json, read_text, whole
from resilient.layouts.model import (
    ITEM_BITS,
    MODEL,
    OPTIMIZER,
    Contents,
    Optimizer,
    Problem,
    Remedy,
    StorageFormat,
    Tensor,
    Unreadable,
)
from resilient.layouts.pickle_names import shape_of
from resilient.layouts.pickle_reader import TensorRef, leaves
from resilient.layouts.torch_zip import Archive, data_start, open_archive, tensors_in
from resilient.layouts.training_state import optimizer_of, required, schedule_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from resilient.storage.folder import DirectoryListing, Folder

LATEST = "latest"
AGREEMENT = "the consistency of its files"
_TRAINER = "trainer_state.json"
_NAMED = re.compile(r"global_step(\d{1,12})")
_REPAIR = "resilient ckpt repair {path}"
_NAMED_MAX = 8
"""Largest number of files that a problem names."""
_LOOKED_AT_BYTES = 1 << 20
"""Bytes of one tensor that are searched for nonzero values."""
_ODD = "DeepSpeed loads it without an error, and continues from a state that never existed"


@dataclass(frozen=True, slots=True)
class OptimizerPartition:
    """The optimizer partition of one rank.

    Attributes:
        archive: File of the partition.
        rank: Data-parallel rank.
        row: Model-parallel rank.
        step: Number of updates, None if unknown.
        cuts: Number of partitions of each parameter group.
    """

    archive: Archive
    rank: int
    row: int
    step: int | None
    cuts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Engine:
    """The readable files of one tag.

    Attributes:
        folder: Folder of the checkpoint.
        listing: Its files.
        prefix: Folder of the tag, with a ``/`` at its end.
        models: Model states, by rank.
        parts: Optimizer partitions.
    """

    folder: Folder
    listing: DirectoryListing
    prefix: str
    models: Sequence[Archive]
    parts: Sequence[OptimizerPartition] = ()


def missing(
    noun: str, place: str, present: Collection[tuple[int, int]], ranks: int, rows: int
) -> list[Problem]:
    """Return the problems of ranks without a file; DeepSpeed fails at the first of these ranks.

    Args:
        noun: Text of the problem, with ``{}`` in place of the rank.
        place: Folder of the tag.
        present: Data-parallel and model-parallel ranks that have a file.
        ranks: Number of data-parallel ranks.
        rows: Number of model-parallel ranks.
    """
    last = max((row for _, row in present), default=0) + 1
    rows = max(rows, last)
    # Bound the loop, because both numbers come from a file and may be huge.
    pairs = ((rank, row) for rank in range(max(ranks, 1)) for row in range(rows))
    missing_pairs = islice((name for name in pairs if name not in present), _NAMED_MAX)
    return [
        Problem(place or ".", noun.format(_rank(rank, row, rows)), is_fatal=True, cure=Remedy.COPY)
        for rank, row in missing_pairs
    ]


def _rank(rank: int, row: int, rows: int) -> str:
    return f"rank {rank}" if rows == 1 else f"rank {rank}, model-parallel rank {row}"


def cuts_of(state: Mapping[Any, Any]) -> tuple[int, ...]:
    """Return the number of partitions of each group, from the file of a rank."""
    partition_count = state.get("partition_count")
    counts = partition_count if isinstance(partition_count, list | tuple) else [partition_count]
    return tuple(count for count in map(whole, counts) if count is not None)


def disagreements(engine: Engine) -> list[Problem]:
    """Return the problems of files that belong to another save or to another rank.

    Raises:
        StoreError: A file could not be read.
    """
    problems = _latest_problems(engine) or _steps_of_models(engine)
    for field in ("dp_world_size", "mp_world_size"):
        problems += _differing_files(field, _field_by_file(engine, field))
    versions = {model.name: _version(model) for model in engine.models}
    problems += _differing_files("ds_version", versions, loses=AGREEMENT)
    cuts = {part.archive.name: part.cuts or None for part in engine.parts}
    problems += _differing_files("partition_count", cuts)
    return [*problems, *_steps_of_parts(engine), *_copies(engine)]


def _latest_problems(engine: Engine) -> list[Problem]:
    """Return the problem of ``latest`` in a Trainer's folder, which selects the tag to load."""
    if not engine.prefix or _trainer_step(engine) is None:
        return []
    latest, tag = read_text(engine.folder, engine.listing, LATEST), engine.prefix.rstrip("/")
    right_tag = f"global_step{_trainer_step(engine)}"
    is_there = any(file.startswith(f"{right_tag}/") for file in engine.listing.sizes)
    remedy = _REPAIR if is_there else ""
    if latest != tag and "latest_universal" not in engine.listing.sizes:
        problem_text = (
            f"it names `{latest[:80]}`, which does not exist" if latest else "it names no tag"
        )
        problem_text = f"{problem_text}: DeepSpeed loads nothing, and the Trainer fails"
        return [Problem(LATEST, problem_text, is_fatal=True, help=remedy)]
    if is_there and _named_step(tag) not in (None, _trainer_step(engine)):
        problem_text = (
            f"it names `{tag[:80]}`, but `{right_tag}` of the Trainer's step is beside it"
        )
        problem_text = f"{problem_text}: DeepSpeed would continue from the other tag"
        return [Problem(LATEST, problem_text, is_fatal=True, help=remedy)]
    return []


def _steps_of_models(engine: Engine) -> list[Problem]:
    step_by_file = _field_by_file(engine, "global_steps")
    steps = {value for value in step_by_file.values() if value is not None}
    if len(steps) > 1:
        return _differing_files("global_steps", step_by_file, _expected(engine))
    model_step, problems = next(iter(steps), None), []
    for source, step in _stated_steps(engine).items():
        if model_step is not None and step is not None and step != model_step:
            place = engine.models[0].name if len(step_by_file) == 1 else engine.prefix or "."
            problem_text = (
                f"its model states are of step {model_step}, and {source} of {step}: {_ODD}"
            )
            # Users may choose the name of a tag, but a Trainer resumes from its own step. Only the
            # Trainer counts the short step at the end of an epoch, and the engine does not.
            is_mixed = source == _TRAINER and _named_step(engine.prefix.rstrip("/")) != model_step
            is_fatal = is_mixed or not _fits(engine, model_step)
            problems.append(_odd(place, problem_text, is_fatal=is_fatal))
    return problems[:1]


def _steps_of_parts(engine: Engine) -> list[Problem]:
    steps = {part.archive.name: part.step for part in engine.parts if part.step is not None}
    models = [
        value for value in _field_by_file(engine, "global_steps").values() if value is not None
    ]
    likely_steps = [_expected(engine), *models[:1]]
    right_step = next(
        (item for item in likely_steps if item is not None and _fits(engine, item)), None
    )
    right_step = models[0] if right_step is None and models else right_step
    if right_step is None or not steps:
        return _differing_files("step", steps)
    is_mixed = len(set(steps.values())) > 1
    low = right_step - _skipped(engine)
    problems = []
    for name, step in steps.items():
        if low <= step <= right_step and not (
            is_mixed and step != _common(steps.values(), right_step)
        ):
            continue
        problem_text = f"its optimizer made {step} updates by step {right_step}: {_ODD}"
        # A load without the optimizer's state restarts the optimizer in the middle of a run.
        is_fatal = is_mixed or step > right_step or _trainer_step(engine) is not None
        problems.append(_odd(name, problem_text, is_fatal=is_fatal))
    return problems[:_NAMED_MAX]


def _fits(engine: Engine, step: int) -> bool:
    """Return True if a partition has the updates of a step, except updates that fp16 skipped."""
    low = step - _skipped(engine)
    return any(part.step is not None and low <= part.step <= step for part in engine.parts)


def _copies(engine: Engine) -> Iterator[Problem]:
    """Yield problems of optimizer partitions that equal another rank's partition byte for byte."""
    first: dict[Any, OptimizerPartition] = {}
    for part in engine.parts:
        sums = tuple(sorted(part.archive.sums.items()))
        if not any(number for _, number in sums):
            continue  # checksums are disabled
        first_part = first.setdefault(sums, part)
        # Partitions that contain only padding are equal.
        if first_part is not part and not _is_blank(part.archive):
            problem_text = (
                f"it is the same as `{first_part.archive.name[:200]}` of another rank: {_ODD}"
            )
            yield _odd(part.archive.name, problem_text, is_fatal=True)


def _is_blank(archive: Archive) -> bool:
    """Return True if every flat vector begins with zeros."""
    for _, leaf in leaves(archive.value):
        if isinstance(leaf, TensorRef) and len(leaf.shape) > 0:
            for piece in archive.pieces(leaf):
                start = piece.start
                if piece.form is StorageFormat.MEMBER:
                    start = data_start(archive.folder, archive.name, start)
                item_bytes = max(ITEM_BITS.get(leaf.dtype, 8) // 8, 1)
                size_bytes = min(math.prod(leaf.shape) * item_bytes, _LOOKED_AT_BYTES)
                start += piece.first * item_bytes
                if any(archive.folder.read(archive.name, start, size_bytes)):
                    return False
    return True


def _differing_files(
    field: str, values: Mapping[str, Any], right_value: Any = None, loses: str = ""
) -> list[Problem]:
    """Return the files whose value differs from the wanted or the most common value."""
    stated_values = {name: value for name, value in values.items() if value is not None}
    if len(set(stated_values.values())) < 2:  # noqa: PLR2004 - two of them differ
        return []
    common_value = _common(stated_values.values(), right_value)
    return [
        Problem(
            name,
            f"its `{field}` is {_value_text(value)}, and that of others "
            f"{_value_text(common_value)}: {_ODD}",
            loses,
            is_fatal=not loses,
            cure=Remedy.COPY,
        )
        for name, value in stated_values.items()
        if value != common_value
    ][:_NAMED_MAX]


def _odd(place: str, problem_text: str, *, is_fatal: bool) -> Problem:
    return Problem(
        place, problem_text, "" if is_fatal else AGREEMENT, is_fatal=is_fatal, cure=Remedy.COPY
    )


def _common(values: Iterable[Any], right_value: Any) -> Any:
    counts = Counter(values)
    return right_value if right_value in counts else counts.most_common(1)[0][0]


def _value_text(value: Any) -> str:
    return ", ".join(map(str, value[:4])) if isinstance(value, tuple) else str(value)


def _stated_steps(engine: Engine) -> dict[str, int | None]:
    """Return the steps that sources outside the engine's files state."""
    tag = engine.prefix.rstrip("/")
    return {_TRAINER: _trainer_step(engine), f"the tag `{tag}`": _named_step(tag)}


def _expected(engine: Engine) -> int | None:
    return next((claim for claim in _stated_steps(engine).values() if claim is not None), None)


def _named_step(tag: str) -> int | None:
    match = _NAMED.fullmatch(tag)
    return int(match[1]) if match else None


def _trainer_step(engine: Engine) -> int | None:
    """Return the step of the Trainer around the engine; None without a readable state."""
    if _TRAINER not in engine.listing.sizes:
        return None
    try:
        return whole(read_json(engine.folder, engine.listing, _TRAINER).get("global_step"))
    except Unreadable:
        return None


def _skipped(engine: Engine) -> int:
    return max(
        (value or 0 for value in _field_by_file(engine, "skipped_steps").values()), default=0
    )


def _field_by_file(engine: Engine, field: str) -> dict[str, int | None]:
    return {model.name: whole(_field(model, field)) for model in engine.models}


def _version(model: Archive) -> str | None:
    version = _field(model, "ds_version")
    return version[:40] if isinstance(version, str) else None


def _field(archive: Archive, name: str) -> Any:
    return archive.value.get(name) if isinstance(archive.value, dict) else None


MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d{1,7})_)?mp_rank_(\d{1,7})_model_states\.pt")
OPTIMIZER_STATES = re.compile(
    r"(?:bf16_)?zero_pp_rank_(\d{1,7})_mp_rank_(\d{1,7})_optim_states\.pt"
)
SKIPPED = "fp16 steps that were skipped"
_TITLE = "an engine of DeepSpeed"
_RESUME = "engine.load_checkpoint('{path}')"
_MOMENTS = "the optimizer's state"
_PARTS_LOST = "the optimizer's parts of {} are missing: DeepSpeed fails without them"


def is_engine(listing: DirectoryListing, prefix: str = "") -> bool:
    """Return True if a folder directly contains the files of an engine."""
    return any(MODEL_STATES.fullmatch(name[len(prefix) :]) for name in _below(listing, prefix))


def tag_of(folder: Folder, listing: DirectoryListing) -> str:
    """Return the folder that ``latest`` names, or the only folder of a tag; empty without one."""
    tag = read_text(folder, listing, LATEST)
    if tag and is_engine(listing, f"{tag}/"):
        return f"{tag}/"
    tags = {file.rpartition("/")[0] for file in listing.sizes if MODEL_STATES.search(file)}
    tags = {
        candidate
        for candidate in tags
        if "/" not in candidate and is_engine(listing, f"{candidate}/")
    }
    return f"{max(tags, key=_number)}/" if tags else ""


def read_engine(folder: Folder, listing: DirectoryListing, prefix: str = "") -> Contents:
    """Return the contents of one tag of an engine.

    Args:
        folder: Folder of the checkpoint.
        listing: Its files.
        prefix: Folder of the tag, with a ``/`` at its end.

    Raises:
        StoreError: A file could not be read.
    """
    models = _matching(listing, prefix, MODEL_STATES)
    if not models:
        problem_text = "the engine's model states are missing"
        return Contents(
            "deepspeed", _TITLE, problems=(Problem(prefix, problem_text, is_fatal=True),)
        )
    opened, problems = _open(folder, listing, models)
    if not opened:
        return Contents("deepspeed", _TITLE, problems=tuple(problems))
    engine = Engine(folder, listing, prefix, opened)
    problems += _lost_models(engine, models)
    return _with_optimizer(engine, replace(model_of(opened[0]), problems=tuple(problems)))


def _open(
    folder: Folder, listing: DirectoryListing, names: Iterable[str]
) -> tuple[list[Archive], list[Problem]]:
    opened, problems = [], []
    for name in names:
        try:
            opened.append(open_archive(folder, listing, name))
        except Unreadable as error:
            problems.append(Problem(name, str(error), is_fatal=True))
    return opened, problems


def _lost_models(engine: Engine, models: Mapping[str, re.Match[str]]) -> list[Problem]:
    """Return the problems of missing model states; with ZeRO 3 each rank has its own file."""
    cut = [model for model in models.values() if model[1]]
    present = {(int(match[1] or 0), int(match[2])) for match in cut or models.values()}
    world, rows = _sizes(engine)
    ranks = max(world or 1, max(rank for rank, _ in present) + 1) if cut else 1
    return missing(
        "the model's states of {} are missing: DeepSpeed fails without them",
        engine.prefix,
        present,
        ranks,
        rows,
    )


def _sizes(engine: Engine) -> tuple[int | None, int]:
    """Return the number of data-parallel and of model-parallel ranks."""
    state = engine.models[0].value
    fields = state if isinstance(state, dict) else {}
    return whole(fields.get("dp_world_size")), whole(fields.get("mp_world_size")) or 1


def model_of(archive: Archive) -> Contents:
    """Return the contents of a file of model states."""
    fields = archive.value if isinstance(archive.value, dict) else {}
    tensors = tensors_in(archive, fields.get("module"), MODEL)
    if not any(tensor.elements for tensor in tensors):
        # With ZeRO 3, the optimizer's files have the weights, and this file has their shapes.
        tensors = tuple(
            Tensor(name, MODEL, "F32", shape, (archive.name,))
            for name, shape in shapes_in(fields.get("param_shapes"))
        )
    version = fields.get("ds_version")
    skipped_steps = whole(fields.get("skipped_steps"))
    facts = {SKIPPED: skipped_steps} if skipped_steps else {}
    return Contents(
        "deepspeed",
        _TITLE,
        _RESUME,
        tensors,
        step=whole(fields.get("global_steps")),
        world=whole(fields.get("dp_world_size")),
        schedule=schedule_of(fields.get("lr_scheduler")),
        data={"samples": samples} if (samples := whole(fields.get("global_samples"))) else {},
        versions={"deepspeed": version[:40]} if isinstance(version, str) else {},
        facts=facts,
    )


def shapes_in(value: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return the shapes by name. A list has one dictionary per parameter group."""
    groups = value if isinstance(value, list) else [value]
    shapes = []
    for group in groups:
        for name, shape in group.items() if isinstance(group, dict) else ():
            shapes.append((str(name)[:200], shape_of(shape)))
    return shapes


def _with_optimizer(engine: Engine, contents: Contents) -> Contents:
    names = _matching(engine.listing, engine.prefix, OPTIMIZER_STATES)
    if not names:
        return _without_optimizer_files(engine, contents)
    present = {(int(name[1]), int(name[2])) for name in names.values()}
    world, rows = _sizes(engine)
    ranks = max(rank for rank, _ in present) + 1
    missing_problems = missing(
        "the optimizer's part of {} is missing",
        engine.prefix,
        present,
        max(ranks, world or 0),
        rows,
    )
    archives, open_problems = _open(engine.folder, engine.listing, names)
    tensors: list[Tensor] = []
    parts, optimizer = [], None
    for archive in archives:
        try:
            state = required(_state(archive), "an optimizer of an engine")
            rank, row = int(names[archive.name][1]), int(names[archive.name][2])
            item = _optimizer(state, archive)
            parts.append(OptimizerPartition(archive, rank, row, item.step, cuts_of(state)))
            rank_tensors = tensors_in(archive, state, OPTIMIZER)
            tensors += [
                replace(folder, name=f"rank {rank}: {folder.name}") for folder in rank_tensors
            ]
            optimizer = optimizer or item
        except Unreadable as error:
            open_problems.append(Problem(archive.name, str(error), is_fatal=True))
    return replace(
        contents,
        tensors=(*contents.tensors, *tensors),
        optimizer=optimizer,
        world=contents.world or ranks,
        problems=(
            *contents.problems,
            *missing_problems,
            *open_problems,
            *disagreements(replace(engine, parts=parts)),
        ),
    )


def _without_optimizer_files(engine: Engine, contents: Contents) -> Contents:
    """Return the contents of an engine that has no file of optimizer states.

    Without ZeRO, the model states contain the optimizer. With ZeRO, the model states contain the
    shapes of the parameters, and DeepSpeed fails if the files of the ranks are missing.
    """
    archive = engine.models[0]
    fields = archive.value if isinstance(archive.value, dict) else {}
    state = fields.get("optimizer")
    if isinstance(state, dict) and state:
        # In fp16 without ZeRO, a wrapper contains the optimizer of torch.
        inner_state = state.get("optimizer_state_dict", state)
        return replace(
            contents,
            tensors=(*contents.tensors, *tensors_in(archive, inner_state, OPTIMIZER)),
            optimizer=optimizer_of(inner_state, archive),
            problems=(*contents.problems, *disagreements(engine)),
        )
    place, is_cut = engine.prefix or ".", bool(fields.get("param_shapes"))
    world, _ = _sizes(engine)
    ranks = f"all {world} ranks" if world and world > 1 else "its rank"
    problem = (
        Problem(place, _PARTS_LOST.format(ranks), is_fatal=True, cure=Remedy.COPY)
        if is_cut
        else Problem(place, "no optimizer states beside the model's", _MOMENTS, cure=Remedy.COPY)
    )
    return replace(contents, problems=(*contents.problems, *disagreements(engine), problem))


def _state(archive: Archive) -> dict[Any, Any] | None:
    fields = archive.value if isinstance(archive.value, dict) else {}
    state = fields.get("optimizer_state_dict")
    return state if isinstance(state, dict) else None


def _optimizer(state: dict[Any, Any], archive: Archive) -> Optimizer:
    """Return the summary of one rank's partition, whose parameters are flat vectors."""
    step: int | None = None
    fault = ""
    slots: dict[str, None] = {}
    rates = []
    for path, leaf in leaves(state):
        name = str(path[-1])[:80] if isinstance(path[-1], str) else ""
        if name == "step" and leaf is not None and step is None and not fault:
            step, fault = whole(archive.number(leaf)), count_fault(leaf, archive)
        if name == "lr":
            rates.append(decimal(archive.number(leaf)))
        if name.startswith("exp_avg") or name == "momentum_buffer":
            slots[name] = None
    groups = state.get("param_groups") or state.get("single_partition_of_fp32_groups")
    count = len(groups) if isinstance(groups, list) else 0
    stated_rates = tuple(rate for rate in rates if rate is not None)
    groups_count = max(count, len(stated_rates))
    text = miscounted("state", fault) if fault else ""
    return Optimizer(step, 0, 0, groups_count, stated_rates, tuple(slots), fault=text)


def _matching(
    listing: DirectoryListing, prefix: str, pattern: re.Pattern[str]
) -> dict[str, re.Match[str]]:
    matches = {
        name: pattern.fullmatch(name[len(prefix) :]) for name in sorted(_below(listing, prefix))
    }
    return {name: match for name, match in matches.items() if match}


def _below(listing: DirectoryListing, prefix: str) -> list[str]:
    return [
        file for file in listing.sizes if file.startswith(prefix) and "/" not in file[len(prefix) :]
    ]


def _number(tag: str) -> int:
    digits = re.search(r"(\d{1,12})$", tag)
    return int(digits[1]) if digits else -1
