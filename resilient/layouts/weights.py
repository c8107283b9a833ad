"""Reader of model weights in one file or in several files (shards), as safetensors or torch files.

An index gives the shard of each tensor. The reader checks the index against the shards.
``load_sharded_checkpoint`` of ``transformers.trainer_utils`` loads each file that the index names,
in the order of file names. If two files have the same tensor, the tensor of the last file is used.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resilient.layouts.json_files import read_header, read_json
from resilient.layouts.model import MODEL, Problem, Remedy, Tensor, Unreadable
from resilient.layouts.torch_zip import open_archive

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from resilient.storage.folder import DirectoryListing, Folder

STEMS = ("model", "pytorch_model", "adapter_model", "diffusion_pytorch_model")
SHARD = re.compile(rf"(({'|'.join(STEMS)})-)(\d{{5}})-of-(\d{{5}})(\.safetensors|\.bin)")
STALE = "it is an index of shards, but nothing reads it: the weights are in one file"
ORPHAN = "no index names this shard, so nothing reads it"
_ADAPTER = re.compile(r"(?P<folder>[^/]+/)?adapter_model(?:\.safetensors|\.bin)")
_ADAPTER_CONFIG = re.compile(r"(?P<folder>[^/]+/)?adapter_config\.json")
PEFT = "base_model."
"""Prefix of the names of a PEFT model's tensors, and so of the names in its files."""
_PEFT_BASE = f"{PEFT}model."
_PEFT_KINDS = frozenset(
    {
        *("LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "VERA"),
        "TRAINABLE_TOKENS",
    }
)
"""Kinds of adapters with tensors inside the model; prompts have names of their own."""
_LAYER_MARKS = (".lora_A.", ".lora_B.", ".ia3_l")
"""Parts of the names of weights that PEFT adds to each of the ``target_modules``."""
_WRAPPERS = ("module.", "_orig_mod.")
_OF_STEP = "trainer_state.json"
_STEP = re.compile(r"checkpoint-\d{1,12}/")
_REPAIR = "resilient ckpt repair {path}"
_MAP = "its `weight_map`"


def is_adapter_file(name: str) -> bool:
    """Return whether a file has the weights of a PEFT adapter, in the checkpoint or a subfolder."""
    return _ADAPTER.fullmatch(name) is not None


def adapter_files(names: Iterable[str]) -> dict[str, str]:
    """Return the weight files of the adapters of a checkpoint, by folder.

    PEFT saves the adapter ``default`` in the checkpoint itself, under the folder ``""``. Each other
    adapter has a subfolder with its name, and with a ``/`` at the end. The folder of another step
    is not an adapter.

    Args:
        names: Names of the files, relative to the checkpoint.
    """
    return _by_folder(_ADAPTER, set(names))


def _by_folder(pattern: re.Pattern[str], names: Collection[str]) -> dict[str, str]:
    files: dict[str, str] = {}
    # PEFT reads the safetensors file if both exist, so this file comes last.
    for name in sorted(names):
        match = pattern.fullmatch(name)
        folder = (match["folder"] or "") if match else ""
        is_step = _STEP.fullmatch(folder) or (folder and f"{folder}{_OF_STEP}" in names)
        if match and not is_step:
            files[folder] = name
    return files


def shards_in(names: Iterable[str], prefix: str) -> dict[str, list[str]]:
    """Return the files with names of shards, grouped by the name of their index."""
    shards: dict[str, list[str]] = {}
    for name in sorted(names):
        match = SHARD.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if match:
            shards.setdefault(f"{prefix}{match[2]}{match[5]}.index.json", []).append(name)
    return shards


def unnamed(index: str, count: int) -> Problem:
    """Return the problem of shards without an index."""
    problem_text = f"it is missing, and its tool needs it to find the {count} shards"
    return Problem(index, problem_text, is_fatal=True, help=_REPAIR)


def doubled(tensors: Sequence[Tensor]) -> list[Problem]:
    """Return the problem of the first tensor that exists in two files."""
    first_of_name: dict[str, Tensor] = {}
    for tensor in tensors:
        first_tensor = first_of_name.setdefault(tensor.name, tensor)
        if first_tensor is not tensor and first_tensor.files != tensor.files:
            problem_text = (
                f"`{tensor.name[:80]}` is in `{first_tensor.files[0][:80]}` too, and the right "
                "one is unknown"
            )
            return [Problem(tensor.files[0], problem_text, is_fatal=True, cure=Remedy.COPY)]
    return []


def contradictions(
    index: str, document: Mapping[str, Any], prefix: str, tensors: Sequence[Tensor]
) -> list[Problem]:
    """Return contradictions between an index and its shards that do not prevent a resume.

    Args:
        index: Name of the index.
        document: Content of the index.
        prefix: Folder of the index, with a ``/`` at its end.
        tensors: Tensors of all shards.
    """
    mapped = document["weight_map"]
    unmapped_names = [tensor.name for tensor in tensors if tensor.name not in mapped]
    in_other_files = [
        tensor.name
        for tensor in tensors
        if tensor.name in mapped and f"{prefix}{mapped[tensor.name]}" not in tensor.files
    ]
    problems = []
    if unmapped_names:
        problems.append(
            f"{_MAP} lacks {len(unmapped_names)} of their tensors, including "
            f"`{unmapped_names[0][:80]}`"
        )
    if in_other_files:
        problems.append(f"{_MAP} names the wrong shard for `{in_other_files[0][:80]}`")
    metadata = document.get("metadata")
    total_size = metadata.get("total_size") if isinstance(metadata, dict) else None
    total = sum(tensor.size_bytes for tensor in tensors)
    if isinstance(total_size, int | float) and total_size != total:
        problems.append(
            f"its `total_size` is {total_size}, but the shards have {total} bytes of tensors"
        )
    return [Problem(index, problem, help=_REPAIR) for problem in problems]


SAFE = ".safetensors"
TORCH = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pth.tar", ".pt.tar")
_INDEXES = tuple(f"{stem}{end}.index.json" for stem in STEMS for end in (SAFE, ".bin"))


def read_file(
    folder: Folder, listing: DirectoryListing, name: str, part: str = MODEL
) -> tuple[Tensor, ...]:
    """Return the tensors of one file.

    Raises:
        Unreadable: The file is damaged or hostile.
        StoreError: The file could not be read.
    """
    if name.endswith(SAFE):
        return read_header(folder, listing, name, part)[0]
    return open_archive(folder, listing, name).tensors(part)


def read_weights(
    folder: Folder, listing: DirectoryListing, prefix: str = ""
) -> tuple[tuple[Tensor, ...], list[Problem]]:
    """Return the tensors of a model with file names of Transformers, and their problems.

    Args:
        folder: Folder of the files.
        listing: Its files.
        prefix: Folder of the model inside ``folder``, with a ``/`` at its end.
    """
    index = next(
        (prefix + candidate for candidate in _INDEXES if prefix + candidate in listing.sizes), ""
    )
    single = (prefix + stem + end for stem in STEMS for end in (SAFE, ".bin"))
    names = [name for name in single if listing.is_there(name)][:1]
    below = (name for name in (*listing.sizes, *listing.outside) if name.startswith(prefix))
    own_names = {name.removeprefix(prefix) for name in below}
    is_adapter = is_adapter_file(names[0].removeprefix(prefix)) if names else not index
    if is_adapter and adapter_files(own_names):
        tensors, problems = _read_adapters(folder, listing, prefix, own_names)
        return tensors, [*problems, *([Problem(index, STALE)] if index else [])]
    if names:
        stale = [Problem(index, STALE)] if index else []
        tensors, problems = read_all(folder, listing, names)
        return tensors, [*problems, *stale]
    shard_sets = shards_in((*listing.sizes, *listing.outside), prefix)
    if index:
        return _indexed(folder, listing, prefix, index, shard_sets.get(index, ()))
    shard_name, shards = next(iter(shard_sets.items()), ("", []))
    tensors, problems = read_all(folder, listing, shards)
    index_problems = [unnamed(shard_name, len(shards))] if shards else []
    return tensors, [*index_problems, *problems, *doubled(tensors)]


def _read_adapters(
    folder: Folder, listing: DirectoryListing, prefix: str, names: Collection[str]
) -> tuple[tuple[Tensor, ...], list[Problem]]:
    """Return the tensors of all adapters, with the adapter's folder before each name.

    Args:
        folder: Folder of the files.
        listing: Its files.
        prefix: Folder of the model inside ``folder``.
        names: Names of the files below ``prefix``.
    """
    files = _by_folder(_ADAPTER, names)
    tensors: list[Tensor] = []
    problems: list[Problem] = []
    for adapter, name in sorted(files.items()):
        own_tensors, own_problems = read_all(folder, listing, [prefix + name])
        tensors += (replace(tensor, name=f"{adapter}{tensor.name}") for tensor in own_tensors)
        problems += own_problems
        place, own_names = (
            f"{prefix}{adapter}adapter_config.json",
            [one.name for one in own_tensors],
        )
        try:
            config = read_json(folder, listing, place)
        except Unreadable:
            continue  # a resume takes the configuration of the script
        problems += _misnamed(prefix + name, own_names, config)
        problems += _untargeted(place, own_names, config)
    # A resume would load the adapters beside a lost adapter, and initialize the lost one again.
    problem_text = "it is missing, although the configuration of its adapter exists"
    for adapter in sorted(_by_folder(_ADAPTER_CONFIG, names).keys() - files.keys()):
        place = f"{prefix}{adapter}adapter_model{SAFE}"
        problems.append(Problem(place, problem_text, is_fatal=True, cure=Remedy.COPY))
    return tuple(tensors), problems


def _misnamed(place: str, names: Sequence[str], config: Mapping[str, Any]) -> list[Problem]:
    """Return the problem of weights without the prefix of PEFT, which a resume ignores."""
    odd_names = [name for name in names if not name.startswith(PEFT)]
    if config.get("peft_type") not in _PEFT_KINDS or not odd_names:
        return []
    is_all = len(odd_names) == len(names)
    count_text = "none of its weights has" if is_all else f"{len(odd_names)} of its weights lack"
    problem_text = (
        f"{count_text} the prefix `{PEFT}` of PEFT, including `{odd_names[0][:80]}`: a resume "
        "ignores them, and the adapter would start again"
    )
    loses = f"{len(odd_names)} of {len(names)} weights"
    is_unique = place.endswith(SAFE) and len(peft_names(names, config)) == 1
    cure = Remedy.REPAIR if is_unique else Remedy.COPY
    return [Problem(place, problem_text, loses, is_fatal=is_all, cure=cure)]


def peft_names(names: Sequence[str], config: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the possible renames of the weights of an adapter that lost the prefix of PEFT.

    More than one result means that the names alone do not show the right prefix.

    Args:
        names: Names in the file; some or all of them lack the prefix.
        config: Content of ``adapter_config.json``, whose ``target_modules`` confirm the names.
    """
    targets = _targets(config)
    if not all(any(f".{target}." in f".{name}." for target in targets) for name in names):
        return []
    bare_names = {name: _unwrapped(name) for name in names}
    odd_names = [name for name in bare_names.values() if not name.startswith(PEFT)]
    prefixes = [_PEFT_BASE] if odd_names else [""]
    if odd_names and all(name.startswith("model.") for name in odd_names):
        # The model itself may have a module `model`, as Llama has.
        prefixes.append(PEFT)
    renames = [
        {
            name: bare if bare.startswith(PEFT) else f"{prefix}{bare}"
            for name, bare in bare_names.items()
        }
        for prefix in prefixes
    ]
    return [rename for rename in renames if len(set(rename.values())) == len(names)]


def _unwrapped(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def _targets(config: Mapping[str, Any]) -> list[str]:
    """Return the names of modules that an adapter changes; a regular expression is not used."""
    targets: list[str] = []
    for field in ("target_modules", "modules_to_save"):
        value = config.get(field)
        targets += (
            [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
        )
    return targets


def _untargeted(place: str, names: Sequence[str], config: Mapping[str, Any]) -> list[Problem]:
    """Return the problem of weights of modules that the configuration does not name.

    The script's model has the right names, so the folder does not show which of both is wrong.
    """
    modules = config.get("target_modules")
    is_list = isinstance(modules, list) and all(isinstance(module, str) for module in modules)
    if not is_list or not modules or config.get("target_parameters"):
        return []
    layers = [name for name in names if any(mark in name for mark in _LAYER_MARKS)]
    odd_names = [
        name for name in layers if not any(f".{module}." in f".{name}." for module in modules)
    ]
    if not odd_names:
        return []
    problem_text = (
        f"its `target_modules` name no module of {len(odd_names)} of {len(names)} weights, "
        f"including `{odd_names[0][:80]}`: a model of this configuration ignores these weights"
    )
    return [Problem(place, problem_text, cure=Remedy.COPY)]


def _indexed(
    folder: Folder, listing: DirectoryListing, prefix: str, index: str, beside: Sequence[str]
) -> tuple[tuple[Tensor, ...], list[Problem]]:
    """Return the tensors of the shards that an index names, and the problems of both."""
    try:
        document = read_json(folder, listing, index)
    except Unreadable as error:
        return (), [Problem(index, str(error), is_fatal=True)]
    mapped = document.get("weight_map")
    if not isinstance(mapped, dict) or not all(isinstance(value, str) for value in mapped.values()):
        return (), [Problem(index, "it has no `weight_map` of names", is_fatal=True)]
    shards = sorted({f"{prefix}{value}" for value in mapped.values()})
    tensors, problems = read_all(folder, listing, shards)
    missing_names = sorted(set(mapped) - {tensor.name for tensor in tensors})
    if missing_names and not problems:
        problem_text = (
            f"{len(missing_names)} of its tensors are in no file, including "
            f"`{missing_names[0][:80]}`"
        )
        problems.append(Problem(index, problem_text, is_fatal=True))
    elif not problems:
        problems += doubled(tensors) or contradictions(index, document, prefix, tensors)
    return tensors, [*problems, *(Problem(file, ORPHAN) for file in beside if file not in shards)]


def read_all(
    folder: Folder, listing: DirectoryListing, names: Iterable[str], part: str = MODEL
) -> tuple[tuple[Tensor, ...], list[Problem]]:
    """Return the tensors of several files, and the problems of unreadable files."""
    tensors: list[Tensor] = []
    problems = []
    for name in names:
        try:
            tensors += read_file(folder, listing, name, part)
        except Unreadable as error:
            problems.append(Problem(name, str(error), is_fatal=True))
    return tuple(tensors), problems


def without(problems: Sequence[Problem], loses: str) -> list[Problem]:
    """Return the problems as losses, for a part that a tool can initialize again."""
    return [Problem(problem.place, problem.what, loses) for problem in problems]
