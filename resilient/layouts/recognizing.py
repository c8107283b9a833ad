"""Whose checkpoint a folder is, by the names in it; and what it holds."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from resilient.layouts import (
    accelerate,
    deepspeed,
    distributed,
    hf_trainer,
    lightning,
    megatron,
    modules,
    neighbours,
    plain,
    safe_slices,
    torchtitan,
    universal,
)
from resilient.layouts.archives import open_archive
from resilient.layouts.documents import POINTER, pointers_in, read_json, read_text, whole
from resilient.layouts.fitting import unfitting
from resilient.layouts.incomplete import is_cut_short, pointers, saved_name, unfinished
from resilient.layouts.layers import odd_layers
from resilient.layouts.majorities import Witnesses, odd_dtypes, odd_weight
from resilient.layouts.shards import STEMS
from resilient.layouts.values import MODEL, OPTIMIZER, Contents, Cure, Problem, Unreadable
from resilient.layouts.weights import SAFE, TORCH

if TYPE_CHECKING:
    from collections.abc import Callable

    from resilient.layouts.values import Optimizer
    from resilient.storage.folder import Folder, Listing

_STEP_FOLDER = re.compile(r"([^/]*?(\d{1,12}))/")
# What a part of a training state is called, whoever calls it -> what it is.
_WANTED = {
    r"(?i)sched": "the schedule",
    r"(?i)rng|random": "the random state",
    r"(?i)data|sampler|train_state|step$": "the place in the data",
}
_DCP_TITLE = "a distributed checkpoint of torch"


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout: its name, how it is told from others, and who reads it."""

    name: str
    is_it: Callable[[Listing], bool]
    read: Callable[[Folder, Listing], Contents]


def read_distributed(folder: Folder, listing: Listing) -> Contents:
    """Return what a distributed checkpoint of torch holds.

    Raises:
        StoreError: it could not be read.
    """
    resume = "torch.distributed.checkpoint.load(state, checkpoint_id='{path}')"
    try:
        index = distributed.read_index(folder, listing)
    except Unreadable as error:
        problem = Problem(distributed.INDEX, str(error), is_fatal=True)
        return Contents("dcp", _DCP_TITLE, problems=(problem,))
    if torchtitan.is_step(index):
        return torchtitan.read_step(folder, listing, index)
    roots = [one for one in ("optimizer.", "optim.") if _has(index, one)]
    optimizer = distributed.optimizer_at(folder, listing, index, roots[0]) if roots else None
    lacking = _lacking(index, optimizer, resume)
    return Contents(
        "dcp",
        _DCP_TITLE,
        resume,
        index.tensors,
        world=index.ranks,
        optimizer=optimizer,
        versions={"metadata": index.version} if index.version else {},
        facts={"values that are no tensors": len(index.values)} if index.values else {},
        problems=(*index.problems, *lacking),
    )


def _read_safe_slices(folder: Folder, listing: Listing) -> Contents:
    index = safe_slices.read_slices(folder, listing)
    roots = [one for one in ("optimizer.", "optim.") if _has(index, one)]
    optimizer = distributed.optimizer_at(folder, listing, index, roots[0]) if roots else None
    return Contents(
        "dcp-safetensors",
        safe_slices.TITLE,
        safe_slices.RESUME,
        index.tensors,
        world=index.ranks,
        optimizer=optimizer,
        versions={"metadata": index.version} if index.version else {},
        problems=(*index.problems, *_lacking(index, optimizer, safe_slices.RESUME)),
    )


def _lacking(index: distributed.Index, optimizer: Optimizer | None, load: str) -> list[Problem]:
    """Return what a training would want and no name in the index speaks of."""
    names = {one.name for one in index.tensors} | index.values
    found = (
        []
        if optimizer
        else [Problem(".", "no optimizer is in it", "the optimizer's state", cure=Cure.UNKEPT)]
    )
    # The step in an optimizer's state is of one parameter.
    names = {one for one in names if not one.startswith("optim")}
    for word, what in _WANTED.items():
        if not any(re.search(word, one) for one in names):
            found.append(
                Problem(".", f"nothing in it is named like {what}", what, cure=Cure.UNKEPT)
            )
    is_alone = not any(one.part == OPTIMIZER for one in index.tensors)
    if len(found) > len(_WANTED) and index.tensors and is_alone:
        return [Problem(".", plain.ALONE, plain.WEIGHTS_ONLY, is_fatal=True, help=load)]
    return found


def _has(index: distributed.Index, root: str) -> bool:
    return any(one.name.startswith(root) for one in index.tensors) or any(
        one.startswith(root) for one in index.values
    )


def _read_engine(folder: Folder, listing: Listing) -> Contents:
    if deepspeed.is_engine(listing):
        return deepspeed.read_engine(folder, listing, "")
    tag = deepspeed.tag_of(folder, listing)
    found = deepspeed.read_engine(folder, listing, tag)
    told = read_text(folder, listing, deepspeed.LATEST)
    if f"{told}/" == tag:
        return found
    what = f"it names `{told[:80]}`, which is not there" if told else "it names no tag"
    help_ = "engine.load_checkpoint('{path}', tag='" + tag.rstrip("/") + "')"
    pointer = Problem(deepspeed.LATEST, what, is_fatal=True, help=help_)
    return replace(found, problems=(pointer, *found.problems))


