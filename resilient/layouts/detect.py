"""Detection of a checkpoint's layout, and list of the checkpoints of another tool's run.

File names determine the layout. The list of a run's checkpoints needs only names. One exception is
Lightning's ``last.ckpt``, which is opened because its name does not contain its step.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from resilient.layouts import (
    accelerate,
    dcp,
    deepspeed,
    deepspeed_universal,
    hf_trainer,
    lightning,
    megatron,
    neighbours,
    single_file,
    torchtitan,
)
from resilient.layouts.consistency import (
    UNLESS_UNUSED,
    check_layer_names,
    check_optimizer_fits,
)
from resilient.layouts.incomplete import (
    SENTINEL,
    is_cut_short,
    is_empty,
    pointers,
    saved_name,
    unfinished,
)
from resilient.layouts.json_files import POINTER, pointers_in, read_json, read_text, whole
from resilient.layouts.majorities import (
    Witnesses,
    integer_weights,
    odd_dtypes,
    odd_moments,
    odd_names,
    odd_weight,
)
from resilient.layouts.model import MODEL, OPTIMIZER, Contents, Problem, Remedy, Unreadable
from resilient.layouts.torch_zip import open_archive
from resilient.layouts.weights import SAFE, STEMS, TORCH
from resilient.storage.folder import DirectoryListing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from resilient.layouts.model import Optimizer
    from resilient.storage.folder import Folder

_STEP_FOLDER = re.compile(r"([^/]*?(\d{1,12}))/")
# Pattern for the names of a part of the training state -> description of the part.
_WANTED = {
    r"(?i)sched": "the schedule",
    r"(?i)rng|random": "the random state",
    r"(?i)data|sampler|train_state|step$": "the place in the data",
}
_ADAPTER = "adapter_model"
_DCP_TITLE = "a distributed checkpoint of torch"
EMPTY = "empty"
"""Layout of an empty folder with the name of a checkpoint."""


@dataclass(frozen=True, slots=True)
class LayoutReader:
    """Name, detector and reader of one layout."""

    name: str
    is_it: Callable[[DirectoryListing], bool]
    read: Callable[[Folder, DirectoryListing], Contents]


def read_distributed(folder: Folder, listing: DirectoryListing) -> Contents:
    """Return the contents of a distributed checkpoint of torch.

    Raises:
        StoreError: A file could not be read.
    """
    resume = "torch.distributed.checkpoint.load(state, checkpoint_id='{path}')"
    try:
        index = dcp.read_index(folder, listing)
    except Unreadable as error:
        problem = Problem(dcp.INDEX, str(error), is_fatal=True)
        return Contents("dcp", _DCP_TITLE, problems=(problem,))
    if torchtitan.is_step(index):
        return torchtitan.read_step(folder, listing, index)
    roots = [root for root in ("optimizer.", "optim.") if _has(index, root)]
    optimizer = dcp.optimizer_at(folder, listing, index, roots[0]) if roots else None
    missing_problems = _missing_state(index, optimizer, resume)
    return Contents(
        "dcp",
        _DCP_TITLE,
        resume,
        index.tensors,
        world=index.ranks,
        optimizer=optimizer,
        versions={"metadata": index.version} if index.version else {},
        facts={"values that are no tensors": len(index.values)} if index.values else {},
        problems=(*index.problems, *missing_problems),
    )


def _read_safe_slices(folder: Folder, listing: DirectoryListing) -> Contents:
    index = dcp.read_slices(folder, listing)
    roots = [root for root in ("optimizer.", "optim.") if _has(index, root)]
    optimizer = dcp.optimizer_at(folder, listing, index, roots[0]) if roots else None
    return Contents(
        "dcp-safetensors",
        dcp.TITLE,
        dcp.RESUME,
        index.tensors,
        world=index.ranks,
        optimizer=optimizer,
        versions={"metadata": index.version} if index.version else {},
        problems=(*index.problems, *_missing_state(index, optimizer, dcp.RESUME)),
    )


def _missing_state(index: dcp.Index, optimizer: Optimizer | None, load: str) -> list[Problem]:
    """Return the problems of training state that no name in the index refers to."""
    names = {tensor.name for tensor in index.tensors} | index.values
    problems = (
        []
        if optimizer
        else [Problem(".", "it contains no optimizer", "the optimizer's state", cure=Remedy.UNKEPT)]
    )
    # The step in an optimizer's state belongs to one parameter.
    names = {name for name in names if not name.startswith("optim")}
    for word, label in _WANTED.items():
        if not any(re.search(word, name) for name in names):
            problems.append(
                Problem(".", f"it contains nothing named like {label}", label, cure=Remedy.UNKEPT)
            )
    is_alone = not any(tensor.part == OPTIMIZER for tensor in index.tensors)
    if len(problems) > len(_WANTED) and index.tensors and is_alone:
        return [Problem(".", single_file.ALONE, single_file.WEIGHTS_ONLY, is_fatal=True, help=load)]
    return problems


def _has(index: dcp.Index, root: str) -> bool:
    return any(tensor.name.startswith(root) for tensor in index.tensors) or any(
        value.startswith(root) for value in index.values
    )


def _read_engine(folder: Folder, listing: DirectoryListing) -> Contents:
    if deepspeed.is_engine(listing):
        return deepspeed.read_engine(folder, listing, "")
    tag = deepspeed.tag_of(folder, listing)
    contents = deepspeed.read_engine(folder, listing, tag)
    latest = read_text(folder, listing, deepspeed.LATEST)
    if f"{latest}/" == tag:
        return contents
    problem_text = (
        f"it names `{latest[:80]}`, which does not exist" if latest else "it names no tag"
    )
    help_ = "engine.load_checkpoint('{path}', tag='" + tag.rstrip("/") + "')"
    pointer = Problem(deepspeed.LATEST, problem_text, is_fatal=True, help=help_)
    return replace(contents, problems=(pointer, *contents.problems))


def _is_engine(listing: DirectoryListing) -> bool:
    return any(
        deepspeed.MODEL_STATES.search(file) and file.count("/") <= 1 for file in listing.sizes
    )


def _is_distributed(listing: DirectoryListing) -> bool:
    slices = any(file.endswith(dcp.SLICES) and "/" not in file for file in listing.sizes)
    return dcp.INDEX in listing.sizes or slices


def _is_model(listing: DirectoryListing) -> bool:
    ends = (SAFE, ".bin", f"{SAFE}.index.json", ".bin.index.json")
    return any(f"{stem}{end}" in listing.sizes for stem in STEMS for end in ends)


LAYOUTS = (
    LayoutReader("hf-trainer", hf_trainer.is_trainer, hf_trainer.read_trainer),
    LayoutReader("accelerate", accelerate.is_state, accelerate.read_saved_state),
    LayoutReader("megatron", megatron.is_megatron, megatron.read_megatron),
    LayoutReader("lightning", lightning.is_sharded, lightning.read_sharded),
    LayoutReader(
        "deepspeed-universal", deepspeed_universal.is_universal, deepspeed_universal.read_universal
    ),
    LayoutReader("dcp", _is_distributed, read_distributed),
    LayoutReader("deepspeed", _is_engine, _read_engine),
    LayoutReader("dcp-safetensors", dcp.is_sliced, _read_safe_slices),
    LayoutReader("hf-model", _is_model, single_file.read_model_folder),
)
"""Layouts in the order of detection; a folder may have files of several."""


def read_layout(folder: Folder, listing: DirectoryListing) -> Contents | None:
    """Return the contents of a checkpoint of any known layout; None if it is not a checkpoint.

    Args:
        folder: The folder, or the single file.
        listing: Its files.

    Raises:
        StoreError: A file could not be read.
    """
    contents = _read(folder, listing)
    if contents is None:
        return None
    problems = unfinished(folder.url, listing, _fitted(folder, listing, contents).problems)
    run_pointers = pointers_in(folder, listing)
    pointer_problems = pointers(folder.url, listing, problems, run_pointers, POINTER)
    return replace(contents, problems=tuple(pointer_problems))


def _read(folder: Folder, listing: DirectoryListing) -> Contents | None:
    if is_empty(folder.url, listing):
        return Contents(EMPTY, "an empty folder")
    if not listing.is_file:
        layout_or_none = next((layout for layout in LAYOUTS if layout.is_it(listing)), None)
        is_model = layout_or_none is None or layout_or_none.name == "hf-model"
        if is_model and is_cut_short(folder.url, listing):
            return hf_trainer.read_trainer(folder, listing)
        return layout_or_none.read(folder, listing) if layout_or_none else None
    name = next(iter(listing.sizes), "")
    if name.endswith(SAFE):
        return single_file.read_safetensors(folder, listing, name)
    return _read_torch(folder, listing, name) if name.endswith(TORCH) else None


def _fitted(folder: Folder, listing: DirectoryListing, contents: Contents) -> Contents:
    files = {file for tensor in contents.tensors for file in tensor.files}
    is_lenient = any(file.startswith(_ADAPTER) for file in files)
    is_hurt = any(problem.is_fatal for problem in contents.problems)
    problems, witnesses = contents.problems, witnesses_of(folder, listing, contents)
    blamed = None if witnesses is None or is_hurt else odd_weight(contents.tensors, witnesses)
    names = tuple(odd_names(contents.tensors, witnesses)) if witnesses and not is_hurt else ()
    if blamed is not None:
        # This weight caused the problems of the configuration and of the optimizer.
        problems = tuple(problem for problem in problems if problem.place != neighbours.CONFIG)
        misfits: tuple[Problem, ...] = (blamed,)
    elif any(problem.is_fatal for problem in names):
        misfits = ()  # the lost weights; the optimizer shows only their shapes
    else:
        misfits = check_optimizer_fits(contents.tensors, is_lenient=is_lenient, is_hurt=is_hurt)
    found_problems = (
        *_unusable(contents),
        *(() if is_hurt or misfits else _exchanged_moments(folder, contents)),
        *misfits,
        *(
            # A resume would initialize a weight with a wrong name again.
            replace(problem, is_fatal=contents.optimizer is not None)
            for problem in check_layer_names(contents.tensors)
        ),
        *names,
        *(() if is_hurt else integer_weights(contents.tensors, witnesses or Witnesses())),
        *(odd_dtypes(contents.tensors, witnesses) if witnesses else ()),
        *(odd_moments(contents, witnesses) if witnesses else ()),
        *(neighbours.lost_config(folder.url, listing) if _is_trainer(contents) else ()),
    )
    decided_problems = _decide_partial_states(folder, replace(contents, problems=tuple(problems)))
    return replace(contents, problems=(*decided_problems, *found_problems))


def _unusable(contents: Contents) -> list[Problem]:
    """Return the problems of an optimizer and a scheduler whose fields no step can use."""
    return [
        Problem(".", f"{noun}: {state.fault}", is_fatal=True, cure=Remedy.COPY)
        for noun, state in (("optimizer", contents.optimizer), ("schedule", contents.schedule))
        if state is not None and state.fault
    ]


def _decide_partial_states(folder: Folder, contents: Contents) -> tuple[Problem, ...]:
    """Return the problems, with each partial state compared with the steps beside it.

    An optimizer has a state of each parameter from the first gradient on. If an older step has more
    states, this checkpoint lost states. If another step has no more states than this checkpoint,
    the other parameters had no gradient.
    """
    problems = contents.problems
    if not any(problem.what.endswith(UNLESS_UNUSED) for problem in problems):
        return problems
    owned = _state_owners(contents)
    by_steps: list[tuple[str, bool]] = []
    for other_folder, listing in neighbours.nearest_steps(folder.url):
        other = _read(other_folder, listing)
        if other is None or not other.optimizer or not contents.optimizer:
            continue
        if (other.layout, other.optimizer.params) != (contents.layout, contents.optimizer.params):
            continue
        name = other_folder.url.rstrip("/").rpartition("/")[2]
        other_owned, is_older = _state_owners(other), (other.step or 0) < (contents.step or 0)
        if is_older and not other_owned <= owned:
            by_steps.insert(0, (f"{name} beside it has a state of more", True))
        elif other_owned and other_owned <= owned:
            by_steps.append((f"they had no gradient, as {name} beside it shows", False))
    for evidence, is_lost in by_steps[:1]:
        problems = tuple(
            replace(
                problem,
                what=problem.what.replace(UNLESS_UNUSED, evidence),
                loses=problem.loses if is_lost else "",
                cure=problem.cure if is_lost else Remedy.NEEDLESS,
            )
            if problem.what.endswith(UNLESS_UNUSED)
            else problem
            for problem in problems
        )
    return problems


_WITNESSES_LEAST = 2


def _exchanged_moments(folder: Folder, contents: Contents) -> list[Problem]:
    """Return the problem of moments that have the shapes of one another in two other steps.

    An optimizer may count its parameters, so the weights do not show the owner of a moment. One
    other step alone does not show which of both is wrong.
    """
    own = _moment_shapes(contents)
    if not _is_trainer(contents) or not own:
        return []
    witnesses: list[str] = []
    for other_folder, listing in neighbours.nearest_steps(folder.url):
        other = _read(other_folder, listing)
        shapes = _moment_shapes(other) if other is not None else {}
        if shapes == own:
            return []
        differ = [name for name in own if shapes.get(name) != own[name]]
        is_permuted = Counter(own.values()) == Counter(shapes.values())
        if is_permuted and own.keys() == shapes.keys():
            place = other_folder.url.rstrip("/").rpartition("/")[2]
            witnesses.append(f"{list(shapes[differ[0]])} in {place}")
    if len(witnesses) < _WITNESSES_LEAST:
        return []
    problem_text = (
        f"`{differ[0][:80]}` has the shape {list(own[differ[0]])}, but {' and '.join(witnesses)} "
        "beside it: moments of its parameters were exchanged"
    )
    return [Problem(".", problem_text, is_fatal=True, cure=Remedy.COPY)]


def _moment_shapes(contents: Contents) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the moments of an optimizer that counts its parameters."""
    return {
        tensor.name: tensor.shape
        for tensor in contents.tensors
        if tensor.part == OPTIMIZER and re.fullmatch(r"state\.\d+\.exp_avg(?:_sq)?", tensor.name)
    }


