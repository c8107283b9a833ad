"""Save and resume of a training loop on accelerate.

::

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    with AcceleratorCheckpointer(accelerator, "runs/mine") as checkpointer:
        step = checkpointer.resume() or 0
        while checkpointer.epoch < 3:
            for batch in checkpointer.batches(loader):   # what is left of the epoch
                ...
                checkpointer.save(step)

The repository ``runs/mine`` replaces the folders that ``accelerator.save_state`` writes. A
checkpoint contains all prepared objects, all objects registered for checkpointing, the gradient
scaler, the accumulation counter and random state. It also contains the files that save hooks write,
and the position in the data. accelerate itself does not save this position.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import DistributedType

from resilient.checkpointer import Checkpointer
from resilient.distributed.launch_env import read_launch
from resilient.errors import ConfigError
from resilient.integrations.events import StateNotKept
from resilient.integrations.hook_files import HookFiles
from resilient.integrations.random_state import DeferredRandomState, StateField, generators_of
from resilient.start_guard import LOOP, StartGuard
from resilient.state_dict.rng_state import RandomState
from resilient.state_dict.snapshot import Part

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import torch
    from accelerate import Accelerator

    from resilient import checkpoint_engine
    from resilient.format.keys import CheckpointId

_REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
_RANDOM_DEVICES = ("cpu", "cuda")
"""Devices whose random state :class:`resilient.state_dict.rng_state.RandomState` saves."""
_LIMITS = frozenset({"keep_last", "save_total_limit", "retention"})


class AcceleratorCheckpointer(Checkpointer):
    """A checkpointer for everything that an Accelerator has prepared.

    Create the checkpointer after ``accelerator.prepare``, ``register_for_checkpointing`` and the
    registration of hooks. Save between optimizer steps, because a checkpoint does not contain
    accumulated gradients.

    A save calls the hooks of ``register_save_state_pre_hook`` with an empty folder, and the
    checkpoint contains the files that they write. ``resume`` calls the hooks of
    ``register_load_state_pre_hook`` with a folder of these files, before it loads the models. The
    models are always loaded as saved, even if a hook removed some from its list.

    ``total_limit`` of a ``ProjectConfiguration`` with ``automatic_checkpoint_naming`` becomes
    ``keep_last``, unless an option limits the checkpoints. A start at step 0 is refused if
    ``project_dir`` holds checkpoints of accelerate.

    Args:
        accelerator: Owner of the models, optimizers, schedulers and registered objects to save.
        url: URL or path of the repository.
        **objects: More objects to save, and options; see
            :class:`resilient.checkpointer.Checkpointer`.

    Attributes:
        epoch: Number of completed passes of ``batches``.

    Raises:
        ConfigError: This class cannot access the accelerator's state, or a prepared loader is a
            ``StatefulDataLoader``.
    """

    def __init__(
        self, accelerator: Accelerator, url: str | os.PathLike[str], **objects: Any
    ) -> None:
        self.epoch = 0
        self._accelerator: Any = accelerator
        _require_supported(self._accelerator)
        self._state_number = 0
        self._random_state = DeferredRandomState()
        self._order = EpochOrder(self._accelerator)
        self._hook_files = HookFiles(self._accelerator)
        self._known_objects = _identities(self._accelerator)
        accelerator_parts = {
            # Call hooks first, so that models and optimizers are loaded over the state from a hook.
            **(
                {"hooks": Part(self._hook_files, optional=True)}
                if self._hook_files.exists()
                else {}
            ),
            **_prepared(self._accelerator),
            "place": Part(StateField(self._place, self._put_place)),
            "order": Part(self._order, "rank"),
            "rng_state": Part(self._random_state, "rank"),
        }
        duplicate_names = sorted(set(accelerator_parts) & set(objects))
        if duplicate_names:
            raise ConfigError(
                f"`{duplicate_names[0]}` was prepared by the accelerator: choose another name"
            )
        # Load random state last, so that no other load draws from the restored streams.
        super().__init__(url, rng=False, **{**objects, **self._limit(objects), **accelerator_parts})
        if places := _own_saves(self._accelerator):
            self.guard = StartGuard(LOOP, places)

    def resume(self, ref: str | None = None) -> int | None:
        """Load the newest checkpoint that all ranks can verify, and begin this attempt.

        This method works like :meth:`resilient.checkpointer.Checkpointer.resume`. Random state is
        restored when ``batches`` yields its first batch.

        Crash: the claimed number is used up; nothing else changed in the store.

        Raises:
            ConfigError: Also if the accelerator uses only this rank although the run has several
                ranks.
        """
        ranks, processes = read_launch(os.environ).world.size, self._accelerator.num_processes
        if processes != ranks:
            raise ConfigError(
                f"this is one of {ranks} ranks (WORLD_SIZE), but the Accelerator is one of "
                f"{processes}: each rank would train its own model",
                hint="on CPUs, Accelerator(cpu=True) joins the ranks",
            )
        self._require_known("resume()")
        step = super().resume(ref)
        self._random_state.restore()
        lost_states = [] if step is None else self._order.restore_generators()
        device = self._accelerator.device.type
        if device not in _RANDOM_DEVICES:
            lost_states.append(f"random state of {device}")
        if lost_states:
            self.emit(
                StateNotKept(tuple(lost_states), "draws of this run may differ after a resume")
            )
        return step

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, Any] | None = None,
        keep: Collection[CheckpointId] = (),
    ) -> CheckpointId:
        """Save as :meth:`resilient.checkpointer.Checkpointer.save`, between optimizer steps.

        Crash: if the manifest was written, the checkpoint is complete. Otherwise the checkpoint
        does not exist, and older checkpoints are unchanged.

        Raises:
            ConfigError: Also in the middle of an accumulation, because its gradients would be lost.
                Also if an object was prepared or registered after this checkpointer was made.
        """
        self._require_known("save()")
        if not self._accelerator.sync_gradients:
            raise ConfigError(
                f"cannot save step {step} in the middle of an accumulation: the accumulated "
                "gradients would be lost; nothing was saved, older checkpoints are intact",
                hint="save if accelerator.sync_gradients is true: `if accelerator.sync_gradients: "
                "checkpointer.save(step)`",
            )
        return super().save(step, metrics=metrics, keep=keep)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the remaining batches of this epoch; after a resume, trained batches are skipped.

        Args:
            loader: A loader that ``accelerator.prepare`` returned; map-style, shuffled or not.

        Raises:
            ConfigError: The loader has no length, for example because of an IterableDataset.
        """
        skipped_batches = self._state_number
        if not _has_length(loader):
            raise ConfigError(
                "the loader has no length, so its data position cannot be restored",
                hint="give its dataset a __len__, or make it map-style",
            )
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self.epoch)
        if skipped_batches < len(loader):
            self._order.begin(loader, is_new=not skipped_batches)
            remaining_batches = (
                self._accelerator.skip_first_batches(loader, skipped_batches)
                if skipped_batches
                else loader
            )
            for number, batch in enumerate(remaining_batches):
                if skipped_batches and not number:
                    # Restore the streams, because the skip of batches reset them to the start of
                    # the epoch.
                    self._random_state.restore()
                self._state_number += 1
                yield batch
        self.epoch, self._state_number = self.epoch + 1, 0

    @contextmanager
    def _saving(self, engine: checkpoint_engine.CheckpointEngine) -> Iterator[None]:
        """Return the context of a save, and call the save hooks before it."""
        with super()._saving(engine):
            if self._hook_files.exists():
                if self._accelerator.num_processes > 1:
                    # A hook may be collective, so a rank that saves alone must not call it.
                    engine.meet()
                self._hook_files.collect()
            yield

    def _limit(self, tracked: Mapping[str, Any]) -> dict[str, int]:
        """Return the checkpoint limit that the script set on accelerate."""
        project = self._accelerator.project_configuration
        limit = project.total_limit if project.automatic_checkpoint_naming else None
        return {} if limit is None or _LIMITS & set(tracked) else {"keep_last": limit}

    def _require_known(self, call: str) -> None:
        """Raise if an object was prepared or registered after this checkpointer was made."""
        unknown_names = [
            name
            for name, identity in _identities(self._accelerator).items()
            if identity not in self._known_objects.values()
        ]
        if unknown_names:
            raise ConfigError(
                f"{call} would miss `{unknown_names[0]}`: it was prepared or registered after the "
                "AcceleratorCheckpointer was created; nothing was saved or loaded",
                hint="create the AcceleratorCheckpointer after prepare() and all register_ calls",
            )

    def _place(self) -> dict[str, int]:
        project = self._accelerator.project_configuration
        return {
            "epoch": self.epoch,
            "batches": self._state_number,
            "step": self._accelerator.step,
            "iteration": project.iteration,
        }

    def _put_place(self, state: Mapping[str, Any]) -> None:
        self.epoch, self._state_number = state["epoch"], state["batches"]
        self._accelerator.step = state["step"]
        project = self._accelerator.project_configuration
        project.iteration = max(project.iteration, state.get("iteration", 0))


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except TypeError:
        return False
    return True


