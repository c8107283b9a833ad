"""What a rotation deletes, and every reason for what it keeps. Pure.

What stays is the union of all reasons. Whatever a policy counts, the line of descent counts
first: an abandoned checkpoint never takes the place of one that resume may use.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from resilient.clock import parse_length

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from resilient.format.names import CheckpointId
    from resilient.vault.registry.retention import BestOf, Retention


@dataclass(frozen=True, slots=True)
class Content:
    """What a manifest says that a policy may ask for.

    Attributes:
        created_at: UTC, ISO 8601; empty where the manifest cannot be read.
        metrics: what was measured at its step.
        problem: what is wrong with the checkpoint; empty where nothing was seen.
        protects: checkpoints that the run wanted kept when it saved this one.
        refers: keys of files in older checkpoints' folders that it needs; None where nobody
            can tell.
    """

    created_at: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    protects: tuple[CheckpointId, ...] = ()
    refers: frozenset[str] | None = frozenset()

    @property
    def is_readable(self) -> bool:
        """Whether the manifest could be read."""
        return bool(self.created_at)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a repository before something goes.

    Attributes:
        line: committed checkpoints that resume may use, in the order to try.
        abandoned: the others, newest first.
        separate: of another start from scratch; they stay and count nowhere.
        pinned: who holds which, as reasons: tags, a life that has saved nothing yet.
        keep: what the run itself wants kept, its best; they take places of ``keep_last``, as
            Transformers counts, but the newest always stays.
        contents: of each checkpoint, where a policy needs it.
        held: why nothing may go at all; empty if nothing says so.
    """

    line: Sequence[CheckpointId]
    abandoned: Sequence[CheckpointId] = ()
    pinned: Mapping[CheckpointId, Sequence[str]] = field(default_factory=dict)
    keep: Collection[CheckpointId] = ()
    contents: Mapping[CheckpointId, Content] = field(default_factory=dict)
    held: str = ""
    separate: Sequence[CheckpointId] = ()

    @property
    def everything(self) -> tuple[CheckpointId, ...]:
        """All that count, in the order in which they do."""
        return (*self.line, *self.abandoned)


@dataclass(frozen=True, slots=True)
class RotationPlan:
    """What goes, in order, and why each of the others is kept.

    Attributes:
        doomed: what goes, first to last.
        kept: every reason of each that stays.
        damaged: what would count as best and is not whole, or cannot be read; it stays and
            somebody must be told.
        held: why nothing goes; empty unless something holds all.
        unsure: why files of what went stay for now; empty unless something holds them.
    """

    doomed: tuple[CheckpointId, ...]
    kept: Mapping[CheckpointId, tuple[str, ...]]
    damaged: Mapping[CheckpointId, str] = field(default_factory=dict)
    held: str = ""
    unsure: str = ""

    def lines(self) -> list[str]:
        """Return the plan for people: what is kept and why, then what goes."""
        return [
            *(f"keep   {one}: {'; '.join(reasons)}" for one, reasons in self.kept.items()),
            *(f"delete {one}" for one in self.doomed),
        ]


def plan_rotation(retention: Retention, known: Known) -> RotationPlan:
    """Return what to delete, oldest and abandoned first, and every reason to keep the others.

    Args:
        retention: the policies.
        known: the repository.
    """
    reasons: dict[CheckpointId, list[str]] = defaultdict(list)
    damaged = dict(_damaged(retention, known))
    for one, reason in _reasons(retention, known):
        reasons[one].append(reason)
    for one, problem in damaged.items():
        reasons[one].append(problem)
    if known.held:
        for one in known.everything:
            reasons[one].append(f"nothing goes: {known.held}")
    everything = known.everything
    for one in known.separate:
        reasons[one].append("of another start from scratch, which rotation leaves alone")
    return RotationPlan(
        doomed=tuple(one for one in reversed(everything) if one not in reasons),
        kept={
            one: tuple(dict.fromkeys(reasons[one]))
            for one in (*everything, *known.separate)
            if one in reasons
        },
        damaged={one: damaged[one] for one in everything if one in damaged},
        held=known.held,
    )


def best_by(wanted: BestOf, known: Known) -> list[CheckpointId]:
    """Return the intact checkpoints that are the best by one metric, the best first."""
    whole = [one for one in _ranked(wanted, known) if not known.contents[one].problem]
    return whole[: wanted.count]