def _state_owners(contents: Contents) -> set[tuple[str, ...]]:
    """Return the file and the parameter of each state of the optimizer."""
    return {
        (*tensor.files, tensor.name.rpartition(".")[0])
        for tensor in contents.tensors
        if tensor.part == OPTIMIZER
    }


def _is_trainer(contents: Contents) -> bool:
    return contents.layout == "hf-trainer"


def witnesses_of(folder: Folder, listing: DirectoryListing, contents: Contents) -> Witnesses | None:
    """Return facts about the weights from other files; None for weights that are sharded."""
    files = {file for tensor in contents.tensors if tensor.part == MODEL for file in tensor.files}
    if not _is_trainer(contents) or not files or any("/" in file for file in files):
        return None
    documents: list[dict[str, Any]] = []
    for name in (neighbours.CONFIG, "model.safetensors.index.json"):
        try:
            documents.append(read_json(folder, listing, name))
        except Unreadable:
            documents.append({})
    config, index = documents
    meta = index.get("metadata")
    total = whole(meta.get("total_size")) if isinstance(meta, dict) else None
    weights, distance = neighbours.weights_beside(folder.url)
    return Witnesses(config, total, weights, is_older=distance < 0)


def _read_torch(folder: Folder, listing: DirectoryListing, name: str) -> Contents:
    """Return the contents of a torch file of Lightning or of any other tool."""
    try:
        archive = open_archive(folder, listing, name)
        if lightning.is_run(archive.value):
            return lightning.read_run(archive)
        if single_file.is_module(archive.value) or single_file.is_program(archive):
            return single_file.read_module(archive)
        return single_file.read_state(archive, "torch", single_file.TORCH_TITLE)
    except Unreadable as error:
        problem = Problem(name, str(error), is_fatal=True)
        return Contents("torch", single_file.TORCH_TITLE, problems=(problem,))


