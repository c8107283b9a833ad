"""The model's and the optimizer's half of a folder, as accelerate and the Trainer lay them out.

Source: ``transformers.trainer`` 5.23 and ``accelerate.utils.fsdp_utils``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.layouts.archives import open_archive
from resilient.layouts.deepspeed import LATEST, read_engine
from resilient.layouts.distributed import INDEX, optimizer_at, read_index
from resilient.layouts.documents import read_text
from resilient.layouts.groups import odd_optimizer
from resilient.layouts.progress import device_of, optimizer_of, required
from resilient.layouts.values import MODEL, OPTIMIZER, Contents, Cure, Problem, Unreadable
from resilient.layouts.weights import read_all, read_weights

if TYPE_CHECKING:
    from resilient.layouts.values import Optimizer, Tensor
    from resilient.storage.folder import Folder, Listing

OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_MODEL_FOLDER = re.compile(r"(pytorch_model_fsdp_\d{1,4}/)\.metadata")
_MODEL_SLICES = re.compile(r"(pytorch_model_fsdp_\d{1,4}/)[^/]*\.distcp")
_OPTIMIZER_FOLDER = re.compile(r"(optimizer_\d{1,4}/)\.metadata")
_OPTIMIZER_SLICES = re.compile(r"(optimizer_\d{1,4}/)[^/]*\.distcp")
_OF_TRAINER, _FSDP = "trainer_state.json", "pytorch_model_fsdp.bin"
_ENGINE_FOLDER = re.compile(r"((?:global_step\d{1,12}|pytorch_model)/)[^/]*_optim_states\.pt")
_ENGINE_SCRIPT = "zero_to_fp32.py"
_MODEL_WHOLE = re.compile(r"pytorch_model_fsdp(?:_\d{1,4})?\.bin")


@dataclass(frozen=True, slots=True)
class Half:
    """The model's or the optimizer's half of a folder.

    Attributes:
        tensors: of it.
        optimizer: its numbers, of the optimizer's half.
        kind: what is added to the layout's title.
        problems: what is missing or broken.
        engine: what an engine of DeepSpeed inside says; it has both halves.
        world: ranks that wrote it, where it says.
        device: where the optimizer's state was when it was saved, where it says.
        is_in_one: whether it is an optimizer in one file, as torch gives it.
    """

    tensors: tuple[Tensor, ...] = ()
    optimizer: Optimizer | None = None
    kind: str = ""
    problems: tuple[Problem, ...] = ()
    engine: Contents | None = None
    world: int | None = None
    device: str = ""
    is_in_one: bool = False


def model_half(folder: Folder, listing: Listing, tag: str) -> Half:
    """Return the model's half; of an engine, both.

    Args:
        folder: where it is.
        listing: what is there.
        tag: the folder of an engine of DeepSpeed in it; empty without.

    Raises:
        StoreError: it could not be read.
    """
    sharded = _first(listing, _MODEL_FOLDER, _MODEL_SLICES)
    if sharded:
        return _half(folder, listing, sharded, MODEL, ", FSDP with sharded state")
    if tag:
        engine = read_engine(folder, listing, tag)
        kind = f", DeepSpeed in {tag.rstrip('/')}"
        return Half(engine.tensors, engine.optimizer, kind, engine.problems, engine)
    if lost := _lost_engine(folder, listing):
        engine = Contents("deepspeed", "an engine of DeepSpeed")
        return Half(kind=", DeepSpeed", problems=(lost,), engine=engine)
    whole_files = sorted(one for one in listing.sizes if _MODEL_WHOLE.fullmatch(one))
    if whole_files:
        tensors, problems = read_all(folder, listing, whole_files)
        return Half(tensors, None, ", FSDP with full state", tuple(problems))
    return _in_one(folder, listing)


def _in_one(folder: Folder, listing: Listing) -> Half:
    """Return the model's half where it is as `save_pretrained` writes it."""
    tensors, problems = read_weights(folder, listing)
    if _OF_TRAINER in listing.sizes and OPTIMIZERS[1] in listing.sizes:
        # With FSDP alone the Trainer names it so, and takes the weights of no other file.
        what = "it is missing, and with FSDP the Trainer stops at that"
        problems = [Problem(_FSDP, what, is_fatal=True, cure=Cure.COPY)]
    elif not tensors and not problems:
        problems = [Problem(".", "no weights are in it", is_fatal=True)]
    return Half(tensors, None, "", tuple(problems))


def _lost_engine(folder: Folder, listing: Listing) -> Problem | None:
    """Return whether an engine of DeepSpeed left its traces, and none of its folders is there."""
    named = read_text(folder, listing, LATEST)
    folders = (match[1] for one in listing.sizes if (match := _ENGINE_FOLDER.match(one)))
    left = next(folders, "")
    if not left and not {LATEST, _ENGINE_SCRIPT} & set(listing.sizes):
        return None
    what = (
        "the engine's model states are missing, and DeepSpeed stops at that"
        if left
        else "the folder of DeepSpeed's engine is missing, and no resume takes the model's file "
        "beside it"
    )
    return Problem(left or f"{named or 'global_step*'}/", what, is_fatal=True, cure=Cure.COPY)


def optimizer_half(
    folder: Folder, listing: Listing, model: Half, loses: str, *, is_begun: bool = True
) -> Half:
    """Return the optimizer's half; of an engine it is in the model's.

    Args:
        folder: where it is.
        listing: what is there.
        model: the other half.
        loses: what its own tool begins anew when nothing of it is there; empty: that tool stops.
        is_begun: whether steps were made.

    Raises:
        StoreError: it could not be read.
    """
    if model.engine is not None:
        return Half(optimizer=model.engine.optimizer)
    sharded = _first(listing, _OPTIMIZER_FOLDER, _OPTIMIZER_SLICES)
    if sharded:
        return _half(folder, listing, sharded, OPTIMIZER, "")
    last = OPTIMIZERS[0] if loses else OPTIMIZERS[1]
    name = next((one for one in OPTIMIZERS if listing.is_there(one)), last)
    try:
        archive = open_archive(folder, listing, name)
        found = required(optimizer_of(archive.value, archive), "an optimizer")
        odd = odd_optimizer(name, archive.value, archive, is_begun=is_begun)
        device = device_of(archive.value)
        tensors = archive.tensors(OPTIMIZER)
        return Half(tensors, found, problems=tuple(odd), device=device, is_in_one=True)
    except Unreadable as error:
        # What is missing may be passed over in silence; what is broken stops the tool.
        is_fatal = not loses or listing.is_there(name)
        cure = Cure.REPAIR if listing.is_there(name) else Cure.COPY
        return Half(problems=(Problem(name, str(error), loses, is_fatal=is_fatal, cure=cure),))


def _half(folder: Folder, listing: Listing, prefix: str, part: str, kind: str) -> Half:
    try:
        index = read_index(folder, listing, prefix, part)
    except Unreadable as error:
        return Half(kind=kind, problems=(Problem(f"{prefix}{INDEX}", str(error), is_fatal=True),))
    found = optimizer_at(folder, listing, index, "optimizer.") if part == OPTIMIZER else None
    return Half(index.tensors, found, kind, index.problems, world=index.ranks)


def _first(listing: Listing, *patterns: re.Pattern[str]) -> str:
    """Return the folder that the first of the patterns finds; empty without."""
    for pattern in patterns:
        found = sorted(match[1] for one in listing.sizes if (match := pattern.fullmatch(one)))
        if found:
            return found[0]
    return ""
