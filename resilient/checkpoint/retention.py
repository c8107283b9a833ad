"""Retention policies, and pure functions that derive a plan of deletions from the policies.

A checkpoint stays if at least one policy keeps it. Every policy counts the checkpoints that resume
may use (the line of descent) before it counts all others (abandoned checkpoints). So an abandoned
checkpoint never displaces a checkpoint of this line.
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
    """Fields of a manifest that a policy may need.

    Attributes:
        created_at: UTC, ISO 8601; empty if the manifest cannot be read.
        metrics: Metrics measured at its step.
        problem: Damage of the checkpoint; empty if none was seen.
        protects: Checkpoints that the run protected when it saved this checkpoint.
        refers: Keys of the files that the checkpoint needs in older folders; None if unknown.
    """

    created_at: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    protects: tuple[CheckpointId, ...] = ()
    refers: frozenset[str] | None = frozenset()

    @property
    def is_readable(self) -> bool:
        """True if the manifest could be read."""
        return bool(self.created_at)


@dataclass(frozen=True, slots=True)
class RetentionInput:
    """State of a repository as input of a retention plan.

    Attributes:
        line: Committed checkpoints that resume may use, in the order to try.
        abandoned: Other committed checkpoints, newest first.
        separate: Checkpoints of another start from scratch; they stay and count for no policy.
        pinned: Reasons to keep each checkpoint besides policies: tags, or a generation that has
            saved nothing.
        keep: Checkpoints that the run itself protects, such as its best. They count against
            ``keep_last``, as in Transformers, but the newest always stays.
        contents: Summary of each checkpoint, where a policy needs it.
        held: Reason to delete nothing at all; empty for none.
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
        """All checkpoints that count, in the order of counting."""
        return (*self.line, *self.abandoned)


@dataclass(frozen=True, slots=True)
class RotationPlan:
    """Checkpoints to delete, in order, and the reasons to keep each of the others.

    Attributes:
        doomed: Checkpoints to delete, first to last.
        kept: All reasons for each checkpoint that stays.
        damaged: Checkpoints that would rank among the best but are damaged or unreadable. They
            stay, and the user must be informed.
        held: Reason to delete nothing; empty for none.
        unsure: Reason to keep the files of deleted checkpoints for now; empty for none.
    """

    doomed: tuple[CheckpointId, ...]
    kept: Mapping[CheckpointId, tuple[str, ...]]
    damaged: Mapping[CheckpointId, str] = field(default_factory=dict)
    held: str = ""
    unsure: str = ""

    def lines(self) -> list[str]:
        """Return the plan as lines for people: first what is kept and why, then what is deleted."""
        return [
            *(
                f"keep   {checkpoint}: {'; '.join(reasons)}"
                for checkpoint, reasons in self.kept.items()
            ),
            *(f"delete {checkpoint}" for checkpoint in self.doomed),
        ]


def plan_rotation(retention: Retention, state: RetentionInput) -> RotationPlan:
    """Plan the deletions, oldest and abandoned first, with all reasons to keep the others.

    Args:
        retention: Policies.
        state: State of the repository.
    """
    reasons: dict[CheckpointId, list[str]] = defaultdict(list)
    damage_reasons = dict(_damaged(retention, state))
    for checkpoint, reason in _reasons(retention, state):
        reasons[checkpoint].append(reason)
    for checkpoint, problem in damage_reasons.items():
        reasons[checkpoint].append(problem)
    if state.held:
        for checkpoint in state.everything:
            reasons[checkpoint].append(f"nothing is deleted: {state.held}")
    all_checkpoints = state.everything
    for checkpoint in state.separate:
        reasons[checkpoint].append(
            "from another start from scratch, which garbage collection does not touch"
        )
    return RotationPlan(
        doomed=tuple(
            checkpoint for checkpoint in reversed(all_checkpoints) if checkpoint not in reasons
        ),
        kept={
            checkpoint: tuple(dict.fromkeys(reasons[checkpoint]))
            for checkpoint in (*all_checkpoints, *state.separate)
            if checkpoint in reasons
        },
        damaged={
            checkpoint: damage_reasons[checkpoint]
            for checkpoint in all_checkpoints
            if checkpoint in damage_reasons
        },
        held=state.held,
    )


