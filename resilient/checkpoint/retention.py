"""Retention policies and the plan that follows from them (pure).

What a rotation deletes, and every reason for what it keeps. Pure.

What stays is the union of all reasons. Whatever a policy counts, the line of descent counts
first: an abandoned checkpoint never takes the place of one that resume may use.

Which checkpoints stay: policies as data. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from resilient.clock import parse_length
from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from resilient.format.keys import CheckpointId


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
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
class RetentionInput:
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
    contents: Mapping[CheckpointId, CheckpointSummary] = field(default_factory=dict)
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


def plan_rotation(retention: Retention, known: RetentionInput) -> RotationPlan:
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


def best_by(wanted: BestOf, known: RetentionInput) -> list[CheckpointId]:
    """Return the intact checkpoints that are the best by one metric, the best first."""
    whole = [one for one in _ranked(wanted, known) if not known.contents[one].problem]
    return whole[: wanted.count]


def _reasons(retention: Retention, known: RetentionInput) -> Iterator[tuple[CheckpointId, str]]:
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


def _among_the_last(
    retention: Retention, known: RetentionInput
) -> Iterator[tuple[CheckpointId, str]]:
    if retention.keep_last is None:
        return
    placed = {*known.keep, *known.everything[:1]} & {*known.everything}
    for one in known.everything:
        if one not in placed and len(placed) >= retention.keep_last:
            return
        placed.add(one)
        yield one, f"among the last {retention.keep_last}"


def _on_multiples(steps: int, known: RetentionInput) -> Iterator[tuple[CheckpointId, str]]:
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


def _within(length: str | None, known: RetentionInput) -> Iterator[tuple[CheckpointId, str]]:
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
    count: int | None, known: RetentionInput, unit: str, bucket: _Bucket
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


def _is_intact(one: CheckpointId, known: RetentionInput) -> bool:
    content = known.contents.get(one)
    return content is not None and content.is_readable and not content.problem


def _utc(moment: str) -> datetime:
    return datetime.fromisoformat(moment).astimezone(UTC)


def _ranked(wanted: BestOf, known: RetentionInput) -> list[CheckpointId]:
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


def _damaged(retention: Retention, known: RetentionInput) -> Iterator[tuple[CheckpointId, str]]:
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


Trust = Literal["written", "quick", "full"]
Left = Literal["all", "undo", "none"]

_TRUSTS = ("written", "quick", "full")
_LEFT = ("all", "undo", "none")
_CALENDAR = ("keep_hourly", "keep_daily", "keep_weekly", "keep_monthly", "keep_yearly")
_NUMBERS = ("keep_last", "keep_every", *_CALENDAR)


@dataclass(frozen=True, slots=True)
class BestOf:
    """Keep the best checkpoints by one metric.

    Attributes:
        metric: its name in the manifest; ``loss`` finds ``eval_loss`` too.
        count: how many stay.
        greater_is_better: None: unless the name ends in ``loss``, as Transformers decides.

    Raises:
        ConfigError: the metric has no name, or ``count`` is no whole number of at least 1.
    """

    metric: str
    count: int = 1
    greater_is_better: bool | None = None

    def __post_init__(self) -> None:
        if not self.metric:
            raise ConfigError("`keep_best` names no metric, as loss:3 does")
        require_count("keep_best", self.count)

    @property
    def rises(self) -> bool:
        """Whether a greater value is a better one."""
        if self.greater_is_better is None:
            return not self.metric.endswith("loss")
        return self.greater_is_better

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """Return the metric's value, None where it was not measured."""
        return metrics.get(self.metric, metrics.get(f"eval_{self.metric}"))


