"""Reader of DeepSpeed's universal checkpoints, which have one folder per parameter.

Source: ``deepspeed.checkpoint.ds_to_universal`` and ``.universal_checkpoint`` (0.19). The weights
and moments are whole tensors, so any number of ranks can load them. The checkpoint also contains
the model states file of the converted checkpoint, with the counters and the scheduler.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.format.regions import whole as whole_of
from resilient.layouts.deepspeed import MODEL_STATES, model_of, shapes_in
from resilient.layouts.field_types import count_fault, miscounted
from resilient.layouts.json_files import decimal, read_text, whole
from resilient.layouts.model import (
    MODEL,
    OPTIMIZER,
    Contents,
    Optimizer,
    Problem,
    Remedy,
    Tensor,
    Unreadable,
)
from resilient.layouts.pickle_reader import TensorRef
from resilient.layouts.torch_zip import Archive, open_archive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.storage.folder import DirectoryListing, Folder

LATEST = "latest_universal"
STATE = "zero/optimizer_state.pt"
WEIGHTS = "fp32"
_PIECE = re.compile(r"zero/(.+)/([^/]+)\.pt")
_TITLE = "a universal checkpoint of DeepSpeed"
_RESUME = "engine.load_checkpoint('{path}/..')"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def is_universal(listing: DirectoryListing, prefix: str = "") -> bool:
    """Return True if a folder is the folder of a tag of this layout, or its parent folder."""
    if any(
        _PIECE.fullmatch(file[len(prefix) :]) for file in listing.sizes if file.startswith(prefix)
    ):
        return True
    return not prefix and bool(tag_in(listing))


def tag_in(listing: DirectoryListing) -> list[str]:
    """Return the folders of tags in a folder."""
    heads = {file.partition("/")[0] + "/" for file in listing.sizes if "/" in file}
    return sorted(prefix for prefix in heads if prefix != "zero/" and is_universal(listing, prefix))


def read_universal(folder: Folder, listing: DirectoryListing) -> Contents:
    """Return the contents of a universal checkpoint; for a parent folder, of the latest tag.

    Raises:
        StoreError: A file could not be read.
    """
    prefix = "" if _is_tag_folder(listing) else _latest(folder, listing)
    if prefix is None:
        latest = read_text(folder, listing, LATEST)[:80]
        problem_text = f"it names `{latest}`, which does not exist" if latest else "it names no tag"
        help_ = "resilient ckpt inspect {path}/" + tag_in(listing)[-1].rstrip("/")
        problem = Problem(LATEST, problem_text, is_fatal=True, help=help_)
        return Contents("deepspeed-universal", _TITLE, problems=(problem,))
    pieces = _pieces(listing, prefix)
    tensors, steps, piece_problems = _tensors(folder, listing, pieces)
    engine, shapes, engine_problems = _engine(folder, listing, prefix)
    optimizer, optimizer_problems = _optimizer(folder, listing, prefix, pieces, steps)
    tensors = tuple(_shaped(tensor, shapes) for tensor in tensors)
    return replace(
        engine,
        layout="deepspeed-universal",
        title=_TITLE,
        resume=_RESUME if not prefix else _RESUME.replace("/..", ""),
        tensors=tensors,
        optimizer=optimizer,
        problems=(
            *engine_problems,
            *piece_problems,
            *optimizer_problems,
            *_missing_parameters(prefix, pieces, shapes),
            *_wrong_sizes(tensors, shapes),
            *_disagreements(prefix, engine, steps),
            Problem(
                ".", "DeepSpeed keeps no random states", "the random state", cure=Remedy.UNKEPT
            ),
        ),
    )


def _is_tag_folder(listing: DirectoryListing) -> bool:
    """Return True if a folder is the folder of a tag, and not a parent folder."""
    return any(_PIECE.fullmatch(file) for file in listing.sizes)


def _latest(folder: Folder, listing: DirectoryListing) -> str | None:
    tags = tag_in(listing)
    latest = read_text(folder, listing, LATEST)
    return f"{latest}/" if f"{latest}/" in tags else None


def _pieces(listing: DirectoryListing, prefix: str) -> dict[str, dict[str, str]]:
    """Return the files of each parameter by kind of content."""
    pieces: dict[str, dict[str, str]] = {}
    for file in listing.sizes:
        match = _PIECE.fullmatch(file[len(prefix) :]) if file.startswith(prefix) else None
        if match:
            pieces.setdefault(match[1], {})[match[2]] = file
    return pieces


def _tensors(
    folder: Folder, listing: DirectoryListing, pieces: Mapping[str, Mapping[str, str]]
) -> tuple[tuple[Tensor, ...], dict[str, int], list[Problem]]:
    """Return the tensors, the step of each parameter, and the problems of unreadable files."""
    tensors: list[Tensor] = []
    steps: dict[str, int] = {}
    problems = []
    for name, files in sorted(pieces.items()):
        for kind, file in sorted(files.items()):
            try:
                archive = open_archive(folder, listing, file)
                step = whole(archive.number(archive.value)) if kind == "step" else None
                fault = count_fault(archive.value, archive) if kind == "step" else ""
                if fault:
                    problems.append(Problem(file, miscounted(name, fault), is_fatal=True))
                elif step is not None:
                    steps[name] = step
                else:
                    tensors.append(_tensor(archive, name, kind))
            except Unreadable as error:
                problems.append(Problem(file, str(error), is_fatal=True))
    return tuple(tensors), steps, problems


def _tensor(archive: Archive, name: str, kind: str) -> Tensor:
    value = archive.value.get("param") if isinstance(archive.value, dict) else archive.value
    if not isinstance(value, TensorRef):
        raise Unreadable("it holds no tensors")
    is_weight = kind == WEIGHTS
    return Tensor(
        name if is_weight else f"state.{name}.{kind}",
        MODEL if is_weight else OPTIMIZER,
        value.dtype,
        value.shape,
        (archive.name,),
        archive.pieces(value),
    )


def _engine(
    folder: Folder, listing: DirectoryListing, prefix: str
) -> tuple[Contents, dict[str, tuple[int, ...]], list[Problem]]:
    """Return the contents of the engine's model states, and the shapes of its parameters."""
    names = [file for file in listing.sizes if file.startswith(prefix)]
    models = sorted(name for name in names if MODEL_STATES.fullmatch(name[len(prefix) :]))
    no_contents = Contents("", "")
    if not models:
        problem_text = "the engine's model states are missing"
        return no_contents, {}, [Problem(prefix or ".", problem_text, is_fatal=True)]
    try:
        archive = open_archive(folder, listing, models[0])
        return model_of(archive), _shapes(archive), []
    except Unreadable as error:
        return no_contents, {}, [Problem(models[0], str(error), is_fatal=True)]


