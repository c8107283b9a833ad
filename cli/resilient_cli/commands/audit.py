"""``resilient audit``: was every sample trained on exactly once, in all lives of the run?"""

from __future__ import annotations

from typing import Annotated

import typer

from resilient.errors import NoIntactCheckpoint, NothingToResume
from resilient.showing import quoted
from resilient.vault.ledger.audit import audit as audit_ledger
from resilient.vault.registry.catalog import lineage
from resilient_cli.places import Place, Repo, committed_of, open_repository, output_of, signing_of
from resilient_cli.render import show
from resilient_cli.views.auditing import auditing

NOT_PROVEN = 1


def audit(
    ctx: typer.Context,
    place: Place = None,
    repo: Repo = None,
    *,
    require_signature: Annotated[
        bool,
        typer.Option(
            "--require-signature",
            help="A manifest that the key of RESILIENT_SIGNING_KEY or RESILIENT_SIGNING_KEY_FILE "
            "has not signed proves nothing. RESILIENT_REQUIRE_SIGNATURE asks for the same.",
        ),
    ] = False,
) -> int:
    """Prove from the ledger that no sample was lost or trained twice, in all lives of the run.

    It follows the chain of records from the newest checkpoint back to the beginning, through
    rollbacks and changes of the number of ranks, and computes the order of each epoch anew.
    Exit code 0: proven. 1: not; the first record that is not what it should be is named.

    Example: resilient audit runs/gpt2
    """
    signing = signing_of(is_required=require_signature)
    store = open_repository(place, repo, reads_unsigned=True)
    committed_of(store)
    known = lineage(store)
    if not known.candidates and known.lost:
        raise NoIntactCheckpoint(
            f"nothing in `{store.url}` is left that could be audited: {known.lost}",
            hint=f"resilient ckpt verify --all {quoted(store.url)}",
        )
    if not known.candidates:
        raise NothingToResume(f"no checkpoint was committed in `{store.url}` yet")
    found = audit_ledger(store, known.candidates, signing)
    show(auditing(store.url, found), output_of(ctx))
    return 0 if found.is_proven else NOT_PROVEN