def checkpoints_in(listing: DirectoryListing) -> list[str]:
    """Return the inner folders with names of checkpoints, newest first."""
    steps = {
        match[1]: int(match[2])
        for file in listing.sizes
        if (match := _STEP_FOLDER.match(file)) and not saved_name(match[1])
    }
    return sorted(steps, key=lambda checkpoint: (-steps[checkpoint], checkpoint))


WEIGHTS = "hf-model"
FILE = "file"
_REPAIRED = "repaired"
_DEPTH_MAX = 4
_DIGITS_MAX = 12
_RUNS_MAX = 16
"""Largest number of runs in a folder for which trackers and states are read."""
_POINTERS = (deepspeed.LATEST, megatron.TRACKER)
_FILES = (".ckpt", ".pt", ".pth")
_STATES = re.compile(r"\d|best|ckpt|checkpoint|final|last|model")
"""Names of a script's own files that are checkpoints, and not data or parts of a checkpoint."""
_PARTS = re.compile(r"args|loader|optim|random|rng|scaler|sched")
_STEP = re.compile(r"(?:step|iter|ckpt|checkpoint|^)[=_-]?(\d{1,12})(?!\d|[_-]\d)")
_NUMBER = re.compile(r"(?<!\d)\d{1,18}(?!\d)")
_METRIC = re.compile(r"\d+\.\d+")
_LAST = re.compile(r"last(?:-v(\d{1,6}))?\.ckpt")
"""Name of Lightning's newest checkpoint, from which ``ckpt_path="last"`` resumes."""
_LAST_READ_MAX = 16
_REST = "meta.pt"
REPORTS = ("repaired.json", "rebuilt.json")
"""Names of repair reports; a folder with a report is a repaired copy of a checkpoint."""
_REFERENCE = re.compile(r"latest(?:~(\d{1,6}))?|step:(\d{1,12})")


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """One checkpoint of a run.

    Attributes:
        name: Path in the run's folder.
        step: Step in the name; None without one.
        order: Sort key within a run: the step, or the numbers in the name.
        layout: ``Contents.layout`` according to file names; the contents may show another layout.
        size_bytes: Total size of the files.
        files: Number of files.
        changed: Time of the last write, in seconds since 1970; None if unknown.
        is_unfinished: Whether the name or a marker file shows an incomplete save.
        is_repaired: Whether our repair wrote the checkpoint beside the damaged one.
    """

    name: str
    step: int | None
    order: tuple[int, ...]
    layout: str
    size_bytes: int
    files: int
    changed: float | None = None
    is_unfinished: bool = False
    is_repaired: bool = False

    @property
    def folder(self) -> str:
        """Parent folder of the checkpoint; empty for the run's own folder."""
        return self.name.rpartition("/")[0]

    @property
    def base(self) -> str:
        """Name of the checkpoint in its parent folder."""
        return self.name.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Pointers:
    """References of runs to their checkpoints.

    Attributes:
        latest: Checkpoints that a tracker names.
        best: Checkpoints that a Trainer calls its best.
        stale: Trackers that name a missing checkpoint, each with this name.
    """

    latest: frozenset[str]
    best: frozenset[str]
    stale: Mapping[str, str]


