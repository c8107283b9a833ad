"""``resilient ckpt inspect``: contents of one checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.refs import resolve
from resilient.clock import SystemClock
from resilient.errors import RepositoryNotFound
from resilient_cli.foreign import find_in_run, inspect_foreign, is_foreign
from resilient_cli.output import CommandResult, KeyValues, Table, human_size, show
from resilient_cli.repositories import Place, Ref, Repo, open_repository, output_of, ref_and_place
from resilient_cli.store_wrappers import CachedListingStore
from resilient_cli.survey import VerifyLevel, assess_native, examine
from resilient_cli.views.foreign import build_inspect_result, conclusion, resumable
from resilient_cli.views.text import NONE, age, count, folder, inline, plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from resilient.format.manifest import Manifest, TensorEntry
    from resilient.format.parity import ParityGroup
    from resilient.layouts.model import Resumability


def inspection(
    manifest: Manifest, now: str, verdict: Resumability, *, with_tensors: bool
) -> CommandResult:
    """Build the answer of ``ckpt inspect``."""
    parts = [_part(manifest, name) for name in _part_names(manifest)]
    document = {**_document(manifest, parts), "resumable": resumable(verdict)}
    blocks: tuple[Table | KeyValues, ...] = (
        _summary(manifest, now),
        _config(manifest),
        _files(manifest),
        _parts(parts),
    )
    if with_tensors:
        tensors = [_tensor(tensor) for tensor in manifest.tensors]
        document["tensors"] = tensors
        blocks = (*blocks, _tensors(tensors))
    blocks = (*blocks, conclusion(verdict))
    return CommandResult(
        "ckpt.inspect", "checkpoint", document, blocks, (manifest.checkpoint.folder,)
    )


def _document(manifest: Manifest, parts: list[dict[str, Any]]) -> dict[str, Any]:
    files = [
        {
            "name": file.name,
            "size_bytes": file.size_bytes,
            "rank": file.rank,
            "digest": file.digest,
            "origin": folder(file.origin),
        }
        for file in manifest.files
    ]
    return {
        "id": manifest.checkpoint.folder,
        "run_id": manifest.run_id,
        "step": manifest.checkpoint.step,
        "generation": manifest.checkpoint.generation,
        "parent": folder(manifest.parent),
        "created_at": manifest.created_at,
        "format_version": manifest.format_version,
        "root": manifest.root,
        "size_bytes": manifest.size_bytes,
        "own_bytes": manifest.own_bytes,
        "referred_bytes": manifest.size_bytes - manifest.own_bytes,
        "world": dict(manifest.world),
        "config": dict(manifest.config),
        "software": dict(manifest.software),
        "data": dict(manifest.data),
        "metrics": dict(manifest.metrics),
        "protects": [checkpoint_id.folder for checkpoint_id in manifest.protects],
        "parity": [entry.to_json() for entry in manifest.parity],
        "files": files,
        "parts": parts,
    }


def _summary(manifest: Manifest, now: str) -> KeyValues:
    size = f"{human_size(manifest.size_bytes)} in {count(len(manifest.files), 'file')}"
    if manifest.own_bytes < manifest.size_bytes:
        referenced_size = human_size(manifest.size_bytes - manifest.own_bytes)
        size += f", {referenced_size} of it stored in older checkpoints"
    return KeyValues(
        (
            ("checkpoint", manifest.checkpoint.folder),
            ("run", manifest.run_id),
            ("step", str(manifest.checkpoint.step)),
            ("generation", str(manifest.checkpoint.generation)),
            ("parent", folder(manifest.parent) or "scratch"),
            ("created", f"{manifest.created_at} ({age(manifest.created_at, now)} ago)"),
            ("size", size),
            ("world", inline(manifest.world)),
            ("data", inline(manifest.data)),
            ("metrics", inline(manifest.metrics)),
            ("protects", ", ".join(map(str, manifest.protects)) or NONE),
            *(("parity", _parity(group)) for group in manifest.parity),
            ("software", inline(manifest.software)),
            ("root", manifest.root),
        )
    )


def _parity(group: ParityGroup) -> str:
    may_go = count(len(group.parity), "file")
    return f"any {may_go} of {', '.join(group.shares)} may be lost"


def _config(manifest: Manifest) -> Table:
    rows = tuple((name, plain(value)) for name, value in manifest.config.items())
    return Table(("CONFIG", "VALUE"), rows)


def _files(manifest: Manifest) -> Table:
    return Table(
        ("FILE", "SIZE", "RANK", "DIGEST"),
        tuple(
            (file.name, human_size(file.size_bytes), str(file.rank), file.digest)
            for file in manifest.files
        ),
    )


def _part_names(manifest: Manifest) -> list[str]:
    """Return every part once; the receipts of several ranks repeat a part that all of them have."""
    names = [part.name for part in manifest.parts]
    return list(dict.fromkeys([*names, *(tensor.part for tensor in manifest.tensors)]))


def _part(manifest: Manifest, name: str) -> dict[str, Any]:
    tensors = [tensor for tensor in manifest.tensors if tensor.part == name]
    scope = next((part.scope for part in manifest.parts if part.name == name), "")
    return {
        "type": "part",
        "name": name,
        "scope": scope,
        "tensors": len(tensors),
        "size_bytes": sum(tensor.size_bytes for tensor in tensors),
    }


def _parts(parts: Iterable[Mapping[str, Any]]) -> Table:
    return Table(
        ("PART", "SCOPE", "TENSORS", "SIZE"),
        tuple(
            (
                part["name"],
                part["scope"] or NONE,
                str(part["tensors"]),
                human_size(part["size_bytes"]),
            )
            for part in parts
        ),
    )


def _tensor(tensor: TensorEntry) -> dict[str, Any]:
    return {
        "type": "tensor",
        "name": tensor.name,
        "part": tensor.part,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "size_bytes": tensor.size_bytes,
        "files": sorted({region.file for region in tensor.regions}),
    }


def _tensors(tensors: Iterable[Mapping[str, Any]]) -> Table:
    return Table(
        ("TENSOR", "DTYPE", "SHAPE", "SIZE", "FILES"),
        tuple(
            (
                tensor["name"],
                tensor["dtype"],
                "x".join(map(str, tensor["shape"])) or "scalar",
                human_size(tensor["size_bytes"]),
                ", ".join(tensor["files"]),
            )
            for tensor in tensors
        ),
    )


NOT_RESUMABLE = 1


def inspect(
    ctx: typer.Context,
    ref: Ref = None,
    place: Place = None,
    repo: Repo = None,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="Show each tensor.")] = False,
) -> int:
    """Show the contents of one checkpoint: world, config, software, data, files, tensors.

    The last line says whether training can resume from the checkpoint, judged by the file sizes;
    `ckpt verify` reads the files.

    A path or URL without a repository can also be a checkpoint of another tool: Transformers'
    Trainer, a distributed checkpoint of torch, DeepSpeed, a file of torch or of safetensors. Only
    headers are read, without torch and without unpickling.

    Exit code 0: training can resume, possibly with a loss that the answer names. 1: training cannot
    resume.

    Example: resilient ckpt inspect latest runs/gpt2 --tensors

    Example: resilient ckpt inspect step:500 theirs/output
    """
    ref, place = ref_and_place(ref, place, repo)
    url = place or repo
    if ref is None and url and is_foreign(url) and (foreign_checkpoint := inspect_foreign(url)):
        show(build_inspect_result(foreign_checkpoint, with_tensors=tensors), output_of(ctx))
        return NOT_RESUMABLE if foreign_checkpoint.verdict.answer == "no" else 0
    store = open_repository(place, repo)
    try:
        checkpoint = resolve(store, ref or "latest")
    except RepositoryNotFound:
        path = find_in_run(ref, url)
        if path is None:
            raise
        return inspect(ctx, None, path, tensors=tensors)
    survey = examine(
        CachedListingStore(store, f"{checkpoint.folder}/"), checkpoint, VerifyLevel.QUICK
    )
    # An unreadable manifest raises the error that describes its damage.
    manifest = survey.manifest or read_manifest(store, checkpoint)
    verdict = assess_native(store, manifest, survey)
    answer = inspection(manifest, SystemClock().now_iso(), verdict, with_tensors=tensors)
    show(answer, output_of(ctx))
    return NOT_RESUMABLE if verdict.answer == "no" else 0