def _optimizer(
    folder: Folder,
    listing: DirectoryListing,
    prefix: str,
    pieces: Mapping[str, Mapping[str, str]],
    steps: Mapping[str, int],
) -> tuple[Optimizer | None, list[Problem]]:
    name = f"{prefix}{STATE}"
    try:
        archive = open_archive(folder, listing, name)
    except Unreadable as error:
        return None, [Problem(name, str(error), is_fatal=True)]
    groups = archive.value.get("param_groups") if isinstance(archive.value, dict) else None
    dicts = [
        group for group in (groups if isinstance(groups, list) else []) if isinstance(group, dict)
    ]
    rates = (decimal(archive.number(group.get("lr"))) for group in dicts)
    slots = dict.fromkeys(sorted({kind for files in pieces.values() for kind in files}))
    params = [piece for piece in pieces.values() if set(piece) - {WEIGHTS}]
    optimizer = Optimizer(
        max(steps.values(), default=None),
        len(params),
        len(pieces),
        len(dicts),
        tuple(rate for rate in rates if rate is not None),
        tuple(slot for slot in slots if slot != WEIGHTS),
    )
    return optimizer, []


def _shapes(archive: Archive) -> dict[str, tuple[int, ...]]:
    value = archive.value if isinstance(archive.value, dict) else {}
    return dict(shapes_in(value.get("param_shapes")))


def _missing_parameters(
    prefix: str, pieces: Mapping[str, Mapping[str, str]], shapes: Mapping[str, Any]
) -> list[Problem]:
    """Return the problems of missing parameters, and of parameters with missing files."""
    missing_names = [shape for shape in shapes if shape not in pieces]
    problems = [
        Problem(f"{prefix}zero/{item[:200]}", "the parameter is missing", is_fatal=True)
        for item in missing_names[:8]
    ]
    for name, files in sorted(pieces.items()):
        kinds = [WEIGHTS, *(_MOMENTS if any(moment in files for moment in _MOMENTS) else ())]
        problems += [
            Problem(f"{prefix}zero/{name[:200]}/{kind}.pt", "it is missing", is_fatal=True)
            for kind in kinds
            if kind not in files
        ]
    bare = [shape for shape in shapes if shape in pieces and not set(_MOMENTS) & set(pieces[shape])]
    if bare and any(set(_MOMENTS) & set(piece) for piece in pieces.values()):
        problem_text = f"`{bare[0][:80]}` has weights and no moments"
        problems.append(
            Problem(
                f"{prefix}zero/{bare[0][:200]}",
                problem_text,
                "a part of the optimizer's state",
                cure=Remedy.COPY,
            )
        )
    return problems[:32]


def _shaped(tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    """Return a tensor in the shape of its parameter, because ZeRO 3 stores flat tensors."""
    shape = shapes.get(_owner(tensor))
    if shape is None or len(tensor.shape) != 1 or math.prod(shape) != tensor.elements:
        return tensor
    if any(piece.strides not in (None, (1,)) for piece in tensor.pieces):
        return tensor
    pieces = tuple(replace(piece, region=whole_of(shape), strides=None) for piece in tensor.pieces)
    return replace(tensor, shape=shape, pieces=pieces)


def _owner(tensor: Tensor) -> str:
    if tensor.part == MODEL:
        return tensor.name
    return tensor.name.removeprefix("state.").rpartition(".")[0]


def _wrong_sizes(
    tensors: tuple[Tensor, ...], shapes: Mapping[str, tuple[int, ...]]
) -> list[Problem]:
    """Return the problems of tensors whose size differs from their parameter."""
    problems = []
    for tensor in tensors:
        name = _owner(tensor)
        if name in shapes and tensor.elements != math.prod(shapes[name]):
            problem_text = (
                f"it has {tensor.elements} elements, but the parameter has "
                f"{math.prod(shapes[name])}"
            )
            problems.append(Problem(tensor.files[0], problem_text, is_fatal=True))
    return problems[:8]


def _disagreements(prefix: str, contents: Contents, steps: Mapping[str, int]) -> list[Problem]:
    distinct = sorted(set(steps.values()))
    if len(distinct) > 1:
        problem_text = f"its parameters are of different steps, {distinct[0]} and {distinct[-1]}"
        return [
            Problem(prefix or ".", problem_text, "the consistency of its files", cure=Remedy.COPY)
        ]
    if distinct and contents.step is not None and distinct[0] > contents.step:
        problem_text = f"the optimizer made {distinct[0]} updates by step {contents.step}"
        return [
            Problem(prefix or ".", problem_text, "the consistency of its files", cure=Remedy.COPY)
        ]
    return []