def _reasons(retention: Retention, known: Known) -> Iterator[tuple[CheckpointId, str]]:
    """Yield every reason for every checkpoint, in the order in which they read best."""
    if retention.is_empty:
        yield from ((one, "no limit is set") for one in known.everything)
    yield from ((one, "the newest") for one in known.everything[:1])
    for one, holders in known.pinned.items():
        yield from ((one, holder) for holder in holders)
    yield from ((one, "the run protects it") for one in known.keep)
    yield from _among_the_last(retention, known)
    for wanted in retention.keep_best:
        for place, one in enumerate(best_by(wanted, known), start=1):
            value = wanted.value(known.contents[one].metrics)
            yield one, f"number {place} of the best {wanted.count} by {wanted.metric} ({value:g})"
    if retention.keep_every:
        yield from _on_multiples(retention.keep_every, known)
    yield from _within(retention.keep_within, known)
    for unit, bucket in _BUCKETS.items():
        yield from _newest_of_each(getattr(retention, f"keep_{bucket.word}"), known, unit, bucket)


def _among_the_last(retention: Retention, known: Known) -> Iterator[tuple[CheckpointId, str]]:
    if retention.keep_last is None:
        return
    placed = {*known.keep, *known.everything[:1]} & {*known.everything}
    for one in known.everything:
        if one not in placed and len(placed) >= retention.keep_last:
            return
        placed.add(one)
        yield one, f"among the last {retention.keep_last}"


def _on_multiples(steps: int, known: Known) -> Iterator[tuple[CheckpointId, str]]:
    seen: set[int] = set()
    for one in known.everything:
        if one.step % steps == 0 and one.step not in seen:
            seen.add(one.step)
            yield one, f"its step is a multiple of {steps}"


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A calendar unit, as restic has them.

    Attributes:
        word: of the policy.
        spelling: for ``strftime``.
    """

    word: str
    spelling: str


_BUCKETS = {
    "hour": _Bucket("hourly", "%Y-%m-%d %H"),
    "day": _Bucket("daily", "%Y-%m-%d"),
    "week": _Bucket("weekly", "%G-W%V"),
    "month": _Bucket("monthly", "%Y-%m"),
    "year": _Bucket("yearly", "%Y"),
}


def _within(length: str | None, known: Known) -> Iterator[tuple[CheckpointId, str]]:
    """Yield what was saved so shortly before the newest, of the line and of what was left."""
    moments = {
        one: _utc(known.contents[one].created_at)
        for one in known.everything
        if _is_intact(one, known)
    }
    newest = next((moments[one] for one in known.line if one in moments), None)
    seconds = parse_length(length or "")
    if seconds is None or newest is None:
        return
    for one, moment in moments.items():
        if (newest - moment).total_seconds() <= seconds:
            yield one, f"saved within {length} of the newest"


def _newest_of_each(
    count: int | None, known: Known, unit: str, bucket: _Bucket
) -> Iterator[tuple[CheckpointId, str]]:
    """Yield the newest of each of the newest ``count`` calendar units that have one."""
    taken: set[str] = set()
    for group in (known.line, known.abandoned):
        intact = [one for one in group if _is_intact(one, known)]
        moments = {one: _utc(known.contents[one].created_at) for one in intact}
        for one in sorted(intact, key=lambda one: (moments[one], one), reverse=True):
            named = moments[one].strftime(bucket.spelling)
            if named not in taken and len(taken) < (count or 0):
                taken.add(named)
                yield one, f"the newest of {unit} {named}"


def _is_intact(one: CheckpointId, known: Known) -> bool:
    content = known.contents.get(one)
    return content is not None and content.is_readable and not content.problem


def _utc(moment: str) -> datetime:
    return datetime.fromisoformat(moment).astimezone(UTC)


def _ranked(wanted: BestOf, known: Known) -> list[CheckpointId]:
    """Return all that were measured, the best first; of equals the older, as in the trainer."""
    ranked: list[CheckpointId] = []
    for group in (known.line, known.abandoned):
        values = {
            one: value
            for one in group
            if one in known.contents
            and (value := wanted.value(known.contents[one].metrics)) is not None
        }
        sign = -1 if wanted.rises else 1
        ranked += sorted(values, key=lambda one: (sign * values[one], one))
    return ranked


def _damaged(retention: Retention, known: Known) -> Iterator[tuple[CheckpointId, str]]:
    """Yield what cannot count although it might have to, and why."""
    for wanted in retention.keep_best:
        whole = 0
        for one in _ranked(wanted, known):
            problem = known.contents[one].problem
            if problem and whole < wanted.count:
                yield one, f"would be of the best by {wanted.metric}, but is damaged: {problem}"
            whole += not problem
    for one, content in known.contents.items():
        if not content.is_readable:
            yield (
                one,
                f"its manifest cannot be read, so what it holds is unknown: {content.problem}",
            )