def checkpoints_of(listing: DirectoryListing) -> list[RunCheckpoint]:
    """Return the checkpoints below a folder, newest first; checkpoints without a number are last.

    A folder of weights may contain other checkpoints, as in a finished run. Any other checkpoint
    contains no checkpoints.

    Args:
        listing: Listing of the run's folder.
    """
    folders = _folders(listing)
    layouts = {name: _layout(sizes) for name, sizes in folders.items()}
    root_layout = _layout(listing.sizes)
    if root_layout not in ("", WEIGHTS, *layouts.values()):
        return []
    holders = _holders(layouts)
    state_folders: set[str] = set()
    checkpoints = []
    for name in sorted(folders, key=lambda folder: (folder.count("/"), folder)):
        layout = layouts[name]
        if not layout or _is_below(name, state_folders) or (name, layout) in holders:
            continue
        if layout != WEIGHTS:
            state_folders.add(name)
        paths = (f"{name}/{folder}" for folder in folders[name])
        checkpoints.append(
            _run_checkpoint(name, layout, folders[name], _last_write(listing, paths))
        )
    for name, size_bytes in listing.sizes.items():
        if _is_state(name) and not _is_below(name, state_folders):
            checkpoints.append(
                _run_checkpoint(name, FILE, {name: size_bytes}, _last_write(listing, [name]))
            )
    by_name = sorted(checkpoints, key=lambda checkpoint: checkpoint.name)
    return sorted(_with_repaired(by_name), key=lambda checkpoint: checkpoint.order, reverse=True)


