"""``resilient ckpt inspect``: what a checkpoint says of itself."""

from __future__ import annotations

from typing import Annotated

import typer

from resilient.clock import SystemClock
from resilient.errors import RepositoryNotFound
from resilient.vault.registry.catalog import read_manifest
from resilient.vault.registry.references import resolve
from resilient_cli.foreign import is_foreign, look
from resilient_cli.listed import ListedStore
from resilient_cli.places import Place, Ref, Repo, open_repository, output_of, ref_and_place
from resilient_cli.render import show
from resilient_cli.resuming import judge_ours
from resilient_cli.runs import in_run
from resilient_cli.survey import Level, examine
from resilient_cli.views.foreign import looked_at
from resilient_cli.views.inspection import inspection

NOT_RESUMABLE = 1


def inspect(
    ctx: typer.Context,
    ref: Ref = None,
    place: Place = None,
    repo: Repo = None,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="Show each tensor.")] = False,
) -> int:
    """Show what one checkpoint says of itself: world, config, software, data, files, tensors.

    The answer ends with whether training can go on from it, as far as sizes of files tell; `ckpt
    verify` reads them.

    A lone path or URL may also be a checkpoint of another tool: Transformers' Trainer, a
    distributed checkpoint of torch, DeepSpeed, a file of torch or of safetensors. It is read
    without torch and without unpickling, headers alone.

    Exit code 0: training can go on, maybe with a loss that is named. 1: it cannot.

    Example: resilient ckpt inspect latest runs/gpt2 --tensors

    Example: resilient ckpt inspect step:500 theirs/output
    """
    ref, place = ref_and_place(ref, place, repo)
    url = place or repo
    if ref is None and url and is_foreign(url) and (looked := look(url)):
        show(looked_at(looked, with_tensors=tensors), output_of(ctx))
        return NOT_RESUMABLE if looked.verdict.answer == "no" else 0
    store = open_repository(place, repo)
    try:
        checkpoint = resolve(store, ref or "latest")
    except RepositoryNotFound:
        path = in_run(ref, url)
        if path is None:
            raise
        return inspect(ctx, None, path, tensors=tensors)
    found = examine(ListedStore(store, f"{checkpoint.folder}/"), checkpoint, Level.QUICK)
    # Of one that could not be read this raises what is wrong with it.
    manifest = found.manifest or read_manifest(store, checkpoint)
    verdict = judge_ours(store, manifest, found)
    answer = inspection(manifest, SystemClock().now_iso(), verdict, with_tensors=tensors)
    show(answer, output_of(ctx))
    return NOT_RESUMABLE if verdict.answer == "no" else 0
