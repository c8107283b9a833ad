"""Options of the device mesh (replicas, shards, tensor parallelism) and of the pipeline."""

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
# Schedule -> whether a rank has several stages.
SCHEDULES = {
    "gpipe": False,
    "1f1b": False,
    "loopedbfs": True,
    "interleaved1f1b": True,
    "interleavedzerobubble": True,
}
# These schedules compute the gradients of the inputs first, and the gradients of the weights later.
SPLIT_BACKWARD = ("interleavedzerobubble",)


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Division of a model into stages, and their schedule.

    Attributes:
        ranks: Number of ranks of one pipeline.
        schedule: One of ``SCHEDULES``.
        stages_per_rank: Number of stages per rank; stage ``n`` is on rank ``n % ranks``.
        split_points: Names of the modules that begin the stages after the first; empty for an even
            division.
    """

    ranks: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    split_points: tuple[str, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages of the model."""
        return self.ranks * self.stages_per_rank


def is_schedule(value: Any) -> bool:
    """Return whether a schedule has this name."""
    return isinstance(value, str) and value.lower() in SCHEDULES


def is_list_of_names(value: Any) -> bool:
    """Return whether a value is a list of names."""
    return isinstance(value, list | tuple) and all(isinstance(name, str) and name for name in value)


def pipeline_size(config: Mapping[str, Any] | None) -> int:
    """Return the number of ranks of one pipeline."""
    return int((config or {}).get(SIZE) or 1)


def read_pipeline(config: Mapping[str, Any] | None) -> PipelineOptions:
    """Parse the pipeline options of ``parallelism_config``, whose values are already checked.

    Raises:
        ConfigError: Keys contradict each other, or a key would be ignored.
    """
    values = config or {}
    ranks = pipeline_size(values)
    keys = [name for name in PIPELINE_KEYS[1:] if values.get(name) is not None]
    if ranks == 1 and keys:
        raise ConfigError(
            f"`parallelism_config.{keys[0]}` is about pipelines, but `{SIZE}` gives no ranks to "
            "a pipeline"
        )
    schedule = (values.get(SCHEDULE) or "1f1b").lower()
    several = SCHEDULES[schedule]
    per_rank = values.get(STAGES_PER_RANK) or (2 if several else 1)
    if several != (per_rank > 1):
        holds = "at least 2 stages" if several else "1 stage"
        raise ConfigError(
            f"`{STAGES_PER_RANK}`={per_rank} of parallelism_config is not accepted: with "
            f"`{SCHEDULE}`={schedule!r} each rank holds {holds}"
        )
    points = tuple(values.get(SPLIT_POINTS) or ())
    options = PipelineOptions(ranks, schedule, per_rank, points)
    if points and len(points) != options.stages - 1:
        raise ConfigError(
            f"`{SPLIT_POINTS}` of parallelism_config names {len(points)} modules, but "
            f"{options.stages} stages start at {options.stages - 1} modules besides the model's "
            "start"
        )
    return options


