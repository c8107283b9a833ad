"""Callbacks that look after memory and time: caches, what is unreachable, profiles."""

from __future__ import annotations

from typing import Any

from resilient.errors import ConfigError
from resilient.train.callbacks.callback import TrainerCallback
from resilient.train.measures.memory import empty_cache, used_share
from resilient.train.reporting import MemoryFreed


class EmptyCacheCallback(TrainerCallback):
    """Gives memory that is free but kept back to the device, every ``torch_empty_cache_steps``."""

    def on_step_end(self, args: Any, state: Any, _control: Any, /, **_: Any) -> None:
        """Do it at the steps that are due."""
        if state.global_step % args.torch_empty_cache_steps == 0:
            empty_cache(args.device)


class MemoryWatchCallback(TrainerCallback):
    """Looks at memory now and then, and frees what can be freed when it is nearly used up.

    What is unreachable is collected and caches are emptied; nothing that training needs goes, and
    no number of it changes.

    Args:
        every_steps: steps between two looks.
        high: the share of memory, from 0 to 1, above which it acts.
    """

    def __init__(self, every_steps: int = 100, high: float = 0.9) -> None:
        if every_steps < 1 or not 0 <= high <= 1:
            raise ConfigError(
                f"MemoryWatchCallback(every_steps={every_steps}, high={high}): use a whole number "
                "of at least 1, and a share from 0 to 1"
            )
        self.every_steps = every_steps
        self.high = high

    def on_step_end(self, args: Any, state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Look, if it is time."""
        if state.global_step % self.every_steps:
            return
        before = used_share(args.device)
        if before <= self.high:
            return
        empty_cache(args.device, collect=True)
        kwargs["emit"](MemoryFreed(before, used_share(args.device)))


class ProfilerCallback(TrainerCallback):
    """Steps a profile of ``torch.profiler`` with training, on each rank that has one.

    Args:
        profiler: what ``torch.profiler.profile(...)`` made, with its schedule and handlers.
    """

    def __init__(self, profiler: Any) -> None:
        self.profiler = profiler

    def on_train_begin(self, _args: Any, _state: Any, _control: Any, /, **_: Any) -> None:
        """Start it."""
        self.profiler.start()

    def on_step_end(self, _args: Any, _state: Any, _control: Any, /, **_: Any) -> None:
        """Say that a step ended."""
        self.profiler.step()

    def on_train_end(self, _args: Any, _state: Any, _control: Any, /, **_: Any) -> None:
        """Stop it; its handler then has all that was recorded."""
        self.profiler.stop()