def best_by(policy: BestOf, state: RetentionInput) -> list[CheckpointId]:
    """Return the best intact checkpoints by one metric, the best first."""
    intact_checkpoints = [
        checkpoint
        for checkpoint in _ranked(policy, state)
        if not state.contents[checkpoint].problem
    ]
    return intact_checkpoints[: policy.count]


def _reasons(retention: Retention, state: RetentionInput) -> Iterator[tuple[CheckpointId, str]]:
    """Yield all reasons for all checkpoints, in the order that reads best."""
    if retention.is_empty:
        yield from ((checkpoint, "no limit is set") for checkpoint in state.everything)
    yield from ((checkpoint, "the newest") for checkpoint in state.everything[:1])
    for checkpoint, pin_reasons in state.pinned.items():
        yield from ((checkpoint, reason) for reason in pin_reasons)
    yield from ((checkpoint, "protected by the run") for checkpoint in state.keep)
    yield from _among_the_last(retention, state)
    for policy in retention.keep_best:
        for place, checkpoint in enumerate(best_by(policy, state), start=1):
            value = policy.value(state.contents[checkpoint].metrics)
            yield (
                checkpoint,
                f"number {place} of the best {policy.count} by {policy.metric} ({value:g})",
            )
    if retention.keep_every:
        yield from _on_multiples(retention.keep_every, state)
    yield from _within(retention.keep_within, state)
    for unit, calendar_unit in _CALENDAR_UNITS.items():
        yield from _newest_of_each(
            getattr(retention, f"keep_{calendar_unit.policy_suffix}"), state, unit, calendar_unit
        )


def _among_the_last(
    retention: Retention, state: RetentionInput
) -> Iterator[tuple[CheckpointId, str]]:
    if retention.keep_last is None:
        return
    last_checkpoints = {*state.keep, *state.everything[:1]} & {*state.everything}
    for checkpoint in state.everything:
        if checkpoint not in last_checkpoints and len(last_checkpoints) >= retention.keep_last:
            return
        last_checkpoints.add(checkpoint)
        yield checkpoint, f"among the last {retention.keep_last}"


def _on_multiples(steps: int, state: RetentionInput) -> Iterator[tuple[CheckpointId, str]]:
    seen_steps: set[int] = set()
    for checkpoint in state.everything:
        if checkpoint.step % steps == 0 and checkpoint.step not in seen_steps:
            seen_steps.add(checkpoint.step)
            yield checkpoint, f"its step is a multiple of {steps}"


@dataclass(frozen=True, slots=True)
class _CalendarUnit:
    """Calendar unit, as in restic.

    Attributes:
        policy_suffix: Name in the policy.
        time_format: Format for ``strftime``.
    """

    policy_suffix: str
    time_format: str


_CALENDAR_UNITS = {
    "hour": _CalendarUnit("hourly", "%Y-%m-%d %H"),
    "day": _CalendarUnit("daily", "%Y-%m-%d"),
    "week": _CalendarUnit("weekly", "%G-W%V"),
    "month": _CalendarUnit("monthly", "%Y-%m"),
    "year": _CalendarUnit("yearly", "%Y"),
}


def _within(length: str | None, state: RetentionInput) -> Iterator[tuple[CheckpointId, str]]:
    """Yield checkpoints saved at most ``length`` before the newest, abandoned ones included."""
    moments = {
        checkpoint: _utc(state.contents[checkpoint].created_at)
        for checkpoint in state.everything
        if _is_intact(checkpoint, state)
    }
    newest = next((moments[checkpoint] for checkpoint in state.line if checkpoint in moments), None)
    seconds = parse_length(length or "")
    if seconds is None or newest is None:
        return
    for checkpoint, moment in moments.items():
        if (newest - moment).total_seconds() <= seconds:
            yield checkpoint, f"saved within {length} of the newest"


def _newest_of_each(
    count: int | None, state: RetentionInput, unit: str, calendar_unit: _CalendarUnit
) -> Iterator[tuple[CheckpointId, str]]:
    """Yield the newest checkpoint of each of the newest ``count`` calendar units that have any."""
    filled_periods: set[str] = set()
    for group in (state.line, state.abandoned):
        intact = [checkpoint for checkpoint in group if _is_intact(checkpoint, state)]
        moments = {checkpoint: _utc(state.contents[checkpoint].created_at) for checkpoint in intact}
        for checkpoint in sorted(
            intact, key=lambda checkpoint: (moments[checkpoint], checkpoint), reverse=True
        ):
            period = moments[checkpoint].strftime(calendar_unit.time_format)
            if period not in filled_periods and len(filled_periods) < (count or 0):
                filled_periods.add(period)
                yield checkpoint, f"the newest of {unit} {period}"


