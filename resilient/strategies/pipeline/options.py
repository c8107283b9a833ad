"""What a pipeline is told: how many ranks, which schedule, where the model is cut (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SIZE = "pp_size"
SCHEDULE = "pp_schedule"
SPLIT_POINTS = "pp_split_points"
STAGES_PER_RANK = "pp_stages_per_rank"
PIPELINE_KEYS = (SIZE, SCHEDULE, SPLIT_POINTS, STAGES_PER_RANK)
# Schedule -> whether a rank holds several stages.
SCHEDULES = {
    "gpipe": False,
    "1f1b": False,
    "loopedbfs": True,
    "interleaved1f1b": True,
    "interleavedzerobubble": True,
}
# These halve the backward pass: gradients of what came in first, those of weights later.
SPLIT_BACKWARD = ("interleavedzerobubble",)


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """How a model is cut and in which order its stages compute.

    Attributes:
        ranks: of one pipeline.
        schedule: one of ``SCHEDULES``.
        stages_per_rank: how many stages each rank holds; stage ``n`` is on rank ``n % ranks``.
        split_points: names of the modules that begin the stages after the first; none: evenly.
    """

    ranks: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    split_points: tuple[str, ...] = ()

    @property
    def stages(self) -> int:
        """How many stages the model is cut into."""
        return self.ranks * self.stages_per_rank


def is_schedule(value: Any) -> bool:
    """Say whether a schedule has this name."""
    return isinstance(value, str) and value.lower() in SCHEDULES


def is_list_of_names(value: Any) -> bool:
    """Say whether a value is a list of names."""
    return isinstance(value, list | tuple) and all(isinstance(one, str) and one for one in value)


def pipeline_size(config: Mapping[str, Any] | None) -> int:
    """Return how many ranks compute one after another."""
    return int((config or {}).get(SIZE) or 1)


def read_pipeline(config: Mapping[str, Any] | None) -> PipelineOptions:
    """Return what ``parallelism_config``, whose values are checked, says about pipelines.

    Raises:
        ConfigError: keys contradict each other, or one would be ignored.
    """
    told = config or {}
    ranks = pipeline_size(told)
    given = [name for name in PIPELINE_KEYS[1:] if told.get(name) is not None]
    if ranks == 1 and given:
        raise ConfigError(
            f"`parallelism_config.{given[0]}` is about pipelines, and `{SIZE}` says no ranks of one"
        )
    schedule = (told.get(SCHEDULE) or "1f1b").lower()
    several = SCHEDULES[schedule]
    per_rank = told.get(STAGES_PER_RANK) or (2 if several else 1)
    if several != (per_rank > 1):
        holds = "at least 2 stages" if several else "1 stage"
        raise ConfigError(
            f"`{STAGES_PER_RANK}`={per_rank} of parallelism_config is not accepted: with "
            f"`{SCHEDULE}`={schedule!r} each rank holds {holds}"
        )
    points = tuple(told.get(SPLIT_POINTS) or ())
    options = PipelineOptions(ranks, schedule, per_rank, points)
    if points and len(points) != options.stages - 1:
        raise ConfigError(
            f"`{SPLIT_POINTS}` of parallelism_config names {len(points)} modules, and "
            f"{options.stages} stages begin at {options.stages - 1} besides the model's start"
        )
    return options


def micro_batches_fit(options: PipelineOptions, count: int) -> bool:
    """Say whether a schedule can take so many micro-batches."""
    if options.schedule == "1f1b":
        return count >= options.stages
    if options.schedule.startswith("interleaved"):
        return count % max(1, count // options.ranks) == 0
    return True


def check_micro_batches(options: PipelineOptions, count: int) -> None:
    """Refuse a number of micro-batches that the schedule cannot take.

    Args:
        options: of the pipeline.
        count: ``gradient_accumulation_steps``.

    Raises:
        ConfigError: says which numbers fit.
    """
    if options.ranks == 1 or micro_batches_fit(options, count):
        return
    near = [n for n in range(1, 4 * count + options.stages + 1) if micro_batches_fit(options, n)]
    fit = sorted(sorted(near, key=lambda n: abs(n - count))[:3])
    raise ConfigError(
        f"`gradient_accumulation_steps`={count} is how many micro-batches go through the pipeline "
        f"in a step, and `{SCHEDULE}`={options.schedule!r} over {options.stages} stages cannot "
        f"take so many: use {', '.join(map(str, fit))}, or `{SCHEDULE}`='gpipe'"
    )


def known_schedules(value: Any) -> str:
    """Return what is said to a schedule that there is not."""
    close = get_close_matches(str(value).lower(), SCHEDULES, n=1)
    return f"use {', '.join(SCHEDULES)}" + (f"; did you mean `{close[0]}`?" if close else "")


# Key -> whether a value is accepted, and what is.
CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (SIZE, STAGES_PER_RANK),
        (lambda value: type(value) is int and value > 0, "use a whole number of at least 1"),
    ),
    SCHEDULE: (is_schedule, known_schedules("")),
    SPLIT_POINTS: (is_list_of_names, "use a list of names of modules"),
}
