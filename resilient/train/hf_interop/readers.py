"""Readers of torch files, distributed checkpoints, DeepSpeed folders and safetensors.

Checksums of torch files are verified, and ``torch.load(weights_only=True)`` loads them as data.
Beyond torch's own data types, the reader accepts a few classes: those in NumPy's random states, and
stubs for classes of DeepSpeed. A stub only keeps the attributes of an object.

From a DeepSpeed folder (ZeRO 0 to 3), the reader returns weights and optimizer moments by name,
assembled from the partitions of all ranks. The layout is that of DeepSpeed 0.19.8 and of the
``zero_to_fp32.py`` that DeepSpeed writes beside each checkpoint. ZeRO 1 and 2 join the parameters
of a group into one vector and cut the vector into equal partitions. ZeRO 3 cuts each parameter into
equal partitions, and each rank joins its own partitions into vectors. ``param_shapes`` in the
folder lists the names and shapes of the parameters in the order of the vectors.

A distributed checkpoint (torch's DCP) is a folder of tensor slices and an index. The reader of the
index (:mod:`resilient.layouts.dcp`) executes no code from the index.
"""

from __future__ import annotations

import codecs
import io
import math
import pickle
import re
import warnings
import zipfile
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from resilient.errors import IncompatibleCheckpoint, IntegrityError, StoreError
from resilient.format.regions import ITEM_BYTES, covers
from resilient.format.safetensors_file import read_header
from resilient.layouts.dcp import read_index
from resilient.layouts.model import ITEM_BITS, Unreadable
from resilient.redaction import shell_quote
from resilient.state_dict.sharding import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from resilient.layouts.dcp import Index, Slice
    from resilient.layouts.model import Tensor
    from resilient.train.hf_interop.source_folder import SourceFolder

_DAMAGE_ERRORS = (zipfile.BadZipFile, pickle.UnpicklingError, EOFError)


class UnpickledStub:
    """Stub for an object of a class that is not loaded; it has the attributes and no methods."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        """Keep the attributes."""
        self.state = state


_DEEPSPEED = (
    *("runtime.fp16.loss_scaler.LossScaler", "runtime.fp16.loss_scaler.DynamicLossScaler"),
    *("utils.tensor_fragment.fragment_address", "runtime.zero.config.ZeroStageEnum"),
)
# Classes in pickled random states of NumPy, and classes that DeepSpeed saves beside tensors.
_TAKEN: list[Any] = [
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]  # noqa: SLF001 - its pickled name
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
    codecs.encode,
    *((UnpickledStub, f"deepspeed.{name}") for name in _DEEPSPEED),
]


def load_torch(source: BinaryIO, key: str) -> Any:
    """Load a torch file as data and verify its checksums.

    A file of torch before 1.6 is not a zip and has no checksums.

    Args:
        source: The open file.
        key: Its name, for errors.

    Raises:
        IntegrityError: The file is damaged, or holds objects that are not data.
    """
    try:
        damaged_name = None
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as content:
                damaged_name = content.testzip()
        if damaged_name is None:
            source.seek(0)
            with torch.serialization.safe_globals(_TAKEN), warnings.catch_warnings():
                # torch warns about the storages of an old file.
                warnings.simplefilter("ignore", UserWarning)
                return torch.load(source, map_location="cpu", weights_only=True)
        problem = f"the checksum of `{damaged_name}` in it is wrong"
    except (*_DAMAGE_ERRORS, RuntimeError, ValueError, OSError, LookupError, TypeError) as error:
        problem = str(error).partition("\n")[0]
    raise IntegrityError(
        f"`{key}` cannot be read: {problem}", key=key, hint="take another checkpoint"
    )


def nested(values: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """Return values by path as nested dicts; list positions become integer keys."""
    root: dict[Any, Any] = {}
    for path, value in values.items():
        place = root
        for name in path[:-1]:
            place = place.setdefault(name, {})
        place[path[-1]] = value
    return root


def with_groups(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state in which the groups are a list again, not a dict by index."""
    groups = state["param_groups"]
    sorted_groups = [groups[number] for number in sorted(groups)]
    return {"state": state.get("state", {}), "param_groups": sorted_groups}


_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL = "mp_rank_00_model_states.pt"
_STAGE_3 = 3
Shapes = list[dict[str, tuple[int, ...]]]