def _is_engine(listing: Listing) -> bool:
    return any(deepspeed.MODEL_STATES.search(one) and one.count("/") <= 1 for one in listing.sizes)


def _is_distributed(listing: Listing) -> bool:
    slices = any(one.endswith(distributed.SLICES) and "/" not in one for one in listing.sizes)
    return distributed.INDEX in listing.sizes or slices


def _is_model(listing: Listing) -> bool:
    ends = (SAFE, ".bin", f"{SAFE}.index.json", ".bin.index.json")
    return any(f"{stem}{end}" in listing.sizes for stem in STEMS for end in ends)


LAYOUTS = (
    Layout("hf-trainer", hf_trainer.is_trainer, hf_trainer.read_trainer),
    Layout("accelerate", accelerate.is_state, accelerate.read_saved_state),
    Layout("megatron", megatron.is_megatron, megatron.read_megatron),
    Layout("lightning", lightning.is_sharded, lightning.read_sharded),
    Layout("deepspeed-universal", universal.is_universal, universal.read_universal),
    Layout("dcp", _is_distributed, read_distributed),
    Layout("deepspeed", _is_engine, _read_engine),
    Layout("dcp-safetensors", safe_slices.is_sliced, _read_safe_slices),
    Layout("hf-model", _is_model, plain.read_model_folder),
)
"""In the order in which they are tried; a folder may have files of several."""


def read_layout(folder: Folder, listing: Listing) -> Contents | None:
    """Return what a checkpoint holds, whoever wrote it; None of what is no checkpoint.

    Args:
        folder: the folder, or the one file.
        listing: what is there.

    Raises:
        StoreError: it could not be read.
    """
    contents = _read(folder, listing)
    if contents is None:
        return None
    problems = unfinished(folder.url, listing, _fitted(folder, listing, contents).problems)
    found = pointers_in(folder, listing)
    told = pointers(folder.url, listing, problems, found, POINTER)
    return replace(contents, problems=tuple(told))


def _read(folder: Folder, listing: Listing) -> Contents | None:
    if not listing.is_file:
        found = next((one for one in LAYOUTS if one.is_it(listing)), None)
        is_model = found is None or found.name == "hf-model"
        if is_model and is_cut_short(folder.url, listing):
            return hf_trainer.read_trainer(folder, listing)
        return found.read(folder, listing) if found else None
    name = next(iter(listing.sizes), "")
    if name.endswith(SAFE):
        return plain.read_safetensors(folder, listing, name)
    return _read_torch(folder, listing, name) if name.endswith(TORCH) else None


def _fitted(folder: Folder, listing: Listing, contents: Contents) -> Contents:
    files = {file for one in contents.tensors for file in one.files}
    is_sliced = any(one.endswith(distributed.SLICES) for one in files)
    is_lenient = contents.layout == "hf-trainer" and not is_sliced
    is_hurt = any(one.is_fatal for one in contents.problems)
    held, known = contents.problems, _witnesses(folder, listing, contents)
    blamed = None if known is None or is_hurt else odd_weight(contents.tensors, known)
    if blamed is not None:
        # The configuration and the optimizer are right, and were told of for this weight alone.
        held = tuple(one for one in held if one.place != neighbours.CONFIG)
        misfits: tuple[Problem, ...] = (blamed,)
    else:
        misfits = unfitting(contents.tensors, is_lenient=is_lenient, is_hurt=is_hurt)
    odd = (
        *misfits,
        *odd_layers(contents.tensors),
        *(odd_dtypes(contents.tensors, known) if known else ()),
        *(neighbours.lost_config(folder.url, listing) if _is_trainer(contents) else ()),
    )
    return replace(contents, problems=(*held, *odd))


def _is_trainer(contents: Contents) -> bool:
    return contents.layout == "hf-trainer"


def _witnesses(folder: Folder, listing: Listing, contents: Contents) -> Witnesses | None:
    """Return what other files say of the weights; None where the weights are cut up."""
    files = {file for one in contents.tensors if one.part == MODEL for file in one.files}
    if not _is_trainer(contents) or not files or any("/" in one for one in files):
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
    beside = neighbours.weights_beside(folder.url)
    return Witnesses(config, total, beside)


def _read_torch(folder: Folder, listing: Listing, name: str) -> Contents:
    """Return what a file of torch's holds; Lightning's say of themselves what they are."""
    try:
        archive = open_archive(folder, listing, name)
        if lightning.is_run(archive.value):
            return lightning.read_run(archive)
        if modules.is_module(archive.value) or modules.is_program(archive):
            return modules.read_module(archive)
        return plain.read_state(archive, "torch", plain.TORCH_TITLE)
    except Unreadable as error:
        problem = Problem(name, str(error), is_fatal=True)
        return Contents("torch", plain.TORCH_TITLE, problems=(problem,))


def checkpoints_in(listing: Listing) -> list[str]:
    """Return the folders in a folder that look like checkpoints by their names, newest first."""
    found = {
        match[1]: int(match[2])
        for one in listing.sizes
        if (match := _STEP_FOLDER.match(one)) and not saved_name(match[1])
    }
    return sorted(found, key=lambda one: (-found[one], one))
