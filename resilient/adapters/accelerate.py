"""A loop on accelerate, saving and resuming through us.

::

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with AcceleratorCheckpointer(accelerator, "runs/mine") as checkpointer:
        step = checkpointer.resume() or 0
        while checkpointer.epoch < 3:
            for batch in checkpointer.batches(loader):   # what is left of the epoch
                ...
                checkpointer.save(step)

What ``accelerator.save_state`` would write with pickle goes to the repository instead: whatever was
prepared or registered for checkpointing, the gradient scaler, the accumulation counter and random
state; and the position in the data, which accelerate leaves to the script.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from accelerate.utils import DistributedType

from resilient.adapters.held import Field, HeldRandomState
from resilient.errors import ConfigError
from resilient.loop import Checkpointer
from resilient.state.capture import Part
from resilient.state.rng import RandomState
from resilient.world.launch import read_launch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import torch
    from accelerate import Accelerator

    from resilient.format.names import CheckpointId

_REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class AcceleratorCheckpointer(Checkpointer):
    """A checkpointer of everything that an Accelerator has prepared.

    Build it after ``accelerator.prepare`` and ``register_for_checkpointing``. Save between
    optimizer steps: gradients that are being accumulated are not saved.

    Args:
        accelerator: whose models, optimizers, schedulers and registered objects to save.
        url: the repository.
        things: more to save, and options; see :class:`resilient.loop.Checkpointer`.

    Attributes:
        epoch: how often ``batches`` has come to an end.

    Raises:
        ConfigError: the accelerator keeps its state where this cannot take it.
    """

    def __init__(
        self, accelerator: Accelerator, url: str | os.PathLike[str], **things: Any
    ) -> None:
        if accelerator.distributed_type in _REFUSED:
            raise ConfigError(
                f"an Accelerator of type {accelerator.distributed_type} keeps its state where this "
                "cannot take it"
            )
        self.epoch = 0
        self._accelerator: Any = accelerator
        self._taken = 0
        self._held = HeldRandomState()
        self._order = Order()
        own = {
            **_prepared(self._accelerator),
            "place": Part(Field(self._place, self._put_place)),
            "order": Part(self._order, "rank"),
            "rng_state": Part(self._held, "rank"),
        }
        taken = sorted(set(own) & set(things))
        if taken:
            raise ConfigError(f"`{taken[0]}` is what the accelerator prepared: choose another name")
        # Random state last, so that nothing that is loaded can draw from the restored streams.
        super().__init__(url, rng=False, **{**things, **own})

    def resume(self, ref: str | None = None) -> int | None:
        """Load the newest checkpoint that all ranks can prove, and begin this life.

        As :meth:`resilient.loop.Checkpointer.resume`; random state is back where it was when
        ``batches`` gives its first batch.

        Crash: the claimed number is used up; nothing else changed in the store.

        Raises:
            ConfigError: also if the accelerator trains on this rank alone, of several.
        """
        ranks, mine = read_launch(os.environ).world.size, self._accelerator.num_processes
        if mine != ranks:
            raise ConfigError(
                f"this is one of {ranks} ranks (WORLD_SIZE), and the Accelerator is one of {mine}: "
                "each rank would train its own model",
                hint="on CPUs Accelerator(cpu=True) joins them",
            )
        step = super().resume(ref)
        self._held.restore()
        return step

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        keep: Collection[CheckpointId] = (),
    ) -> CheckpointId:
        """Save as :meth:`resilient.loop.Checkpointer.save`, between optimizer steps.

        Crash: the checkpoint exists if its manifest was put, and then it is whole; else it does
        not exist and older ones are untouched.

        Raises:
            ConfigError: also in the middle of an accumulation: its gradients would be lost.
        """
        if not self._accelerator.sync_gradients:
            raise ConfigError(
                f"step {step} would be saved in the middle of an accumulation, without the "
                "gradients that were added up; nothing was saved, older checkpoints are intact",
                hint="save where accelerator.sync_gradients is true: `if "
                "accelerator.sync_gradients: checkpointer.save(step)`",
            )
        return super().save(step, metrics=metrics, keep=keep)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield what is left of this epoch; after a resume, what was trained on is skipped.

        Args:
            loader: what ``accelerator.prepare`` returned; map-style, shuffled or not.

        Raises:
            ConfigError: the loader has no length, as of an IterableDataset without one.
        """
        skipped = self._taken
        if not _has_length(loader):
            raise ConfigError(
                "the loader has no length, so the place in its data cannot be found again",
                hint="give its dataset a __len__, or make it map-style",
            )
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self.epoch)
        if skipped < len(loader):
            self._order.begin(loader, is_new=not skipped)
            left = self._accelerator.skip_first_batches(loader, skipped) if skipped else loader
            for number, batch in enumerate(left):
                if skipped and not number:
                    # To find the place, the streams went back to where the epoch began.
                    self._held.restore()
                self._taken += 1
                yield batch
        self.epoch, self._taken = self.epoch + 1, 0

    def _place(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batches": self._taken, "step": self._accelerator.step}

    def _put_place(self, state: Mapping[str, Any]) -> None:
        self.epoch, self._taken = state["epoch"], state["batches"]
        self._accelerator.step = state["step"]


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except TypeError:
        return False
    return True


class Order:
    """What the order of an epoch was drawn from: random state at its beginning.

    accelerate shuffles by the global streams, by a generator of its own, or by the epoch's number,
    as it is configured.
    """

    def __init__(self) -> None:
        self._streams: Mapping[str, Any] | None = None
        self._drawn_from: torch.Tensor | None = None
        self._generator: torch.Generator | None = None
        self._resumed: Mapping[str, Any] | None = None

    def begin(self, loader: Any, *, is_new: bool) -> None:
        """Note the state that a new epoch's order is drawn from, or put back that of a resumed."""
        self._generator = getattr(loader, "synchronized_generator", None)
        resumed, self._resumed = self._resumed, None
        if resumed is not None and self._generator is not None:
            state = resumed["now" if is_new else "drawn_from"]
            if state is not None:
                self._generator.set_state(state)
        if not is_new and self._streams is not None:
            RandomState().load_state_dict(self._streams)
            return
        self._streams = RandomState().state_dict()
        self._drawn_from = self._now()

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        return {"streams": self._streams, "drawn_from": self._drawn_from, "now": self._now()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold them until the loader is known."""
        self._resumed = state_dict
        self._streams, self._drawn_from = state_dict["streams"], state_dict["drawn_from"]

    def _now(self) -> torch.Tensor | None:
        return None if self._generator is None else self._generator.get_state()


def _prepared(accelerator: Any) -> dict[str, Any]:
    """Return what ``accelerator.save_state`` saves, by name; what accelerate wrapped, bare."""
    optimizers = [getattr(one, "optimizer", one) for one in accelerator._optimizers]  # noqa: SLF001 - no public way
    kinds = {
        "model": accelerator._models,  # noqa: SLF001 - no public way
        "optimizer": optimizers,
        "scheduler": accelerator._schedulers,  # noqa: SLF001 - no public way
        "registered": accelerator._custom_objects,  # noqa: SLF001 - no public way
        "scaler": [one for one in (accelerator.scaler,) if one is not None],
    }
    return {
        f"{kind}_{number}" if number else kind: one
        for kind, found in kinds.items()
        for number, one in enumerate(found)
    }
