"""Which checkpoints stay: policies as data. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from resilient.clock import parse_length
from resilient.errors import ConfigError

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