def _with_repaired(checkpoints: list[RunCheckpoint]) -> list[RunCheckpoint]:
    """Mark the checkpoints that a repair wrote into a folder below the run."""
    run_folders = {checkpoint.folder for checkpoint in checkpoints if not checkpoint.is_repaired}
    marked_checkpoints = [
        replace(
            checkpoint,
            is_repaired=checkpoint.is_repaired
            and bool(run_folders.intersection(_parent_folders(checkpoint.folder))),
        )
        for checkpoint in checkpoints
    ]
    names = {checkpoint.name for checkpoint in checkpoints}
    return [
        replace(checkpoint, is_repaired=True)
        if checkpoint.layout == FILE and _repaired_file(checkpoint, names)
        else checkpoint
        for checkpoint in marked_checkpoints
    ]


def _repaired_file(checkpoint: RunCheckpoint, names: set[str]) -> bool:
    """Return True for a file in ``repaired/`` beside the damaged file of the same name."""
    parent, _, last = checkpoint.folder.rpartition("/")
    return last == _REPAIRED and f"{parent}/{checkpoint.base}".removeprefix("/") in names


def _parent_folders(folder: str) -> list[str]:
    """Return the parent folders of a folder; the run's own folder has the empty name."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[:depth]) for depth in range(len(parts))]


def with_last(
    folder: Folder, listing: DirectoryListing, checkpoints: Sequence[RunCheckpoint]
) -> list[RunCheckpoint]:
    """Return the checkpoints of a run with the steps of Lightning's ``last.ckpt``, newest first.

    The name of ``last.ckpt`` contains no step, so its own state is read.

    Args:
        folder: Folder of the runs.
        listing: Files in the folder.
        checkpoints: The checkpoints.

    Raises:
        StoreError: A file could not be read.
    """
    lasts = [
        checkpoint
        for checkpoint in checkpoints
        if _LAST.fullmatch(checkpoint.base) and checkpoint.step is None
    ]
    steps = {path.name: _step_inside(folder, listing, path) for path in lasts[:_LAST_READ_MAX]}
    read_checkpoints = [
        replace(checkpoint, step=step, order=(step,))
        if (step := steps.get(checkpoint.name)) is not None
        else checkpoint
        for checkpoint in checkpoints
    ]
    return sorted(
        read_checkpoints,
        key=lambda checkpoint: (checkpoint.order, checkpoint.name in steps),
        reverse=True,
    )


def _step_inside(folder: Folder, listing: DirectoryListing, kept: RunCheckpoint) -> int | None:
    name = kept.name if kept.layout == FILE else f"{kept.name}/{_REST}"
    try:
        value = open_archive(folder, listing, name).value
    except Unreadable:
        return None
    return whole(value.get("global_step")) if isinstance(value, dict) else None


def _last_of(run: Iterable[RunCheckpoint]) -> RunCheckpoint | None:
    """Return the newest ``last.ckpt``, from which Lightning resumes."""
    numbered = [
        (match, checkpoint) for checkpoint in run if (match := _LAST.fullmatch(checkpoint.base))
    ]
    newest = sorted(numbered, key=lambda pair: (pair[1].changed or 0.0, int(pair[0][1] or 0)))
    return newest[-1][1] if newest else None


def pointed_at(
    folder: Folder, listing: DirectoryListing, checkpoints: Sequence[RunCheckpoint]
) -> Pointers:
    """Return the checkpoints that trackers name, and those that a Trainer calls its best.

    Args:
        folder: Folder of the runs.
        listing: Its files.
        checkpoints: The checkpoints, newest first.

    Raises:
        StoreError: A file could not be read.
    """
    latest, best, stale = set(), set(), {}
    for place, run in list(_by_folder(checkpoints).items())[:_RUNS_MAX]:
        checkpoint_by_base = {checkpoint.base: checkpoint for checkpoint in run}
        head = f"{place}/" if place else ""
        for pointer in _POINTERS:
            target = read_text(folder, listing, f"{head}{pointer}")
            tag = target.rstrip("/").removeprefix("./")
            names = (tag, _iteration(tag), *(f"{tag}{end}" for end in _FILES))
            checkpoint = next(
                (checkpoint_by_base[name] for name in names if name in checkpoint_by_base), None
            )
            if checkpoint is not None:
                latest.add(checkpoint.name)
            elif tag and not _is_any_there(listing, head, names):
                stale[f"{head}{pointer}"] = tag[:80]
        last = _last_of(run)
        if last is not None:
            latest.add(last.name)
        best_by_pointer = checkpoint_by_base.get(
            _best(folder, listing, checkpoint_by_base.values())
        )
        if best_by_pointer is not None:
            best.add(best_by_pointer.name)
    return Pointers(frozenset(latest), frozenset(best), stale)


def referred(
    reference: str, checkpoints: Sequence[RunCheckpoint], latest: Collection[str] = ()
) -> list[RunCheckpoint]:
    """Resolve ``latest``, ``latest~2``, ``step:500`` or a name to one checkpoint of each run.

    Args:
        reference: The reference to resolve.
        checkpoints: The checkpoints, newest first.
        latest: Checkpoints that trackers name. A run without a tracker uses its newest checkpoint.
    """
    matches = [
        checkpoint for checkpoint in checkpoints if reference in (checkpoint.name, checkpoint.base)
    ]
    match = _REFERENCE.fullmatch(reference)
    if matches or match is None:
        return matches
    if match[2] is not None:
        return [checkpoint for checkpoint in checkpoints if checkpoint.step == int(match[2])]
    states = [
        checkpoint
        for checkpoint in checkpoints
        if checkpoint.layout != WEIGHTS
        and not checkpoint.is_unfinished
        and not checkpoint.is_repaired
        if checkpoint.order or checkpoint.name in latest
    ]
    runs = _by_folder(states).values()
    distance = int(match[1] or 0)
    return [
        checkpoint
        for run in runs
        for checkpoint in _from_latest(run, latest)[distance : distance + 1]
    ]


def _from_latest(run: list[RunCheckpoint], latest: Collection[str]) -> list[RunCheckpoint]:
    at = next((nth for nth, checkpoint in enumerate(run) if checkpoint.name in latest), 0)
    if not run or not _LAST.fullmatch(run[at].base):
        return run[at:]
    # Lightning writes the newest checkpoint twice: as last.ckpt and under its own name.
    step = run[at].step
    return [
        run[at],
        *(
            checkpoint
            for checkpoint in run[at + 1 :]
            if checkpoint.step is None or checkpoint.step != step
        ),
    ]


def _is_any_there(listing: DirectoryListing, head: str, names: Iterable[str]) -> bool:
    """Return True if any file or folder has one of the names."""
    file_names = {f"{head}{name}" for name in names if name}
    starts = tuple(f"{name}/" for name in file_names)
    return any(file in file_names or file.startswith(starts) for file in listing.sizes)


def _iteration(tag: str) -> str:
    """Return the folder of a tracker's iteration, as Megatron names it."""
    return f"iter_{int(tag):07d}" if tag.isdecimal() and len(tag) < _DIGITS_MAX else ""


