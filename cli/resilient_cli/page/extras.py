"""What ``resilient report -o`` reads of checkpoints because it was asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.errors import RepositoryNotFound
from resilient.showing import quoted
from resilient.vault.registry.catalog import committed, read_manifest
from resilient.vault.registry.references import resolve
from resilient_cli.commands.listing import store_of
from resilient_cli.page.html import Extras
from resilient_cli.page.stored import verified
from resilient_cli.progress import Progress
from resilient_cli.survey import Level, examine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from resilient.comparison.values import Side
    from resilient.storage.store import Store


def extras_of(
    run: Sequence[Path],
    tensors: str | None,
    pair: tuple[str, str] | None,
    *,
    verify: bool,
) -> Extras:
    """Return what was asked for; nothing is read where nothing was.

    Args:
        run: folders of the run.
        tensors: the checkpoint whose tensors are drawn.
        pair: checkpoints to compare.
        verify: whether all bytes are read.

    Raises:
        RepositoryNotFound: no folder is a repository.
        ResilientError: a reference names nothing, or it could not be read.
    """
    if not (tensors or pair or verify):
        return Extras()
    store = store_of(run)
    if store is None:
        raise RepositoryNotFound(
            f"no checkpoints in `{run[0]}`; a run's output folder is wanted",
            hint=f"resilient ckpt ls {quoted(run[0])}",
        )
    checked, said = _verified(store) if verify else ({}, "")
    return Extras(
        _tensors(_side(store, tensors)) if tensors else "",
        _compared(_side(store, pair[0]), _side(store, pair[1])) if pair else "",
        checked,
        said,
    )


def _side(store: Store, ref: str) -> Side:
    from resilient.comparison.ours import side_of

    return side_of(store, read_manifest(store, resolve(store, ref)))


def _tensors(side: Side) -> str:
    from resilient_cli.page.pictures import pictures_of
    from resilient_cli.page.tensors import tensors

    with Progress("drawing") as told:
        return tensors(side, pictures_of(side, told))


def _compared(before: Side, after: Side) -> str:
    from resilient.comparison.comparing import compare
    from resilient_cli.page.compared import comparison
    from resilient_cli.page.pictures import pictures_of_both

    with Progress("comparing") as told:
        found = compare(before, after, told=told)
    with Progress("drawing") as told:
        return comparison(found, pictures_of_both(found, told))


def _verified(store: Store) -> tuple[dict[str, str], str]:
    """Return a word for each checkpoint, and what is wrong with those that are not whole."""
    words: dict[str, str] = {}
    said: list[str] = []
    found = committed(store)
    with Progress("verifying") as told:
        for nth, checkpoint in enumerate(found, 1):
            one = examine(store, checkpoint, Level.DEEP)
            state = "damaged" if one.damaged else "warning" if one.findings else "ok"
            words[checkpoint.folder] = f'<span class="s-{state}">{one.state}</span>'
            if one.findings:
                said.append(verified(one, Level.DEEP))
            told(nth, len(found))
    return words, "<h3>What is wrong</h3>" + "".join(said) if said else ""