def _is_intact(checkpoint: CheckpointId, state: RetentionInput) -> bool:
    content = state.contents.get(checkpoint)
    return content is not None and content.is_readable and not content.problem


def _utc(moment: str) -> datetime:
    return datetime.fromisoformat(moment).astimezone(UTC)


def _ranked(policy: BestOf, state: RetentionInput) -> list[CheckpointId]:
    """Return all measured checkpoints, best first; equal ones oldest first, as in the Trainer."""
    best_first: list[CheckpointId] = []
    for group in (state.line, state.abandoned):
        values = {
            checkpoint: value
            for checkpoint in group
            if checkpoint in state.contents
            and (value := policy.value(state.contents[checkpoint].metrics)) is not None
        }
        sign = -1 if policy.rises else 1
        best_first += sorted(values, key=lambda checkpoint: (sign * values[checkpoint], checkpoint))
    return best_first


def _damaged(retention: Retention, state: RetentionInput) -> Iterator[tuple[CheckpointId, str]]:
    """Yield unreadable checkpoints, and damaged ones that may be among the best."""
    for policy in retention.keep_best:
        intact_count = 0
        for checkpoint in _ranked(policy, state):
            problem = state.contents[checkpoint].problem
            if problem and intact_count < policy.count:
                yield (
                    checkpoint,
                    f"would be among the best by {policy.metric}, but is damaged: {problem}",
                )
            intact_count += not problem
    for checkpoint, content in state.contents.items():
        if not content.is_readable:
            yield (
                checkpoint,
                f"its manifest cannot be read, so its content is unknown: {content.problem}",
            )


Trust = Literal["written", "quick", "full"]
AbandonedPolicy = Literal["all", "undo", "none"]

_TRUSTS = ("written", "quick", "full")
_ABANDONED_POLICIES = ("all", "undo", "none")
_CALENDAR = ("keep_hourly", "keep_daily", "keep_weekly", "keep_monthly", "keep_yearly")
_NUMBERS = ("keep_last", "keep_every", *_CALENDAR)


@dataclass(frozen=True, slots=True)
class BestOf:
    """Policy that keeps the best checkpoints by one metric.

    Attributes:
        metric: Name in the manifest; ``loss`` also finds ``eval_loss``.
        count: Number of checkpoints to keep.
        greater_is_better: Direction. None means True unless the name ends in ``loss``, as in
            Transformers.

    Raises:
        ConfigError: The metric has no name, or ``count`` is not a whole number of at least 1.
    """

    metric: str
    count: int = 1
    greater_is_better: bool | None = None

    def __post_init__(self) -> None:
        if not self.metric:
            raise ConfigError("`keep_best` names no metric, such as loss:3")
        require_count("keep_best", self.count)

    @property
    def rises(self) -> bool:
        """True if a greater value is better."""
        if self.greater_is_better is None:
            return not self.metric.endswith("loss")
        return self.greater_is_better

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """Return the metric's value; None if it was not measured."""
        return metrics.get(self.metric, metrics.get(f"eval_{self.metric}"))


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention policies; without any policy, every checkpoint stays.

    Attributes:
        keep_last: Number of newest checkpoints, at least 1.
        keep_best: The best by each of these metrics.
        keep_every: All checkpoints whose step is a multiple of this number.
        keep_hourly: The newest of each of the last N calendar hours (UTC) that have one.
        keep_daily: The same for days.
        keep_weekly: The same for weeks, which begin on Monday (ISO 8601).
        keep_monthly: The same for months.
        keep_yearly: The same for years.
        keep_within: All checkpoints saved within this length of time, such as ``2d``, before the
            newest. As in restic, a paused run loses nothing.
        keep_tags: Names of tags that count as a policy. A tagged checkpoint stays even without this
            option.
        verify_before_rotate: Check of the newest checkpoint before any deletion. ``written`` trusts
            a commit that this process has just made with all receipts. ``quick`` compares files
            and sizes with the manifest. ``full`` reads every byte, also of the best.
        rolled_back: Checkpoints that ``ckpt rollback`` or ``undo`` abandoned. ``all`` keeps all of
            them, ``undo`` only the target of ``ckpt undo``, ``none`` only those that other policies
            keep.

    Raises:
        ConfigError: A number is not a whole number of at least 1, or a length is not valid.
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
    rolled_back: AbandonedPolicy = "all"

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            value = getattr(self, name)
            if value is not None:
                require_count(name, value)
        if self.keep_within is not None and not parse_length(self.keep_within):
            raise ConfigError(
                f"`keep_within`={self.keep_within!r} is not a duration: use for example 2d"
            )
        if self.verify_before_rotate not in _TRUSTS:
            raise ConfigError(
                f"`verify_before_rotate`={self.verify_before_rotate!r} is not accepted: "
                f"use one of {', '.join(_TRUSTS)}"
            )
        if self.rolled_back not in _ABANDONED_POLICIES:
            raise ConfigError(
                f"`rolled_back`={self.rolled_back!r} is not accepted: "
                f"use one of {', '.join(_ABANDONED_POLICIES)}"
            )

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Retention:
        """Return the policies from the result of ``dataclasses.asdict``."""
        best = tuple(BestOf(**rule) for rule in value["keep_best"])
        return Retention(**{**value, "keep_best": best, "keep_tags": tuple(value["keep_tags"])})

    @property
    def is_empty(self) -> bool:
        """True if no policy is set, so that every checkpoint stays."""
        numbers = any(getattr(self, name) is not None for name in _NUMBERS)
        return not (numbers or self.keep_best or self.keep_tags or self.keep_within)

    @property
    def needs_contents(self) -> bool:
        """True if a policy needs more than names and order, so that manifests are read."""
        calendar = any(getattr(self, name) is not None for name in _CALENDAR)
        return bool(self.keep_best or self.keep_within or calendar)