def micro_batches_fit(options: PipelineOptions, count: int) -> bool:
    """Return whether a schedule supports this number of micro-batches."""
    if options.schedule == "1f1b":
        return count >= options.stages
    if options.schedule.startswith("interleaved"):
        return count % max(1, count // options.ranks) == 0
    return True


def check_micro_batches(options: PipelineOptions, count: int) -> None:
    """Reject a number of micro-batches that the schedule does not support.

    Args:
        options: Options of the pipeline.
        count: ``gradient_accumulation_steps``.

    Raises:
        ConfigError: The message has the supported numbers.
    """
    if options.ranks == 1 or micro_batches_fit(options, count):
        return
    fitting_counts = [
        n for n in range(1, 4 * count + options.stages + 1) if micro_batches_fit(options, n)
    ]
    fit = sorted(sorted(fitting_counts, key=lambda n: abs(n - count))[:3])
    raise ConfigError(
        f"`gradient_accumulation_steps`={count} is the number of micro-batches in a step, and "
        f"`{SCHEDULE}`={options.schedule!r} over {options.stages} stages does not allow it: use "
        f"{', '.join(map(str, fit))}, or `{SCHEDULE}`='gpipe'"
    )


def known_schedules(value: Any) -> str:
    """Return the message for an unknown schedule."""
    similar_names = get_close_matches(str(value).lower(), SCHEDULES, n=1)
    return f"use {', '.join(SCHEDULES)}" + (
        f"; did you mean `{similar_names[0]}`?" if similar_names else ""
    )


# Key -> check of a value, and description of accepted values.
CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (SIZE, STAGES_PER_RANK),
        (lambda value: type(value) is int and value > 0, "use a whole number of at least 1"),
    ),
    SCHEDULE: (is_schedule, known_schedules("")),
    SPLIT_POINTS: (is_list_of_names, "use a list of names of modules"),
}

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size")
PLAN = "tp_plan"
MESH_KEYS = (*_SIZES, PLAN, *PIPELINE_KEYS)
_ONE = ("cp_size", "sp_size")
_HANDLERS = ("tp_handler", "cp_handler", "sp_handler")
# Key -> check of a value, and description of accepted values.
_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        _SIZES,
        (lambda value: type(value) is int and value > 0, "use a whole number of at least 1"),
    ),
    **dict.fromkeys(
        _ONE, (lambda value: value == 1, "sequences are not cut over ranks here: omit it")
    ),
    **dict.fromkeys(_HANDLERS, (lambda _: False, "it belongs to accelerate: omit it")),
    # accelerate's object always has these names, whether they are used or not.
    **dict.fromkeys(("cp_backend", "sp_backend"), (lambda _: True, "")),
    PLAN: (
        lambda value: value == "auto" or isinstance(value, dict),
        "use a dict of names and styles, or auto",
    ),
    **CHECKS,
}


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """Number of ranks in each dimension of the mesh; neighbouring ranks share layers.

    Attributes:
        replicate: Number of groups that each have a copy of the model.
        shard: Number of groups of ranks that share one copy.
        tensor: Number of ranks that share each layer.
        pipeline: Number of ranks, or of groups of ``tensor`` ranks, with the stages of one
            pipeline.
    """

    replicate: int
    shard: int
    tensor: int
    pipeline: int = 1

    @property
    def data(self) -> int:
        """Number of groups, each of which trains on its own samples."""
        return self.replicate * self.shard

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the mesh, without data dimensions if there is one group.

        Each stage of a pipeline has its own mesh of this shape.
        """
        if self.data == 1:
            return (self.tensor,)
        data = (self.shard,) if self.replicate == 1 else (self.replicate, self.shard)
        return (*data, self.tensor)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its dimensions."""
        if self.data == 1:
            return ("tp",)
        data = ("dp_shard",) if self.replicate == 1 else ("dp_replicate", "dp_shard")
        return (*data, "tp")


def check_mesh(config: Mapping[str, Any] | None) -> None:
    """Reject an invalid ``parallelism_config``.

    Raises:
        ConfigError: The message names the key and the accepted values.
    """
    for name, value in (config or {}).items():
        if name not in _KEYS:
            keys = (*MESH_KEYS, *_ONE)
            similar_keys = get_close_matches(name, keys, n=1)
            hint = f"; did you mean `{similar_keys[0]}`?" if similar_keys else ""
            raise _refused(name, value, f"use {', '.join(keys)}{hint}")
        accepts, accepted = _KEYS[name]
        if value is not None and not accepts(value):
            raise _refused(name, value, accepted)


def tensor_size(config: Mapping[str, Any] | None) -> int:
    """Return the number of ranks that share a layer."""
    return int((config or {}).get("tp_size") or 1)


def model_parallel_size(config: Mapping[str, Any] | None) -> int:
    """Return the number of neighbouring ranks that train on the same samples."""
    return tensor_size(config) * pipeline_size(config)


def mesh_sizes(config: Mapping[str, Any] | None, ranks: int, *, shards: bool) -> MeshSizes:
    """Return the mesh of ``ranks``; an unset size takes the remaining ranks.

    Args:
        config: Checked ``parallelism_config``.
        ranks: Number of ranks.
        shards: Whether the remaining ranks are shards; otherwise they are replicas.

    Raises:
        ConfigError: The product of the sizes is not the number of ranks.
    """
    options = config or {}
    tensor, pipeline = tensor_size(options), pipeline_size(options)
    replicate, shard = options.get("dp_replicate_size"), options.get("dp_shard_size")
    data = max(1, ranks // (tensor * pipeline))
    if shards:
        replicate = replicate or (data // shard if shard else 1)
        shard = shard or data // replicate
    else:
        shard = shard or 1
        replicate = replicate or data // shard
    if tensor * pipeline * replicate * shard != ranks:
        stages = (f" x {pipeline}", ", stages") if pipeline > 1 else ("", "")
        raise ConfigError(
            f"`parallelism_config` has {replicate} x {shard} x {tensor}{stages[0]} ranks "
            f"(replicas, shards, tensors{stages[1]}), but there are {ranks}",
            hint="start as many ranks, or omit one of dp_replicate_size and dp_shard_size",
        )
    return MeshSizes(replicate, shard, tensor, pipeline)


def _refused(name: str, value: Any, accepted: str) -> ConfigError:
    return ConfigError(f"`parallelism_config.{name}`={value!r} is not accepted: {accepted}")
