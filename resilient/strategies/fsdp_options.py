"""FSDP options, read from ``fsdp`` and ``fsdp_config`` with the key names of FSDP1 and FSDP2."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

MODES: dict[str, dict[str, Any]] = {
    "full_shard": {"reshard_after_forward": True},
    "shard_grad_op": {"reshard_after_forward": False},
    "hybrid_shard": {"reshard_after_forward": True, "hybrid": True},
    "hybrid_shard_zero2": {"reshard_after_forward": False, "hybrid": True},
}
_EXTRAS: dict[str, dict[str, Any]] = {"offload": {"cpu_offload": True}, "auto_wrap": {"wrap": True}}
DTYPES = {
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}
BACKWARD_PREFETCH = ("backward_pre", "backward_post", "no_prefetch")


class Dtypes(NamedTuple):
    """Precision of a sharded model, by torch's dtype names; None leaves it unchanged.

    Attributes:
        param: Gathered parameters, and computations with them.
        reduce: Gradients during their reduction over ranks.
        buffer: Buffers (only FSDP1).
        output: Results of a module (only FSDP2).
    """

    param: str | None = None
    reduce: str | None = None
    buffer: str | None = None
    output: str | None = None


_AS_THEY_ARE = Dtypes()


@dataclass(frozen=True, slots=True)
class FsdpOptions:
    """Sharding options of a model.

    Attributes:
        version: 2 (``fully_shard``) or 1 (``FullyShardedDataParallel``).
        layer_classes: Names of module classes to gather and free one by one.
        min_num_params: Minimum number of parameters of a module that is gathered by itself; 0
            disables the rule.
        wrap: Whether modules to gather are required; ``_no_split_modules`` of the model also names
            such modules.
        reshard_after_forward: Whether gathered parameters are freed between forward and backward.
        shard_size: Number of ranks that share one copy of the model; 0: all ranks.
        hybrid: Whether the ranks of a host share one copy of the model.
        cpu_offload: Whether shards and their gradients are in host memory.
        forward_prefetch: Whether the next module is gathered before the forward pass of a module.
        backward_prefetch: Whether the next module is gathered before or after the gradients of a
            module.
        dtypes: Precision.
        activation_checkpointing: Whether the backward pass recomputes activations.
        use_orig_params: Whether optimizers get the model's own parameters (FSDP1; always true in
            FSDP2).
        limit_all_gathers: Whether FSDP1 limits gathers ahead of the computation.
    """

    version: int = 2
    layer_classes: tuple[str, ...] = ()
    min_num_params: int = 0
    wrap: bool = False
    reshard_after_forward: bool = True
    shard_size: int = 0
    hybrid: bool = False
    cpu_offload: bool = False
    forward_prefetch: bool = False
    backward_prefetch: str = "backward_pre"
    dtypes: Dtypes = _AS_THEY_ARE
    activation_checkpointing: bool = False
    use_orig_params: bool = True
    limit_all_gathers: bool = True


def read_fsdp(
    fsdp: Any, config: Mapping[str, Any] | str | None, arguments: Mapping[str, Any]
) -> FsdpOptions:
    """Combine both arguments into options.

    Args:
        fsdp: ``fsdp``: a flag, or words such as ``full_shard auto_wrap``.
        config: ``fsdp_config``: a dict or the path of a JSON file; names may begin with ``fsdp_``.
        arguments: Values of separate arguments, under the names of :class:`FsdpOptions`.

    Raises:
        ConfigError: A word, key or value is unknown or not supported by FSDP, or two of them
            contradict each other.
    """
    values = {**arguments, **_words(fsdp), **_config(_read(config))}
    if values.pop("one_dtype", False) and values.get("version") == 1:
        # accelerate interprets a single dtype name the same way.
        values["dtypes"] = values["dtypes"]._replace(buffer=values["dtypes"].param)
    policy = values.pop("auto_wrap_policy", None)
    if policy == "no_wrap":
        values |= {"layer_classes": (), "min_num_params": 0, "wrap": False}
    elif policy == "size_based_wrap" and not values.get("min_num_params"):
        raise _refused("auto_wrap_policy", policy, "set `min_num_params` too")
    elif policy is not None:
        values["wrap"] = True
    options = FsdpOptions(**values)
    _check(options)
    return options


def _words(fsdp: Any) -> dict[str, Any]:
    if fsdp is None or isinstance(fsdp, bool):
        return {}
    words = fsdp.replace(",", " ").split() if isinstance(fsdp, str) else list(fsdp)
    option_by_word = {**MODES, **_EXTRAS}
    options: dict[str, Any] = {}
    for word in words:
        if word.lower() in ("true", "1"):
            continue
        if word == "no_shard":
            raise _refused("fsdp", word, 'it shards nothing: write parallelism="ddp"')
        if word not in option_by_word:
            raise _refused(
                "fsdp", word, f"use {', '.join(option_by_word)}{_suggest(word, option_by_word)}"
            )
        options |= option_by_word[word]
    modes = [word for word in words if word in MODES]
    if len(modes) > 1:
        raise ConfigError(f"`fsdp` says {' and '.join(modes)}: use one of them")
    return options


def _read(config: Mapping[str, Any] | str | None) -> dict[str, Any]:
    if not isinstance(config, str):
        return dict(config or {})
    try:
        value = json.loads(Path(config).expanduser().read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read `fsdp_config` from `{config}`: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"`fsdp_config`: `{config}` does not hold a JSON object")
    return value


def _config(config: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for key, value in config.items():
        name = key.removeprefix("fsdp_")
        if name not in _KEYS:
            raise _refused(key, value, f"it is not a key of `fsdp_config`{_suggest(name, _KEYS)}")
        options |= _KEYS[name](name, value)
    return options


def _check(options: FsdpOptions) -> None:
    """Reject options that the requested version does not support.

    Raises:
        ConfigError: The message names the version that supports them.
    """
    refused_options: dict[str, tuple[Any, str]] = _not_in_2(options)
    if options.version == 1:
        refused_options = _not_in_1(options)
    for name, (value, reason) in refused_options.items():
        raise _refused(name, value, reason)


def _not_in_1(options: FsdpOptions) -> dict[str, tuple[Any, str]]:
    output = options.dtypes.output
    reason = "FSDP1 leaves outputs as they are: leave it out, or write version=2"
    return {} if output is None else {"output_dtype": (output, reason)}


def _not_in_2(options: FsdpOptions) -> dict[str, tuple[Any, str]]:
    refused_options: dict[str, tuple[Any, str]] = {}
    if not options.use_orig_params:
        refused_options["use_orig_params"] = False, "FSDP2 flattens nothing: write version=1"
    if options.backward_prefetch == "backward_post":
        refused_options["backward_prefetch"] = (
            options.backward_prefetch,
            "FSDP2 gathers before or not at all: write backward_pre, no_prefetch or version=1",
        )
    if options.dtypes.buffer not in (None, "float32"):
        refused_options["buffer_dtype"] = (
            options.dtypes.buffer,
            "FSDP2 does not change buffers: convert them in the model, or write version=1",
        )
    if not options.limit_all_gathers:
        refused_options["limit_all_gathers"] = False, "FSDP2 limits them always: write version=1"
    return refused_options


def _flag(name: str, value: Any) -> bool:
    text = str(value).lower()
    if text not in ("true", "false", "1", "0", "none", ""):
        raise _refused(name, value, "use True or False")
    return text in ("true", "1")


def _number(name: str, value: Any) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if number < 0 or number != int(number):
        raise _refused(name, value, "use a whole number of at least 0")
    return int(number)


def _require_choice(name: str, value: Any, choices: Collection[str]) -> str:
    word = str(value).lower()
    if word not in choices:
        raise _refused(name, value, f"use one of {', '.join(choices)}{_suggest(word, choices)}")
    return word


def _version(name: str, value: Any) -> dict[str, Any]:
    return {"version": int(_require_choice(name, value, ("1", "2")))}


def _reshard(name: str, value: Any) -> dict[str, Any]:
    """Parse a flag (FSDP2), or a strategy by name or number (FSDP1)."""
    strategies = dict(enumerate([*list(MODES)[:2], "no_shard", *list(MODES)[2:]], 1))
    word = str(value).lower()
    if name == "sharding_strategy" and word.isdigit():
        word = strategies.get(int(word), word)
    if name == "sharding_strategy" or word in {*MODES, "no_shard"}:
        return _words([word])
    return {"reshard_after_forward": _flag(name, value)}


def _layers(name: str, value: Any) -> dict[str, Any]:
    names = value.split(",") if isinstance(value, str) else value or ()
    if not all(isinstance(text, str) for text in names):
        raise _refused(name, value, "use names of classes")
    return {"layer_classes": tuple(text.strip() for text in names if text.strip())}


def _policy(name: str, value: Any) -> dict[str, Any]:
    policies = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
    return {"auto_wrap_policy": _require_choice(name, value, policies)}


def _prefetch(name: str, value: Any) -> dict[str, Any]:
    word = "no_prefetch" if value in (None, "") else value
    return {"backward_prefetch": _require_choice(name, word, BACKWARD_PREFETCH)}


def _precision(name: str, value: Any) -> dict[str, Any]:
    """Parse a dict of dtypes, or one dtype name for all of them."""
    is_one = isinstance(value, str)
    if is_one:
        value = {"param_dtype": value, "reduce_dtype": value, "output_dtype": None}
    dtype_names = [f"{field}_dtype" for field in Dtypes._fields]
    dtypes: dict[str, str | None] = {}
    for key, dtype in dict(value or {}).items():
        if key not in dtype_names:
            raise _refused(
                f"{name}.{key}", dtype, f"use {', '.join(dtype_names)}{_suggest(key, dtype_names)}"
            )
        word = str(dtype).removeprefix("torch.").lower()
        dtypes[key.removesuffix("_dtype")] = (
            None if dtype is None else DTYPES[_require_choice(f"{name}.{key}", word, DTYPES)]
        )
    return {"dtypes": Dtypes(**dtypes), "one_dtype": is_one}


def _asks_nothing(*accepted: str, why: str) -> Callable[[str, Any], dict[str, Any]]:
    """Return a parser of a key without effect, which accepts only the given values."""

    def read(name: str, value: Any) -> dict[str, Any]:
        if str(value).lower() not in accepted:
            raise _refused(name, value, why)
        return {}

    return read


def _same(read: Callable[[str, Any], Any]) -> Callable[[str, Any], dict[str, Any]]:
    return lambda name, value: {name: read(name, value)}


_NO_XLA = _asks_nothing(
    *("false", "none", "{}", "0"), why="it needs torch_xla, which current torch does not support"
)
_KEYS: dict[str, Callable[[str, Any], dict[str, Any]]] = {
    "version": _version,
    "reshard_after_forward": _reshard,
    "sharding_strategy": _reshard,
    "shard_size": _same(_number),
    "cpu_offload": _same(_flag),
    "offload_params": lambda name, value: {"cpu_offload": _flag(name, value)},
    "auto_wrap_policy": _policy,
    "transformer_layer_cls_to_wrap": _layers,
    "min_num_params": _same(_number),
    "forward_prefetch": _same(_flag),
    "backward_prefetch": _prefetch,
    "mixed_precision": _precision,
    "mixed_precision_policy": _precision,
    "activation_checkpointing": _same(_flag),
    "use_orig_params": _same(_flag),
    "limit_all_gathers": _same(_flag),
    "sync_module_states": _asks_nothing(
        "true", "1", why="all ranks begin with what rank 0 holds, always"
    ),
    "cpu_ram_efficient_loading": _asks_nothing(
        *("false", "0", "none"), why="each rank makes its model itself; leave it out"
    ),
    "state_dict_type": _asks_nothing(
        *("full_state_dict", "sharded_state_dict"),
        why="each rank writes its shards and `save_model` the whole; leave it out",
    ),
    "xla": _NO_XLA,
    "xla_fsdp_v2": _NO_XLA,
    "xla_fsdp_settings": _NO_XLA,
    "xla_fsdp_grad_ckpt": _NO_XLA,
}


def _suggest(word: str, choices: Collection[str]) -> str:
    similar_words = get_close_matches(word, choices, n=1)
    return f"; did you mean `{similar_words[0]}`?" if similar_words else ""


def _refused(name: str, value: Any, accepted: str) -> ConfigError:
    return ConfigError(f"`{name}`={value!r} of FSDP is not accepted: {accepted}")
