"""How ranks are laid out: replicas, shards and ranks that compute a layer together (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.strategies.pipeline.options import CHECKS, PIPELINE_KEYS, pipeline_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size")
PLAN = "tp_plan"
MESH_KEYS = (*_SIZES, PLAN, *PIPELINE_KEYS)
_ONE = ("cp_size", "sp_size")
_HANDLERS = ("tp_handler", "cp_handler", "sp_handler")
# Key -> whether a value is accepted, and what is.
_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        _SIZES,
        (lambda value: type(value) is int and value > 0, "use a whole number of at least 1"),
    ),
    **dict.fromkeys(
        _ONE, (lambda value: value == 1, "sequences are not cut over ranks here: leave it out")
    ),
    **dict.fromkeys(_HANDLERS, (lambda _: False, "it is accelerate's own: leave it out")),
    # Named by accelerate's object whether they are used or not.
    **dict.fromkeys(("cp_backend", "sp_backend"), (lambda _: True, "")),
    PLAN: (
        lambda value: value == "auto" or isinstance(value, dict),
        "use a dict of names and styles, or auto",
    ),
    **CHECKS,
}


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """How many ranks each dimension of the mesh has; neighbours compute together.

    Attributes:
        replicate: groups that each hold the model.
        shard: groups of ranks that hold it together.
        tensor: ranks that hold a layer together.
        pipeline: ranks, or groups of ``tensor`` ranks, that hold stages of one pipeline.
    """

    replicate: int
    shard: int
    tensor: int
    pipeline: int = 1

    @property
    def data(self) -> int:
        """How many groups train on samples of their own."""
        return self.replicate * self.shard

    @property
    def shape(self) -> tuple[int, ...]:
        """The mesh of what computes together, without data dimensions if there is one group.

        Of pipelines each stage has a mesh like this of its own.
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
    """Refuse what ``parallelism_config`` cannot say.

    Raises:
        ConfigError: names the key and what would be accepted.
    """
    for name, value in (config or {}).items():
        if name not in _KEYS:
            known = (*MESH_KEYS, *_ONE)
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean `{close[0]}`?" if close else ""
            raise _refused(name, value, f"use {', '.join(known)}{hint}")
        accepts, accepted = _KEYS[name]
        if value is not None and not accepts(value):
            raise _refused(name, value, accepted)


def tensor_size(config: Mapping[str, Any] | None) -> int:
    """Return how many ranks compute a layer together."""
    return int((config or {}).get("tp_size") or 1)


def together_size(config: Mapping[str, Any] | None) -> int:
    """Return how many neighbouring ranks train on the same samples."""
    return tensor_size(config) * pipeline_size(config)


def mesh_sizes(config: Mapping[str, Any] | None, ranks: int, *, shards: bool) -> MeshSizes:
    """Return the mesh of ``ranks``; what is not said is what is left.

    Args:
        config: ``parallelism_config``, checked.
        ranks: how many there are.
        shards: whether what is left are shards; else they are replicas.

    Raises:
        ConfigError: the sizes do not multiply to the number of ranks.
    """
    told = config or {}
    tensor, pipeline = tensor_size(told), pipeline_size(told)
    replicate, shard = told.get("dp_replicate_size"), told.get("dp_shard_size")
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
            f"`parallelism_config` says {replicate} x {shard} x {tensor}{stages[0]} ranks "
            f"(replicas, shards, tensors{stages[1]}), and there are {ranks}",
            hint="start as many ranks, or leave one of dp_replicate_size and dp_shard_size out",
        )
    return MeshSizes(replicate, shard, tensor, pipeline)


def _refused(name: str, value: Any, accepted: str) -> ConfigError:
    return ConfigError(f"`parallelism_config.{name}`={value!r} is not accepted: {accepted}")
