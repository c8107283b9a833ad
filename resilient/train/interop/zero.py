"""The folder of a DeepSpeed engine (ZeRO 0 to 3): weights and moments by name, out of partitions.

Source: DeepSpeed 0.19.8 and the ``zero_to_fp32.py`` that it leaves beside each checkpoint. ZeRO 1
and 2 lay the parameters of a group end to end and cut the line in equal partitions; ZeRO 3 cuts
each parameter in equal partitions, and each rank lays its own end to end. ``param_shapes`` says
names and shapes in that order.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import IncompatibleCheckpoint, IntegrityError
from resilient.train.interop.archives import load_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from resilient.train.interop.source_folder import SourceFolder

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL = "mp_rank_00_model_states.pt"
_STAGE_3 = 3
Shapes = list[dict[str, tuple[int, ...]]]


class ZeroFolder:
    """What one engine saved; files are read when they are asked for.

    Args:
        source: The checkpoint folder.
        name: The folder of the engine in it, ``global_step<n>``.
        step: the trainer's, which the engine's must be; None if it is not known.

    Raises:
        IntegrityError: files are missing, damaged, or of another step.
        IncompatibleCheckpoint: layers were cut over ranks as well, or state lies elsewhere.
    """

    def __init__(self, source: SourceFolder, name: str, step: int | None) -> None:
        self._source, self._name = source, name
        self.folder = source.path / name
        if not source.has_folder(name):
            raise self._damaged(f"`latest` names `{name}`, which is missing")
        names = source.names(f"{name}/")
        if any("mp_rank_01" in one or "expert" in one for one in names):
            raise IncompatibleCheckpoint(
                f"`{self.folder}` is of a model whose layers were cut over ranks, by DeepSpeed",
                hint="save it once without tensor, pipeline or expert parallelism",
            )
        files = {int(match[1]): one for one in names if (match := _OPTIMIZER.fullmatch(one))}
        if sorted(files) != list(range(len(files))):
            raise self._damaged(f"it has the partitions of ranks {sorted(files)}")
        self._first = self._load(_MODEL if _MODEL in names else f"zero_pp_rank_0_{_MODEL}")
        made = self._first.get("global_steps", step)
        if step is not None and made != step:
            raise self._damaged(f"it is of step {made}, and not of {step}")
        self._parts = [self._partition(files[rank]) for rank in range(len(files))]
        self.stage = int(self._config.get("stage", 0)) if files else 0
        ranks = int(self._first.get("dp_world_size") or len(files))
        if self.stage and len(files) != ranks:
            raise self._damaged(f"it has {len(files)} partitions, of {ranks}")
        self._refuse_unknown()

    @property
    def has_loss_scale(self) -> bool:
        """Whether fp16 was trained in: the scale of losses is the engine's, and begins anew."""
        return any(one.get("dynamic_loss_scale") for one in self._parts)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the model; those that are trained in full precision."""
        held = self._first["module"]
        found = {name: one for name, one in held.items() if isinstance(one, torch.Tensor)}
        if self.stage == _STAGE_3:
            # What is partitioned leaves an empty place here.
            found = {name: one for name, one in found.items() if one.numel()}
            found |= self._frozen()
        if not self.stage:
            return found
        flat = "fp32_flat_groups" if self.stage == _STAGE_3 else "single_partition_of_fp32_groups"
        for nth, group in enumerate(self._lines(lambda part: part[flat])):
            found |= self._cut(group, self._shapes[nth])
        return found

    def optimizer(self) -> dict[str, Any]:
        """Return the optimizer's state; by name, or by position where nothing was partitioned.

        Raises:
            IncompatibleCheckpoint: it is none of torch's.
        """
        if not self.stage:
            whole = self._first.get("optimizer")
            if not isinstance(whole, dict) or "param_groups" not in whole:
                raise IncompatibleCheckpoint(
                    f"`{self.folder}` keeps its optimizer in a way that is not known",
                    hint="save it once with ZeRO 1, 2 or 3",
                )
            return dict(whole)
        states: dict[str, dict[str, Any]] = {}
        first = self._states(self._parts[0])
        for kind in dict.fromkeys(name for one in first for name in one):
            states = self._spread(kind, states)
        groups = [dict(one) for one in self._base(self._parts[0])["param_groups"]]
        for group, shapes in zip(groups, self._shapes, strict=True):
            group["params"] = list(shapes)
        return {"state": states, "param_groups": groups}

    def _spread(self, kind: str, states: dict[str, Any]) -> dict[str, Any]:
        """Return the states with one kind of value added to each parameter."""
        sample = next(one[kind] for one in self._states(self._parts[0]) if kind in one)
        is_cut = isinstance(sample, torch.Tensor) and sample.dim() > 0
        if is_cut:
            lines = self._lines(lambda part: [one[kind] for one in self._states(part)])
        for nth, shapes in enumerate(self._shapes):
            values: Mapping[str, Any] = (
                self._cut(lines[nth], shapes)
                if is_cut
                else {name: _copy(self._state_of(nth)[kind]) for name in shapes}
            )
            for name, one in values.items():
                states.setdefault(name, {})[kind] = one
        return states

    def _state_of(self, group: int) -> Mapping[str, Any]:
        """Return the state of a group's vector; of several all count the same steps."""
        states = self._states(self._parts[0])
        return states[min(group, len(states) - 1)]

    def _lines(self, pick: Callable[[Any], Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Return, for each group, what each rank holds of it, in one line."""
        ranks = [list(pick(part)) for part in self._parts]
        if self.stage < _STAGE_3:
            return [list(one) for one in zip(*ranks, strict=True)]
        # Vectors may be several to a group there, and are not cut where a group ends.
        wholes = [torch.cat([one.reshape(-1) for one in vectors]) for vectors in ranks]
        lines, place = [], 0
        for shapes in self._shapes:
            count = sum(math.ceil(math.prod(one) / len(ranks)) for one in shapes.values())
            if any(place + count > one.numel() for one in wholes):
                raise self._damaged("its partitions are shorter than its parameters")
            lines.append([one.narrow(0, place, count) for one in wholes])
            place += count
        return lines

    def _cut(
        self, line: Sequence[torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, torch.Tensor]:
        """Return the parameters of a group, out of what each rank holds of it."""
        found, place = {}, 0
        whole = torch.cat([one.reshape(-1) for one in line]) if self.stage < _STAGE_3 else None
        held = line[0].numel() if whole is None else whole.numel()
        for name, shape in shapes.items():
            count = math.prod(shape)
            width = count if whole is not None else math.ceil(count / len(line))
            if place + width > held:
                raise self._damaged(f"its partitions end before `{name}`")
            pieces = [whole] if whole is not None else line
            flat = torch.cat([one.narrow(0, place, width) for one in pieces])
            found[name] = flat[:count].reshape(shape).clone()
            place += width
        return found

    def _frozen(self) -> dict[str, torch.Tensor]:
        """Return what is not trained, of which each rank holds a part (ZeRO 3)."""
        shapes = self._first.get("frozen_param_shapes") or {}
        if not shapes:
            return {}
        files = [f"zero_pp_rank_{rank}_{_MODEL}" for rank in range(len(self._parts))]
        pieces = [self._load(file)["frozen_param_fragments"] for file in files]
        return {
            name: torch.cat([one[name].reshape(-1) for one in pieces])[: math.prod(shape)]
            .reshape(tuple(shape))
            .clone()
            for name, shape in shapes.items()
        }

    @property
    def _config(self) -> Mapping[str, Any]:
        config = self._first.get("ds_config") or {}
        found: Mapping[str, Any] = config.get("zero_optimization") or {}
        return found

    @property
    def _shapes(self) -> Shapes:
        told = self._first.get("param_shapes") or []
        return [{name: tuple(one) for name, one in group.items()} for group in told]

    def _refuse_unknown(self) -> None:
        """Raise if partitions are not laid out as this reads them."""
        if not self.stage:
            return
        for name in ("round_robin_gradients", "elastic_checkpoint"):
            if self._config.get(name):
                raise IncompatibleCheckpoint(
                    f"`{self.folder}` was saved with `{name}`, which lays partitions out otherwise",
                    hint=f"save it once without `{name}`",
                )
        if not self._shapes or any("state" not in self._base(one) for one in self._parts):
            raise IncompatibleCheckpoint(
                f"`{self.folder}` does not say what its partitions are made of",
                hint="save it once with DeepSpeed 0.19",
            )

    def _base(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        name = "optimizer_state_dict" if self.stage == _STAGE_3 else "base_optimizer_state"
        found = part.get(name)
        return found if isinstance(found, dict) else {}

    def _states(self, part: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the states of a rank's vectors, in order."""
        state = self._base(part)["state"]
        return [state[number] for number in sorted(state)]

    def _partition(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._load(name)["optimizer_state_dict"]
        return found

    def _load(self, name: str) -> dict[str, Any]:
        path = f"{self._name}/{name}"
        with self._source.open(path) as opened:
            found = load_torch(opened, str(self._source.path / path))
        if not isinstance(found, dict):
            raise self._damaged(f"`{name}` holds no dict")
        return found

    def _damaged(self, trouble: str) -> IntegrityError:
        return IntegrityError(
            f"`{self.folder}` is damaged: {trouble}",
            key=str(self.folder),
            hint="take another checkpoint",
        )


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