def _best(folder: Folder, listing: DirectoryListing, beside: Iterable[RunCheckpoint]) -> str:
    newest = next((checkpoint for checkpoint in beside if checkpoint.layout == "hf-trainer"), None)
    if newest is None:
        return ""
    try:
        state = read_json(folder, listing, f"{newest.name}/{hf_trainer.STATE}")
    except Unreadable:
        return ""
    best = state.get("best_model_checkpoint")
    return best.replace("\\", "/").rstrip("/").rpartition("/")[2] if isinstance(best, str) else ""


def _last_write(listing: DirectoryListing, names: Iterable[str]) -> float | None:
    """Return the time of the last write of some files; None if unknown."""
    return max((listing.changed[name] for name in names if name in listing.changed), default=None)


def order_of(name: str, layout: str) -> tuple[int | None, tuple[int, ...]]:
    """Return the step in a checkpoint's name (None without one), and its sort key within a run.

    Args:
        name: Path in the run's folder.
        layout: Name of its layout.
    """
    base = _METRIC.sub("", name.rpartition("/")[2].removesuffix(".ckpt"))
    steps = _STEP.findall(base)
    # The number in a name of accelerate counts saves, not steps.
    step = int(steps[-1]) if steps and layout != "accelerate" else None
    return step, tuple(map(int, _NUMBER.findall(base))) if step is None else (step,)


