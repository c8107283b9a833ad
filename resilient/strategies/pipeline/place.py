"""Where a rank is in its pipeline, and the random numbers that its stages draw."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where this rank is.

    Attributes:
        device: where it computes.
        number: its place in its pipeline.
        pipeline: the ranks of that, in order.
        pipeline_group: they.
        peers: the ranks of the same place in all pipelines.
        peers_group: they; None if this rank is alone.
    """

    device: torch.device
    number: int
    pipeline: tuple[int, ...]
    pipeline_group: dist.ProcessGroup
    peers: tuple[int, ...]
    peers_group: dist.ProcessGroup | None

    @property
    def writes(self) -> bool:
        """Whether this rank writes what all ranks of its stages have."""
        return dist.get_rank() == self.peers[0]

    def holder(self, stage: int) -> int:
        """Return the rank that holds a stage of this pipeline."""
        return self.pipeline[stage % len(self.pipeline)]

    def exchange(self, value: Any) -> list[Any]:
        """Return what each rank of the pipeline shows. Collective.

        Among ranks of one job only: what arrives is unpickled.
        """
        shown: list[Any] = [None] * len(self.pipeline)
        dist.all_gather_object(shown, value, group=self.pipeline_group)
        return shown


class StageRandom:
    """The random stream of a stage's passes; a Stateful, of which each rank saves its own.

    Ranks of one pipeline share all other random numbers, so that they make the same batches of
    the same samples; what their layers draw is their own.

    Args:
        place: of this rank; what computes a stage together draws the same.
    """

    def __init__(self, place: Place) -> None:
        self._device = place.device
        seed = (torch.initial_seed() + 1_000_003 * (place.number + 1)) % 2**63
        with self._swapped(None):
            torch.manual_seed(seed)
            self._states = self._read()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from this stream, and leave the process's own as it is."""
        with self._swapped(self._states):
            try:
                yield
            finally:
                self._states = self._read()

    @contextmanager
    def _swapped(self, states: dict[str, torch.Tensor] | None) -> Iterator[None]:
        outside = self._read()
        if states is not None:
            self._write(states)
        try:
            yield
        finally:
            self._write(outside)

    def _read(self) -> dict[str, torch.Tensor]:
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def _write(self, states: Mapping[str, torch.Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and self._device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], self._device)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the generators' states, by kind of device."""
        return self._states

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Take them back."""
        self._states = {**self._states, **state_dict}
