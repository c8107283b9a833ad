"""An optimizer that steps pieces of parameters, as a part: by parameter name, in torch's words.

A rank has one run of elements of each parameter, which may be empty, and steps it in pieces. What
the optimizer keeps of the pieces of one run is laid end to end, so that it is written where it
lies. A checkpoint of it is like any other: replicas, FSDP and single processes load it, and it
loads theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import UnsavableState
from resilient.state.flat import FlatShard
from resilient.state.kinds import require_same_kind
from resilient.state.optimizer import matched_groups, require_all_named, require_same_names
from resilient.state.tree import escape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_COUNT = "step"


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The elements of one parameter that this rank steps.

    Attributes:
        name: of the parameter in the model.
        group: number of its parameter group.
        shape: of the whole parameter.
        start: the first element.
        memory: the elements, a view of the parameter; may have none.
        pieces: what the optimizer holds: consecutive views of ``memory``, at least one.
        is_whole: one rank alone has all of it.
        homes: for each kind of state, one number for each element; made when it is asked for.
    """

    name: str
    group: int
    shape: tuple[int, ...]
    start: int
    memory: torch.Tensor
    pieces: tuple[torch.nn.Parameter, ...]
    is_whole: bool
    homes: dict[str, torch.Tensor] = field(default_factory=dict)

    def part_of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return a part of the whole parameter's shape, of memory that is laid out as this."""
        if self.is_whole:
            return memory.detach().view(self.shape)
        return FlatShard(self.shape, self.start, memory.detach())

    def cut(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces of memory that is laid out as this."""
        return list(torch.split(memory, [one.numel() for one in self.pieces]))

    def home(self, kind: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory for one kind of state of all pieces."""
        if kind not in self.homes:
            self.homes[kind] = torch.zeros_like(self.memory, dtype=dtype)
        return self.homes[kind]


class PieceOptimizer:
    """A Stateful over an optimizer of pieces.

    Args:
        optimizer: its groups hold the pieces of ``runs``.
        runs: of all parameters that are trained, group by group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, runs: Sequence[Run]) -> None:
        self.optimizer = optimizer
        self.runs = list(runs)
        self._by_path = {escape(run.name): run for run in runs}

    def state_dict(self) -> dict[str, Any]:
        """Return ``state`` by name and ``param_groups`` with names in place of pieces.

        Raises:
            UnsavableState: the optimizer keeps something that is neither one number for each
                element of a parameter, nor one for all of them.
            ConfigError: the optimizer got a group of parameters that are no pieces.
        """
        groups = [
            {**{name: one for name, one in group.items() if name != "params"}, "params": names}
            for names, group in zip(self._names(), self.optimizer.param_groups, strict=True)
        ]
        state = {
            run.name: {kind: self._part(run, kind) for kind in kept}
            for run in self.runs
            if (kept := self.optimizer.state.get(run.pieces[0]))
        }
        return {"state": state, "param_groups": groups}

    def like(self, path: str) -> torch.Tensor | None:
        """Return what to fill with the state at ``path``, which may not be there yet.

        Args:
            path: inside the part, ``state/<parameter>/<name>``.
        """
        place, _, rest = path.partition("/")
        name, _, kind = rest.partition("/")
        run = self._by_path.get(name)
        if place != "state" or kind == _COUNT or run is None or run.is_whole:
            return None
        return run.part_of(run.home(kind))

    def check_saved(self, state_dict: Mapping[str, Any]) -> None:
        """Check that ``load_state_dict`` takes a saved state. Nothing is loaded.

        Raises:
            ValueError: the state is of another kind of optimizer, of other parameters, or of
                groups that this optimizer does not have.
            ConfigError: the optimizer got a group that is not trained here.
        """
        require_same_kind(self.optimizer, state_dict)
        self._matched(state_dict)

    def _matched(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the saved group of each group of the optimizer."""
        names = self._names()
        saved = state_dict["param_groups"]
        require_same_names(
            state_dict["state"], [one for group in names for one in group], partial=True
        )
        return matched_groups(names, saved, self.optimizer.param_groups)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give each parameter the state saved under its name.

        Raises:
            ValueError: the saved names are not this optimizer's.
            RuntimeError: a shape is not the parameter's.
        """
        groups = self._matched(state_dict)
        state = state_dict["state"]
        for run in self.runs:
            saved = state.get(run.name) or {}
            for piece in run.pieces:
                self.optimizer.state.pop(piece, None)
            for kind, value in saved.items():
                self._take(run, kind, value)
        for group, found in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({name: one for name, one in found.items() if name != "params"})

    def steady(self) -> Iterator[torch.Tensor]:
        """Yield the memory that only a step of the optimizer changes."""
        yield from (run.memory for run in self.runs)
        for kept in self.optimizer.state.values():
            yield from (one for one in kept.values() if torch.is_tensor(one))

    def _names(self) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        names: list[list[str]] = [[] for _ in self.optimizer.param_groups]
        for run in self.runs:
            names[run.group].append(run.name)
        require_all_named(self.optimizer, names)
        return names

    def _part(self, run: Run, kind: str) -> Any:
        """Return one kind of state of a parameter; afterwards it lies in one run of memory."""
        values = [self.optimizer.state[piece].get(kind) for piece in run.pieces]
        first = values[0]
        if not torch.is_tensor(first):
            return first
        if kind == _COUNT or first.dim() == 0:
            return first.detach().clone()
        if any(one.shape != piece.shape for one, piece in zip(values, run.pieces, strict=True)):
            raise UnsavableState(
                f"the optimizer keeps `{kind}` of shape {tuple(first.shape)} for "
                f"{run.pieces[0].numel()} elements",
                path=f"{run.name}/{kind}",
                hint="use an optimizer that keeps one number for each element, such as AdamW",
            )
        home = run.homes.get(kind)
        if home is None or home.dtype != first.dtype:
            home = run.homes[kind] = torch.empty_like(run.memory, dtype=first.dtype)
        for piece, one, place in zip(run.pieces, values, run.cut(home), strict=True):
            if one.data_ptr() != place.data_ptr():
                place.copy_(one)
                self.optimizer.state[piece][kind] = place
        return run.part_of(home)

    @torch.no_grad()
    def _take(self, run: Run, kind: str, value: Any) -> None:
        """Give the pieces of a run one kind of the state that was saved."""
        if not torch.is_tensor(value) or kind == _COUNT or tuple(value.shape) != run.shape:
            for piece in run.pieces:
                copied = value.clone() if torch.is_tensor(value) else value
                self.optimizer.state[piece][kind] = copied
            return
        home = run.homes.get(kind)
        if home is None or home.dtype != value.dtype:
            home = run.homes[kind] = torch.empty_like(run.memory, dtype=value.dtype)
        given = (
            value.memory
            if isinstance(value, FlatShard)
            else value.reshape(-1).narrow(0, run.start, home.numel())
        )
        if given.data_ptr() != home.data_ptr():
            home.copy_(given)
        for piece, place in zip(run.pieces, run.cut(home), strict=True):
            self.optimizer.state[piece][kind] = place