class EpochOrder:
    """Random state that determines the order of an epoch.

    Depending on its configuration, accelerate shuffles with the global streams, with a generator of
    the loader, or with a seed and the epoch number. Loaders that only evaluate have generators too.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._streams: Mapping[str, Any] | None = None
        self._drawn_from: torch.Tensor | None = None
        self._generator: torch.Generator | None = None
        self._sampler: SeedableRandomSampler | None = None
        self._resumed: Mapping[str, Any] | None = None

    def begin(self, loader: Any, *, is_new: bool) -> None:
        """Record the random state of a new epoch, or restore it for a resumed epoch."""
        self._generator = getattr(loader, "synchronized_generator", None)
        self._sampler = _seedable_sampler(loader)
        resumed_state, self._resumed = self._resumed, None
        if resumed_state is not None and self._generator is not None:
            state = resumed_state["now" if is_new else "drawn_from"]
            if state is not None:
                self._generator.set_state(state)
        if resumed_state is not None and self._sampler is not None:
            seed = resumed_state.get("seed")
            self._sampler.initial_seed = self._sampler.initial_seed if seed is None else seed
        if not is_new and self._streams is not None:
            RandomState().load_state_dict(self._streams)
            return
        self._streams = RandomState().state_dict()
        self._drawn_from = self._now()

    def restore_generators(self) -> list[str]:
        """Restore the generators of all prepared loaders; return the names of lost ones."""
        saved_states = self._resumed.get("generators") if self._resumed is not None else None
        generators = self._generators()
        if saved_states is None or len(saved_states) != len(generators):
            return [] if saved_states is None else ["generators of data loaders"]
        for generator, state in zip(generators, saved_states, strict=True):
            generator.set_state(state)
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return the state at the beginning of the epoch and the current state."""
        return {
            "streams": self._streams,
            "drawn_from": self._drawn_from,
            "now": self._now(),
            "seed": None if self._sampler is None else self._sampler.initial_seed,
            "generators": [generator.get_state() for generator in self._generators()],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the state until the loader is known."""
        self._resumed = state_dict
        self._streams, self._drawn_from = state_dict["streams"], state_dict["drawn_from"]

    def _now(self) -> torch.Tensor | None:
        return None if self._generator is None else self._generator.get_state()

    def _generators(self) -> list[torch.Generator]:
        loaders = self._accelerator._dataloaders  # noqa: SLF001 - no public way
        generators = generators_of(loaders)
        shared = (getattr(loader, "synchronized_generator", None) for loader in loaders)
        generator_ids = {id(generator) for generator in generators}
        return [
            *generators,
            *(
                generator
                for generator in shared
                if generator is not None and id(generator) not in generator_ids
            ),
        ]


def _seedable_sampler(loader: Any) -> SeedableRandomSampler | None:
    """Return the sampler that draws the order of each epoch from a seed and the epoch's number."""
    holder = getattr(loader, "batch_sampler", None)
    while holder is not None and not isinstance(holder, SeedableRandomSampler):
        holder = getattr(holder, "batch_sampler", None) or getattr(holder, "sampler", None)
    return holder


def _require_supported(accelerator: Any) -> None:
    if accelerator.distributed_type in _REFUSED:
        raise ConfigError(
            f"an Accelerator of type {accelerator.distributed_type} keeps its state where this "
            "library cannot read it"
        )
    loaders = accelerator._dataloaders  # noqa: SLF001 - no public way
    if any(getattr(loader, "use_stateful_dataloader", False) for loader in loaders):
        raise ConfigError(
            "a prepared loader is a StatefulDataLoader, whose state checkpoints cannot hold",
            hint="DataLoaderConfiguration(use_stateful_dataloader=False): batches() keeps the "
            "position in the data",
        )


def _own_saves(accelerator: Any) -> tuple[str, ...]:
    """Return the folder for accelerate's own checkpoints, if accelerate names them itself."""
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming or project.project_dir is None:
        return ()
    return (str(Path(project.project_dir) / "checkpoints"),)


def _identities(accelerator: Any) -> dict[str, int]:
    """Return the identity of each prepared object and registered hook, by name."""
    identities = {name: id(value) for name, value in _prepared(accelerator).items()}
    hooks = HookFiles(accelerator).hooks()
    return identities | {f"hook {at}": id(hook) for at, hook in enumerate(hooks)}


def _prepared(accelerator: Any) -> dict[str, Any]:
    """Return the objects that ``accelerator.save_state`` saves, by name, without wrappers."""
    optimizers = [
        getattr(optimizer, "optimizer", optimizer)
        for optimizer in accelerator._optimizers  # noqa: SLF001 - no public way
    ]
    schedulers = [
        getattr(scheduler, "scheduler", scheduler)
        for scheduler in accelerator._schedulers  # noqa: SLF001 - no public way
    ]
    kinds = {
        "model": accelerator._models,  # noqa: SLF001 - no public way
        "optimizer": optimizers,
        "scheduler": schedulers,
        "registered": accelerator._custom_objects,  # noqa: SLF001 - no public way
        "scaler": [item for item in (accelerator.scaler,) if item is not None],
    }
    return {
        f"{kind}_{number}" if number else kind: item
        for kind, objects in kinds.items()
        for number, item in enumerate(objects)
    }