@dataclass(frozen=True, slots=True)
class Retention:
    """What stays; without any policy, everything.

    Attributes:
        keep_last: the newest ones, at least 1.
        keep_best: the best by each of these metrics.
        keep_every: all whose step is a multiple of this.
        keep_hourly: the newest of each of this many calendar hours (UTC) that have one.
        keep_daily: the same for days.
        keep_weekly: the same for weeks, which begin on Monday (ISO 8601).
        keep_monthly: the same for months.
        keep_yearly: the same for years.
        keep_within: all that were saved within this length of time, such as ``2d``, before the
            newest was; as in restic, so that a run that rests loses nothing.
        keep_tags: tags that are wanted by name. A tagged checkpoint always stays; this makes a
            policy of it.
        verify_before_rotate: how the newest is looked at before anything goes: ``written``
            trusts a commit that this process has just made with all receipts, ``quick`` holds
            files and sizes against the manifest, ``full`` reads every byte, of the best too.
        rolled_back: what stays of that which ``ckpt rollback`` or ``undo`` left: ``all``, only
            what ``ckpt undo`` goes back to (``undo``), or what other policies keep (``none``).

    Raises:
        ConfigError: a number is below 1, or no whole number; a length is none.
    """

    keep_last: int | None = None
    keep_best: tuple[BestOf, ...] = ()
    keep_every: int | None = None
    keep_hourly: int | None = None
    keep_daily: int | None = None
    keep_weekly: int | None = None
    keep_monthly: int | None = None
    keep_yearly: int | None = None
    keep_within: str | None = None
    keep_tags: tuple[str, ...] = ()
    verify_before_rotate: Trust = "written"
    rolled_back: Left = "all"

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None:
                require_count(name, value)
        if self.keep_within is not None and not parse_length(self.keep_within):
            raise ConfigError(
                f"`keep_within`={self.keep_within!r} is no length of time: use for example 2d"
            )
        if self.verify_before_rotate not in _TRUSTS:
            raise ConfigError(
                f"`verify_before_rotate`={self.verify_before_rotate!r} is not accepted: "
                f"use one of {', '.join(_TRUSTS)}"
            )
        if self.rolled_back not in _LEFT:
            raise ConfigError(
                f"`rolled_back`={self.rolled_back!r} is not accepted: use one of {', '.join(_LEFT)}"
            )

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Retention:
        """Return the policies that ``dataclasses.asdict`` took apart."""
        best = tuple(BestOf(**one) for one in value["keep_best"])
        return Retention(**{**value, "keep_best": best, "keep_tags": tuple(value["keep_tags"])})

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked for, so that everything stays."""
        numbers = any(getattr(self, name) is not None for name in _NUMBERS)
        return not (numbers or self.keep_best or self.keep_tags or self.keep_within)

    @property
    def needs_contents(self) -> bool:
        """Whether a policy asks for more than names and order, so that manifests are read."""
        calendar = any(getattr(self, name) is not None for name in _CALENDAR)
        return bool(self.keep_best or self.keep_within or calendar)


def require_count(name: str, value: object) -> None:
    """Refuse what is no whole number of at least 1.

    Raises:
        ConfigError: so it is; 0 would delete everything.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"`{name}`={value!r} is not accepted: keep at least 1, or leave it out to keep all"
        )


def parse_best(text: str) -> BestOf:
    """Return what ``loss``, ``loss:3``, ``accuracy:max`` or ``accuracy:3:max`` asks for.

    Raises:
        ConfigError: it is not so spelt.
    """
    metric, _, rest = text.partition(":")
    count, _, way = rest.partition(":")
    if count in ("min", "max") and not way:
        count, way = "", count
    if (count and not count.isdecimal()) or way not in ("", "min", "max"):
        raise ConfigError(
            f"{text!r} is not METRIC, METRIC:min|max, METRIC:COUNT or METRIC:COUNT:min|max"
        )
    return BestOf(metric, int(count or 1), {"max": True, "min": False}.get(way))


def parse_retention(wishes: Mapping[str, Any], keep_last: int | None = None) -> Retention:
    """Return the retention that a configuration spells.

    Args:
        wishes: fields of :class:`Retention` by name; ``keep_best`` is a text as ``parse_best``
            takes it, a mapping of the fields of :class:`BestOf`, or a list of those.
        keep_last: said elsewhere, by ``save_total_limit``.

    Raises:
        ConfigError: an unknown name, or a value that is not accepted.
    """
    known = [one.name for one in fields(Retention)]
    for name in wishes:
        if name not in known:
            raise ConfigError(f"retention knows no `{name}`: use one of {', '.join(known)}")
    if keep_last is not None and wishes.get("keep_last") is not None:
        raise ConfigError("`save_total_limit` and `keep_last` say the same: use one of them")
    best = wishes.get("keep_best") or ()
    several = [best] if isinstance(best, str | Mapping) else best
    tags = wishes.get("keep_tags") or ()
    given = {**wishes, "keep_best": tuple(map(_parse_wish, several))}
    given["keep_tags"] = (tags,) if isinstance(tags, str) else tuple(tags)
    if keep_last is not None:
        given["keep_last"] = keep_last
    return Retention(**given)


def _parse_wish(wish: str | Mapping[str, Any]) -> BestOf:
    if isinstance(wish, str):
        return parse_best(wish)
    try:
        return BestOf(**wish)
    except TypeError as error:
        raise ConfigError(f"`keep_best`={wish!r} is not accepted: {error}") from error