class ZeroFolder:
    """Checkpoint of one DeepSpeed engine; files are read on demand.

    Args:
        source: The checkpoint folder.
        name: The engine's folder in it, ``global_step<n>``.
        step: Step of the trainer, which must equal the step of the engine; None if unknown.

    Raises:
        IntegrityError: Files are missing, damaged, or of another step.
        IncompatibleCheckpoint: Layers are also split over ranks, or the layout is unknown.
    """

    def __init__(self, source: SourceFolder, name: str, step: int | None) -> None:
        self._source, self._name = source, name
        self.folder = source.path / name
        if not source.has_folder(name):
            raise self._damaged(f"`latest` names `{name}`, which is missing")
        names = source.names(f"{name}/")
        if any("mp_rank_01" in file or "expert" in file for file in names):
            raise IncompatibleCheckpoint(
                f"`{self.folder}` has a model whose layers DeepSpeed cut over ranks",
                hint="save it once without tensor, pipeline or expert parallelism",
            )
        files = {int(match[1]): file for file in names if (match := _OPTIMIZER.fullmatch(file))}
        if sorted(files) != list(range(len(files))):
            raise self._damaged(f"it has the partitions of ranks {sorted(files)}")
        self._first = self._load(_MODEL if _MODEL in names else f"zero_pp_rank_0_{_MODEL}")
        global_steps = self._first.get("global_steps", step)
        if step is not None and global_steps != step:
            raise self._damaged(f"it is of step {global_steps}, not of {step}")
        self._parts = [self._partition(files[rank]) for rank in range(len(files))]
        self.stage = int(self._config.get("stage", 0)) if files else 0
        ranks = int(self._first.get("dp_world_size") or len(files))
        if self.stage and len(files) != ranks:
            raise self._damaged(f"it has {len(files)} partitions of {ranks}")
        self._refuse_unknown()

    @property
    def has_loss_scale(self) -> bool:
        """True if training used fp16. The loss scale is a state of the engine and restarts."""
        return any(part.get("dynamic_loss_scale") for part in self._parts)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the model; trained tensors in full precision."""
        module = self._first["module"]
        tensors = {name: value for name, value in module.items() if isinstance(value, torch.Tensor)}
        if self.stage == _STAGE_3:
            # A partitioned parameter is empty here.
            tensors = {name: value for name, value in tensors.items() if value.numel()}
            tensors |= self._frozen()
        if not self.stage:
            return tensors
        flat = "fp32_flat_groups" if self.stage == _STAGE_3 else "single_partition_of_fp32_groups"
        for nth, group in enumerate(self._rank_shares(lambda part: part[flat])):
            tensors |= self._cut(group, self._shapes[nth])
        return tensors

    def optimizer(self) -> dict[str, Any]:
        """Return the optimizer's state: by name, or by position if nothing was partitioned.

        Raises:
            IncompatibleCheckpoint: The optimizer is not a torch optimizer.
        """
        if not self.stage:
            saved_optimizer = self._first.get("optimizer")
            if not isinstance(saved_optimizer, dict) or "param_groups" not in saved_optimizer:
                raise IncompatibleCheckpoint(
                    f"`{self.folder}` keeps its optimizer in an unknown way",
                    hint="save it once with ZeRO 1, 2 or 3",
                )
            return dict(saved_optimizer)
        states: dict[str, dict[str, Any]] = {}
        first_states = self._states(self._parts[0])
        for kind in dict.fromkeys(name for state in first_states for name in state):
            states = self._spread(kind, states)
        groups = [dict(saved_group) for saved_group in self._base(self._parts[0])["param_groups"]]
        for group, shapes in zip(groups, self._shapes, strict=True):
            group["params"] = list(shapes)
        return {"state": states, "param_groups": groups}

    def _spread(self, kind: str, states: dict[str, Any]) -> dict[str, Any]:
        """Return the states with one kind of value added to each parameter."""
        sample = next(state[kind] for state in self._states(self._parts[0]) if kind in state)
        is_cut = isinstance(sample, torch.Tensor) and sample.dim() > 0
        if is_cut:
            lines = self._rank_shares(lambda part: [state[kind] for state in self._states(part)])
        for nth, shapes in enumerate(self._shapes):
            values: Mapping[str, Any] = (
                self._cut(lines[nth], shapes)
                if is_cut
                else {name: _copy(self._state_of(nth)[kind]) for name in shapes}
            )
            for name, value in values.items():
                states.setdefault(name, {})[kind] = value
        return states

    def _state_of(self, group: int) -> Mapping[str, Any]:
        """Return the state of a group's vector; all vectors of a group have the same step count."""
        states = self._states(self._parts[0])
        return states[min(group, len(states) - 1)]

    def _rank_shares(
        self, select: Callable[[Any], Sequence[torch.Tensor]]
    ) -> list[list[torch.Tensor]]:
        """Return, for each group, each rank's share of it as one flat vector."""
        ranks = [list(select(part)) for part in self._parts]
        if self.stage < _STAGE_3:
            return [list(line) for line in zip(*ranks, strict=True)]
        # A group may have several vectors, and a vector may span the end of a group.
        wholes = [torch.cat([vector.reshape(-1) for vector in vectors]) for vectors in ranks]
        lines, place = [], 0
        for shapes in self._shapes:
            count = sum(math.ceil(math.prod(shape) / len(ranks)) for shape in shapes.values())
            if any(place + count > tensor.numel() for tensor in wholes):
                raise self._damaged("its partitions are shorter than its parameters")
            lines.append([tensor.narrow(0, place, count) for tensor in wholes])
            place += count
        return lines

    def _cut(
        self, line: Sequence[torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, torch.Tensor]:
        """Return the parameters of a group, cut from the ranks' shares."""
        slices, place = {}, 0
        joined_shares = (
            torch.cat([tensor.reshape(-1) for tensor in line]) if self.stage < _STAGE_3 else None
        )
        length = line[0].numel() if joined_shares is None else joined_shares.numel()
        for name, shape in shapes.items():
            count = math.prod(shape)
            width = count if joined_shares is not None else math.ceil(count / len(line))
            if place + width > length:
                raise self._damaged(f"its partitions end before `{name}`")
            pieces = [joined_shares] if joined_shares is not None else line
            flat = torch.cat([piece.narrow(0, place, width) for piece in pieces])
            slices[name] = flat[:count].reshape(shape).clone()
            place += width
        return slices

    def _frozen(self) -> dict[str, torch.Tensor]:
        """Return the frozen parameters, assembled from the parts of all ranks (ZeRO 3)."""
        shapes = self._first.get("frozen_param_shapes") or {}
        if not shapes:
            return {}
        files = [f"zero_pp_rank_{rank}_{_MODEL}" for rank in range(len(self._parts))]
        pieces = [self._load(file)["frozen_param_fragments"] for file in files]
        return {
            name: torch.cat([piece[name].reshape(-1) for piece in pieces])[: math.prod(shape)]
            .reshape(tuple(shape))
            .clone()
            for name, shape in shapes.items()
        }

    @property
    def _config(self) -> Mapping[str, Any]:
        config = self._first.get("ds_config") or {}
        zero_config: Mapping[str, Any] = config.get("zero_optimization") or {}
        return zero_config

    @property
    def _shapes(self) -> Shapes:
        shapes = self._first.get("param_shapes") or []
        return [{name: tuple(value) for name, value in group.items()} for group in shapes]

    def _refuse_unknown(self) -> None:
        """Raise if the partitions have another layout than this reader expects."""
        if not self.stage:
            return
        for name in ("round_robin_gradients", "elastic_checkpoint"):
            if self._config.get(name):
                raise IncompatibleCheckpoint(
                    f"`{self.folder}` was saved with `{name}`, which orders partitions differently",
                    hint=f"save it once without `{name}`",
                )
        if not self._shapes or any("state" not in self._base(part) for part in self._parts):
            raise IncompatibleCheckpoint(
                f"`{self.folder}` does not state the content of its partitions",
                hint="save it once with DeepSpeed 0.19",
            )

    def _base(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        name = "optimizer_state_dict" if self.stage == _STAGE_3 else "base_optimizer_state"
        base_value = part.get(name)
        return base_value if isinstance(base_value, dict) else {}

    def _states(self, part: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the states of a rank's vectors, in order."""
        state = self._base(part)["state"]
        return [state[number] for number in sorted(state)]

    def _partition(self, name: str) -> dict[str, Any]:
        partition: dict[str, Any] = self._load(name)["optimizer_state_dict"]
        return partition

    def _load(self, name: str) -> dict[str, Any]:
        path = f"{self._name}/{name}"
        with self._source.open(path) as file:
            value = load_torch(file, str(self._source.path / path))
        if not isinstance(value, dict):
            raise self._damaged(f"`{name}` holds no dict")
        return value

    def _damaged(self, reason: str) -> IntegrityError:
        return IntegrityError(
            f"`{self.folder}` is damaged: {reason}",
            key=str(self.folder),
            hint="take another checkpoint",
        )


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def read_dcp(source: SourceFolder, name: str) -> dict[tuple[Any, ...], Any]:
    """Return all values of a distributed checkpoint by path; tensors are whole and on the CPU.

    Args:
        source: The checkpoint folder.
        name: The folder of the distributed checkpoint in it.

    Raises:
        IntegrityError: A file is missing or damaged, or a tensor is incomplete.
        IncompatibleCheckpoint: An extension of torch transformed the slices, or the index has no
            paths.
    """
    return _Reader(source, name).read()


class _Reader:
    """Reader of one distributed checkpoint.

    Args:
        source: The checkpoint folder.
        name: The folder in it.
    """

    def __init__(self, source: SourceFolder, name: str) -> None:
        self._source, self._place = source, source.path / name
        try:
            self._index: Index = read_index(source.folder, source.listing, f"{name}/")
        except (Unreadable, StoreError) as error:
            raise self._damaged(f"its index cannot be read: {error}") from error

    def read(self) -> dict[tuple[Any, ...], Any]:
        """Return all values by their paths."""
        paths = self._index.paths
        tensors = {tensor.name: tensor for tensor in self._index.tensors}
        names = [*tensors, *self._index.values]
        missing_name = next((name for name in names if name not in paths), "")
        if missing_name or not paths:
            raise IncompatibleCheckpoint(
                f"`{self._place}` has no path for `{missing_name[:80]}`: torch's own planner "
                "did not save it",
                hint="save it once with torch.distributed.checkpoint and its default planner",
            )
        return {
            paths[name]: self._tensor(tensors[name]) if name in tensors else self._value(name)
            for name in names
        }

    def _value(self, name: str) -> Any:
        """Return a value that is not a tensor."""
        slices = self._index.slices.get(name, ())
        if len(slices) != 1:
            raise self._damaged(f"the index does not state where `{name[:80]}` is")
        return self._load(name, slices[0])

    def _tensor(self, tensor: Tensor) -> torch.Tensor:
        """Return a tensor assembled from its slices."""
        slices = self._index.slices.get(tensor.name, ())
        self._require_plain(slices)
        item_bytes = ITEM_BITS.get(tensor.dtype, 0) // 8
        if tensor.dtype not in TORCH_DTYPES:
            raise self._damaged(f"`{tensor.name[:80]}` has an unknown dtype")
        regions = [piece.region for piece in tensor.pieces]
        is_whole = len(regions) == len(slices) and covers(tensor.shape, regions)
        if tensor.elements and not is_whole:
            raise self._damaged(f"`{tensor.name[:80]}` is not complete there")
        # An index may claim any shape: allocate no memory for bytes that no file has.
        if any(piece.region.size * item_bytes > piece.size_bytes for piece in tensor.pieces):
            raise self._damaged(f"`{tensor.name[:80]}` has more elements than its files have bytes")
        assembled = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
        for region, place in zip(regions, slices, strict=True):
            data = self._load(tensor.name, place)
            if not isinstance(data, torch.Tensor) or tuple(data.shape) != region.lengths:
                raise self._damaged(
                    f"a slice of `{tensor.name[:80]}` has another shape than in the index"
                )
            spans = zip(region.offsets, region.lengths, strict=True)
            assembled[tuple(slice(start, start + count) for start, count in spans)] = data
        return assembled

    def _load(self, name: str, place: Slice) -> Any:
        """Return the content of one slice of a file."""
        self._require_plain((place,))
        data = self._source.read_range(place.file, place.start, place.size_bytes)
        return load_torch(io.BytesIO(data), f"{self._source.path / place.file}, {name[:80]}")

    def _require_plain(self, slices: tuple[Slice, ...]) -> None:
        if not all(part.is_plain for part in slices):
            raise IncompatibleCheckpoint(
                f"`{self._place}` was saved through an extension of torch's storage writer, which "
                "an import cannot undo",
                hint="save it once without extensions of the storage writer",
            )

    def _damaged(self, reason: str) -> IntegrityError:
        return IntegrityError(
            f"`{self._place}` is damaged: {reason}",
            key=str(self._place),
            hint=f"resilient ckpt verify {shell_quote(str(self._source.path))}",
        )


def unpack(data: bytes, key: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file by name, on the CPU.

    Args:
        data: Content of the whole file.
        key: Name of the file, for errors.

    Raises:
        IntegrityError: The file is cut short, or its header is invalid.
    """
    header, begin = read_header(data, key)
    header.pop("__metadata__", None)
    body = memoryview(bytearray(data))[begin:]
    try:
        _require_complete(body, header)
        return {name: _tensor(body, slot) for name, slot in header.items()}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise IntegrityError(
            f"`{key}` is not a complete safetensors file: {error}",
            key=key,
            hint="take another checkpoint",
        ) from error


def _require_complete(body: memoryview, header: dict[str, Any]) -> None:
    end = max((slot["data_offsets"][1] for slot in header.values()), default=0)
    if end != len(body):
        raise ValueError(f"its header states {end} bytes, but it has {len(body)}")


def _tensor(body: memoryview, slot: dict[str, Any]) -> torch.Tensor:
    dtype, shape = slot["dtype"], slot["shape"]
    start, end = slot["data_offsets"]
    if end - start != math.prod(shape) * ITEM_BYTES[dtype] or not 0 <= start <= end:
        raise ValueError(f"{end - start} bytes do not fit {dtype} of shape {shape}")
    if start == end:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    # A copy has torch's usual alignment, for any offset in the file.
    return torch.frombuffer(body[start:end], dtype=TORCH_DTYPES[dtype]).view(shape).clone()
