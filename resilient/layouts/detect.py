"""Detection of a checkpoint's layout (its tool and file format), and the reader of each layout.

The names of the files determine the layout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
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
    check_layer_names,
    check_optimizer_fits,
    check_wrapper_names,
)
from resilient.layouts.incomplete import (
    is_cut_short,
    is_empty,
    pointers,
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
from resilient.layouts.weights import SAFE, STEMS, TORCH, is_adapter_file
from resilient.storage.folder import DirectoryListing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from resilient.layouts.model import Optimizer
    from resilient.storage.folder import Folder

# Pattern for the names of a part of the training state -> description of the part.
_WANTED = {
    r"(?i)sched": "the schedule",
    r"(?i)rng|random": "the random state",
    r"(?i)data|sampler|train_state|step$": "the place in the data",
}
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


def layout_of(sizes: Mapping[str, int]) -> str:
    """Return the name of the layout that the names of a folder's files show; empty if unknown.

    Args:
        sizes: Size of each file in bytes, by path in the folder.
    """
    listing = DirectoryListing(sizes)
    return next((layout.name for layout in LAYOUTS if layout.is_it(listing)), "")


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
    is_lenient = any(map(is_adapter_file, files))
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
    steps, is_trainer = cache(lambda: _contents_beside(folder)), _is_trainer(contents)
    exchanged = (
        neighbours.exchanged_moments(contents, steps)
        if is_trainer and not is_hurt and not misfits
        else []
    )
    found_problems = (
        *_unusable(contents),
        *exchanged,
        *misfits,
        *(
            # A resume would initialize a weight with a wrong name again.
            replace(problem, is_fatal=contents.optimizer is not None)
            for problem in (
                *check_layer_names(contents.tensors),
                *(check_wrapper_names(contents.tensors) if _is_one_model(contents) else ()),
            )
        ),
        *names,
        *(() if is_hurt else integer_weights(contents.tensors, witnesses or Witnesses())),
        *(odd_dtypes(contents.tensors, witnesses) if witnesses else ()),
        *(odd_moments(contents, witnesses) if witnesses else ()),
        *(neighbours.lost_config(folder.url, listing) if is_trainer else ()),
    )
    partial_problems = neighbours.decide_partial_states(
        replace(contents, problems=tuple(problems)), steps
    )
    return replace(contents, problems=(*partial_problems, *found_problems))


def _contents_beside(folder: Folder) -> list[tuple[str, Contents]]:
    """Return the names and the contents of the nearest other steps, the nearest first."""
    steps = [
        (other.url.rstrip("/").rpartition("/")[2], _read(other, listing))
        for other, listing in neighbours.nearest_steps(folder.url)
    ]
    return [(name, contents) for name, contents in steps if contents is not None]


def _unusable(contents: Contents) -> list[Problem]:
    """Return the problems of an optimizer and a scheduler whose fields no step can use."""
    return [
        Problem(".", f"{noun}: {state.fault}", is_fatal=True, cure=Remedy.COPY)
        for noun, state in (("optimizer", contents.optimizer), ("schedule", contents.schedule))
        if state is not None and state.fault
    ]


def _is_one_model(contents: Contents) -> bool:
    """Return True for layouts that contain the weights of exactly one model."""
    return contents.layout in ("hf-trainer", "hf-model", "lightning")


def _is_trainer(contents: Contents) -> bool:
    return contents.layout == "hf-trainer"


def witnesses_of(folder: Folder, listing: DirectoryListing, contents: Contents) -> Witnesses | None:
    """Return facts about the weights from other files; None for weights that are sharded."""
    files = {file for tensor in contents.tensors if tensor.part == MODEL for file in tensor.files}
    is_sharded = any("/" in file and not is_adapter_file(file) for file in files)
    if not _is_trainer(contents) or not files or is_sharded:
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