def _run_checkpoint(
    name: str, layout: str, sizes: Mapping[str, int], changed: float | None
) -> RunCheckpoint:
    step, order = order_of(name, layout)
    return RunCheckpoint(
        name,
        step,
        order,
        layout,
        sum(sizes.values()),
        len(sizes),
        changed,
        is_unfinished=SENTINEL in sizes or bool(saved_name(name)),
        is_repaired=any(report in sizes for report in REPORTS),
    )


def _is_state(name: str) -> bool:
    """Return True if the name of a file may be that of a checkpoint."""
    parts = name.split("/")
    is_hidden = any(part.startswith(".") for part in parts)
    base = parts[-1].lower()
    is_own = _STATES.search(base) is not None and _PARTS.search(base) is None
    is_named = name.endswith(_FILES[0]) or is_own
    return name.endswith(_FILES) and is_named and not is_hidden and len(parts) <= _DEPTH_MAX + 1


def _folders(listing: DirectoryListing) -> dict[str, dict[str, int]]:
    sizes_by_folder: dict[str, dict[str, int]] = defaultdict(dict)
    for name, size_bytes in listing.sizes.items():
        parts = name.split("/")
        if any(part.startswith(".") for part in parts[:-1]):
            continue
        for depth in range(1, min(len(parts), _DEPTH_MAX + 1)):
            sizes_by_folder["/".join(parts[:depth])]["/".join(parts[depth:])] = size_bytes
    return sizes_by_folder


def _layout(sizes: Mapping[str, int]) -> str:
    folder_listing = DirectoryListing(sizes)
    return next((layout.name for layout in LAYOUTS if layout.is_it(folder_listing)), "")


def _is_below(name: str, taken: set[str]) -> bool:
    parts = name.split("/")
    return any("/".join(parts[:depth]) in taken for depth in range(1, len(parts)))


def _holders(layouts: Mapping[str, str]) -> set[tuple[str, str]]:
    """Return pairs of a folder and the layout of an inner folder.

    If a folder and an inner folder have the same layout, only the inner folder is a checkpoint.
    """
    holders = set()
    for name, layout in layouts.items():
        parts = name.split("/")
        holders |= {("/".join(parts[:depth]), layout) for depth in range(1, len(parts))}
    return holders


def _by_folder(checkpoints: Iterable[RunCheckpoint]) -> dict[str, list[RunCheckpoint]]:
    runs: dict[str, list[RunCheckpoint]] = defaultdict(list)
    for checkpoint in checkpoints:
        runs[checkpoint.folder].append(checkpoint)
    return runs