def require_count(name: str, value: object) -> None:
    """Require a whole number of at least 1.

    Raises:
        ConfigError: The value is no such number; 0 would delete everything.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(
            f"`{name}`={value!r} is not accepted: keep at least 1, or omit it to keep all"
        )


def parse_best(text: str) -> BestOf:
    """Parse a policy such as ``loss``, ``loss:3``, ``accuracy:max`` or ``accuracy:3:max``.

    Raises:
        ConfigError: The text has another form.
    """
    metric, _, count_and_direction = text.partition(":")
    count, _, direction = count_and_direction.partition(":")
    if count in ("min", "max") and not direction:
        count, direction = "", count
    if (count and not count.isdecimal()) or direction not in ("", "min", "max"):
        raise ConfigError(
            f"{text!r} is not METRIC, METRIC:min|max, METRIC:COUNT or METRIC:COUNT:min|max"
        )
    return BestOf(metric, int(count or 1), {"max": True, "min": False}.get(direction))


def parse_retention(options: Mapping[str, Any], keep_last: int | None = None) -> Retention:
    """Return the retention policy of a configuration.

    Args:
        options: Fields of :class:`Retention` by name. ``keep_best`` is a text as ``parse_best``
            takes it, a mapping of the fields of :class:`BestOf`, or a list of those.
        keep_last: Value of ``save_total_limit``.

    Raises:
        ConfigError: A name is unknown, or a value is not accepted.
    """
    names = [option.name for option in fields(Retention)]
    for name in options:
        if name not in names:
            raise ConfigError(f"retention has no option `{name}`: use one of {', '.join(names)}")
    if keep_last is not None and options.get("keep_last") is not None:
        raise ConfigError("`save_total_limit` and `keep_last` mean the same: use one of them")
    best = options.get("keep_best") or ()
    rules = [best] if isinstance(best, str | Mapping) else best
    tags = options.get("keep_tags") or ()
    policies = {**options, "keep_best": tuple(map(_parse_rule, rules))}
    policies["keep_tags"] = (tags,) if isinstance(tags, str) else tuple(tags)
    if keep_last is not None:
        policies["keep_last"] = keep_last
    return Retention(**policies)


def _parse_rule(option: str | Mapping[str, Any]) -> BestOf:
    if isinstance(option, str):
        return parse_best(option)
    try:
        return BestOf(**option)
    except TypeError as error:
        raise ConfigError(f"`keep_best`={option!r} is not accepted: {error}") from error
