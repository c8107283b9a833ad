"""The answers of ``ckpt prune``, ``tag`` and ``untag``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from resilient.format.names import parse_trash
from resilient.showing import quoted
from resilient_cli.render import Answer, Facts, Table, human_size
from resilient_cli.views.words import NONE, count, duration, folder, part_of_near

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.format.names import CheckpointId
    from resilient.vault.registry.planning import RotationPlan
    from resilient.vault.registry.tags import Tag
    from resilient.vault.rotation.found import Found
    from resilient.vault.rotation.trash import Grace, Returned
    from resilient_cli.survey import Survey


def pruning(
    url: str,
    found: Found,
    plan: RotationPlan,
    grace: Grace,
    *,
    done: bool,
    newest: Survey | None = None,
) -> Answer:
    """Return the answer of ``ckpt prune``.

    Args:
        url: the repository.
        found: what the plan was made of.
        plan: what goes; as far as it was carried out if ``done``.
        grace: how long what goes can be brought back.
        done: whether it was carried out.
        newest: of the newest checkpoint, if that may be why nothing goes.
    """
    freed = found.freed_bytes if not plan.held else 0
    document = {
        "repository": url,
        "done": done,
        "held": plan.held,
        "unsure": plan.unsure,
        "freed_bytes": freed,
        "kept": [
            {"type": "kept", "id": one.folder, "reasons": list(reasons)}
            for one, reasons in plan.kept.items()
        ],
        "deleted": [
            {
                "type": "deleted",
                "id": one.folder,
                "size_bytes": found.size_bytes([one]),
                "still_needed_bytes": found.still_needed_bytes(one),
            }
            for one in plan.doomed
        ],
        "damaged": {one.folder: why for one, why in plan.damaged.items()},
        "grace_seconds": grace.seconds,
        "later_bytes": found.later_bytes if not plan.held else 0,
        "prune": _prune(found, plan) if done else None,
        "undo": _way_back(url, found, plan) or None if done else None,
        "emptied": [one.folder for one in sorted(found.over, reverse=True)],
    }
    kept = [_row(found, one, "keep", "; ".join(why)) for one, why in plan.kept.items()]
    verdict = "trash" if found.into else "delete"
    gone = [_row(found, one, verdict, _left(found, one)) for one in plan.doomed]
    over = [] if plan.held else sorted(found.over, reverse=True)
    gone += [_row(found, one, "delete", "its time in the trash is over") for one in over]
    table = Table(("STEP", "GEN", "SIZE", "PLAN", "ID", "REASONS"), (*kept, *gone))
    ids = tuple(one.folder for one in plan.doomed)
    told = (*_closing(url, found, plan, grace, done=done), *_part_of_near(newest))
    return Answer("ckpt.prune", "rotation", document, (table, *told), ids)


def _part_of_near(newest: Survey | None) -> tuple[str, ...]:
    if newest is None or not newest.absent_ranks:
        return ()
    note = part_of_near(newest.checkpoint, newest.absent_ranks)
    limit = "The run itself keeps no more of it than `near_total_limit`"
    return (f"{note} {limit}; to be pruned is the durable repository.",)


def _row(found: Found, one: CheckpointId, verdict: str, why: str) -> tuple[str, ...]:
    size = human_size(found.size_bytes([one]))
    return (str(one.step), str(one.generation), size, verdict, one.folder, why)


def _left(found: Found, one: CheckpointId) -> str:
    """Say how much of what goes stays, because a checkpoint that stays refers to it."""
    size_bytes = found.still_needed_bytes(one)
    return f"but {human_size(size_bytes)} of it are needed by others" if size_bytes else NONE


def _closing(
    url: str, found: Found, plan: RotationPlan, grace: Grace, *, done: bool
) -> Iterator[str]:
    if plan.held and not plan.doomed:
        yield f"Nothing was deleted: {plan.held}."
        return
    rest = f" Files that could be needed stay: {plan.unsure}." if plan.unsure else ""
    freed = found.freed_bytes if not plan.held else 0
    if found.into and plan.doomed:
        yield from _into_trash(url, found, plan, grace, done=done)
        if not freed and not rest:
            return
    number = len(found.over) + (0 if found.into else len(plan.doomed))
    gone = count(number, "checkpoint")
    if not done:
        yield f"{gone} would go, {human_size(freed)}. Nothing was deleted.{rest}"
    elif plan.held:
        yield f"{gone} deleted; the rest and all files stay for now: {plan.held}."
    else:
        yield f"{gone} deleted, {human_size(freed)} freed.{rest}"


def _into_trash(
    url: str, found: Found, plan: RotationPlan, grace: Grace, *, done: bool
) -> Iterator[str]:
    """Say what can be brought back, for how long and how."""
    gone, later = count(len(plan.doomed), "checkpoint"), human_size(found.later_bytes)
    length = duration(grace.seconds * 1000)
    if not done:
        yield f"{gone} would go to the trash, {later} for {length}. Nothing was changed."
        return
    if plan.held:
        yield f"{gone} in the trash; the rest and all files stay for now: {plan.held}."
    else:
        yield f"{gone} in the trash; {later} are freed by a rotation or prune after {length}."
    yield f"undo: {_way_back(url, found, plan)}"


def _way_back(url: str, found: Found, plan: RotationPlan) -> str:
    prune = _prune(found, plan)
    return f"resilient ckpt prune {quoted(url)} --undo {quoted(prune)}" if prune else ""


def _prune(found: Found, plan: RotationPlan) -> str | None:
    """Return the id by which it is taken back; None if nothing is in the trash by it."""
    mark = parse_trash(found.into) if plan.doomed else None
    return mark.prune if mark else None


def returning(url: str, returned: Returned, *, done: bool) -> Answer:
    """Return the answer of ``ckpt prune --undo``.

    Args:
        url: the repository.
        returned: what came back, or would.
        done: whether it did.
    """
    document = {
        "repository": url,
        "done": done,
        "prune": returned.prune,
        "back": [one.folder for one in returned.back],
        "left": {one.folder: why for one, why in returned.left.items()},
        "others": list(returned.others),
    }
    rows = [(one.folder, "back" if done else "would come back") for one in returned.back]
    rows += [(one.folder, f"stays in the trash: {why}") for one, why in returned.left.items()]
    ids = tuple(one.folder for one in returned.back)
    told: tuple[Table | str, ...] = (
        Table(("ID", "IS"), tuple(rows)),
        *_told_of(url, returned, done=done),
    )
    return Answer("ckpt.prune", "undo", document, told, ids)


def _told_of(url: str, returned: Returned, *, done: bool) -> Iterator[str]:
    back = count(len(returned.back), "checkpoint")
    if not (returned.back or returned.left):
        yield (
            f"Nothing of the prune {returned.prune} is in the trash: it was taken back before, "
            "or the trash was emptied."
        )
    elif done:
        yield f"{back} back from the trash, of the prune {returned.prune}."
    else:
        yield f"{back} would come back, of the prune {returned.prune}."
    if returned.others:
        many = count(len(returned.others), "other prune")
        again = f"resilient ckpt prune {quoted(url)} --undo {quoted(returned.others[0])}"
        yield f"{many} in the trash; the newest comes back with: {again}"


def tagging(url: str, tag: Tag) -> Answer:
    """Return the answer of ``ckpt tag``."""
    named, undo = tag.checkpoint.folder, f"resilient ckpt untag {quoted(tag.name)} {quoted(url)}"
    document = {"repository": url, "name": tag.name, "id": named, "undo": undo}
    facts = Facts((("tag", tag.name), ("names", named), ("undo", undo)))
    return Answer("ckpt.tag", "tag", document, (facts,), (named,))


def untagging(url: str, name: str, named: CheckpointId | None) -> Answer:
    """Return the answer of ``ckpt untag``; a damaged tag cannot say what it named."""
    undo = f"resilient ckpt tag {named} {name} {quoted(url)}" if named else ""
    document = {"repository": url, "name": name, "id": folder(named), "undo": undo}
    facts = Facts((("removed", name), ("named", folder(named) or NONE), ("undo", undo or NONE)))
    return Answer("ckpt.untag", "tag", document, (facts,), (name,))
