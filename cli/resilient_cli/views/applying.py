"""The answers of ``k8s diff``, ``apply`` and ``delete``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from resilient.showing import without_users
from resilient_cli.kubernetes.states import claims_of, repository_of
from resilient_cli.render import Answer, Facts, Table
from resilient_cli.views.words import NONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient_cli.kubernetes.change import Change
    from resilient_cli.kubernetes.kubectl import Cluster

_WOULD = {"created": "create", "changed": "change", "unchanged": "leave"}


def changes(command: str, found: Sequence[Change], name: str, cluster: Cluster) -> Answer:
    """Return what becomes of each object, field by field, and what to do next.

    Args:
        command: ``apply`` for what was done, ``diff`` for what would be.
        found: the changes.
        name: of the run.
        cluster: where.
    """
    done = command == "apply"
    rows = tuple((one.object, one.action if done else _WOULD[one.action]) for one in found)
    fields = tuple(
        (
            one.object,
            each.path,
            without_users(each.before) or NONE,
            without_users(each.after) or NONE,
        )
        for one in found
        for each in one.fields
    )
    words = ("status", "wait", "logs") if done else ()
    following = tuple(cluster.spell("resilient", "k8s", one, name) for one in words)
    document = {"changes": [_document(one) for one in found], "next": list(following)}
    blocks: tuple[Table | str, ...] = (
        Table(("OBJECT", "DONE" if done else "WOULD"), rows),
        Table(("OBJECT", "FIELD", "BEFORE", "AFTER"), fields),
        *(f"next: {one}" for one in following),
    )
    ids = tuple(one.object for one in found if one.action != "unchanged")
    return Answer(f"k8s.{command}", "changes", document, blocks, ids)


def deletion(name: str, found: Sequence[dict[str, Any]], *, done: bool) -> Answer:
    """Return what of a run is deleted, and what stays."""
    objects = tuple(f"{one['kind'].lower()}/{one['metadata']['name']}" for one in found)
    claims = sorted({claim for one in found for claim in claims_of(one.get("spec"))})
    repositories = {without_users(repository_of(one)) for one in found} - {""}
    stays = (*sorted(repositories), *(f"persistentvolumeclaim/{one}" for one in claims))
    document = {"name": name, "deleted": list(objects), "stays": list(stays), "done": done}
    word = "deleted" if done else "would be deleted"
    kept = tuple(("stays", one) for one in (*stays, "Secrets, and every checkpoint"))
    blocks = (
        Facts((*((word, one) for one in objects), *kept)),
        "Its pods get SIGTERM, save, and go within their grace.",
    )
    return Answer("k8s.delete", "deletion", document, blocks, objects)


def _document(one: Change) -> dict[str, Any]:
    made = asdict(one)
    for field in made["fields"]:
        field |= {"before": without_users(field["before"]), "after": without_users(field["after"])}
    return made
