"""Built-in callbacks: progress bar, log printer, cache cleanup, memory watch, profiler."""

from __future__ import annotations

import sys
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm
from tqdm.utils import disp_len

from resilient.errors import ConfigError
from resilient.train.callbacks.base import TrainerCallback
from resilient.train.events import MemoryFreed
from resilient.train.memory import empty_cache, used_share

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class _Bar(tqdm):  # type: ignore[type-arg]
    """Progress bar that redraws its last text above new lines, unless the text is old.

    The text is rebuilt at most 10 times per second, not for each of 100 log lines.
    """

    shown_numbers: Mapping[str, Any] | None = None
    """Numbers to show beside the bar at its next redraw."""
    max_str_len: int | None = None
    _last_text: str = ""
    _redrawn_at: float = 0.0

    def __str__(self) -> str:
        now_seconds = time.monotonic()
        if now_seconds - self._redrawn_at >= self.mininterval:
            if self.shown_numbers is not None:
                self.set_postfix(_short(self.shown_numbers, self.max_str_len), refresh=False)
                self.shown_numbers = None
            self._last_text, self._redrawn_at = str(super().__str__()), now_seconds
        return self._last_text

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        """Return a function that overwrites its previous output, like tqdm's own.

        Measuring the text width costs tqdm as much as all its other work, so known widths are
        cached.
        """
        width, shown_width = lru_cache(maxsize=4)(disp_len), 0

        def show(text: str) -> None:
            nonlocal shown_width
            covered, shown_width = shown_width, width(text)
            file.write("\r" + text + " " * max(covered - shown_width, 0))
            file.flush()

        return show

    def close(self) -> None:
        """Show the final position and close the bar."""
        self._redrawn_at = 0.0
        super().close()


class ProgressCallback(TrainerCallback):
    """Progress bar on rank 0 that continues from the resumed step.

    Args:
        max_str_len: Maximum length of a logged text shown beside the bar.
    """

    def __init__(self, max_str_len: int = 100) -> None:
        self.max_str_len = max_str_len
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self.current_step = 0

    def on_train_begin(self, _args: Any, state: Any, _control: Any, /, **_: Any) -> None:
        """Open the bar at the step from which training continues."""
        self.current_step = state.global_step
        if state.is_world_process_zero:
            self.training_bar = _Bar(
                total=state.max_steps, initial=state.global_step, dynamic_ncols=True
            )
            self.training_bar.max_str_len = self.max_str_len

    def on_step_end(self, _args: Any, state: Any, _control: Any, /, **_: Any) -> None:
        """Move the bar by one step."""
        if self.training_bar is not None:
            # A smaller batch size increases the number of steps.
            self.training_bar.total = state.max_steps
            self.training_bar.update(1)
        self.current_step = state.global_step

    def on_prediction_step(
        self, _args: Any, state: Any, _control: Any, /, *, eval_dataloader: Any = None, **_: Any
    ) -> None:
        """Advance a second bar, which is shown during an evaluation."""
        if not state.is_world_process_zero:
            return
        if self.prediction_bar is None:
            total = len(eval_dataloader) if hasattr(eval_dataloader, "__len__") else None
            self.prediction_bar = tqdm(
                total=total, leave=self.training_bar is None, dynamic_ncols=True
            )
        self.prediction_bar.update(1)

    def on_evaluate(self, _args: Any, _state: Any, _control: Any, /, **_: Any) -> None:
        """Close the second bar."""
        if self.prediction_bar is not None:
            self.prediction_bar.close()
        self.prediction_bar = None

    on_predict = on_evaluate

    def on_log(self, _args: Any, _state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Show the numbers beside the bar at its next redraw, at the end of the step."""
        if self.training_bar is not None:
            self.training_bar.shown_numbers = kwargs["logs"]

    def on_train_end(self, _args: Any, _state: Any, _control: Any, /, **_: Any) -> None:
        """Close the bar."""
        if self.training_bar is not None:
            self.training_bar.close()
        self.training_bar = None


class PrinterCallback(TrainerCallback):
    """Writer of logs to standard output, on the first rank of each host."""

    def on_log(self, _args: Any, state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Write one line."""
        if state.is_local_process_zero:
            sys.stdout.write(f"{_short(kwargs['logs'])}\n")


def _short(logs: Mapping[str, Any], most: int | None = None) -> dict[str, Any]:
    """Return logs for display: short numbers, no text longer than ``most`` characters."""
    shown_logs = {name: log for name, log in logs.items() if name != "total_flos"}
    for name, value in shown_logs.items():
        if isinstance(value, float):
            shown_logs[name] = f"{value:.4g}"
        elif most is not None and isinstance(value, str) and len(value) > most:
            shown_logs[name] = f"[{len(value)} characters, more than max_str_len {most}]"
    return shown_logs


class EmptyCacheCallback(TrainerCallback):
    """Callback that releases the device's cached memory every ``torch_empty_cache_steps``."""

    def on_step_end(self, args: Any, state: Any, _control: Any, /, **_: Any) -> None:
        """Release the cache after every ``torch_empty_cache_steps`` steps."""
        if state.global_step % args.torch_empty_cache_steps == 0:
            empty_cache(args.device)


class MemoryWatchCallback(TrainerCallback):
    """Callback that periodically frees unused memory when memory is nearly full.

    The check collects unreachable objects and empties caches. No result of training changes.

    Args:
        every_steps: Steps between two checks.
        high: Share of memory, from 0 to 1, above which memory is freed.
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
        """Check memory at every ``every_steps``-th step."""
        if state.global_step % self.every_steps:
            return
        share_before = used_share(args.device)
        if share_before <= self.high:
            return
        empty_cache(args.device, collect=True)
        kwargs["emit"](MemoryFreed(share_before, used_share(args.device)))


class ProfilerCallback(TrainerCallback):
    """Callback that advances a ``torch.profiler`` profile after each step, on its rank.

    Args:
        profiler: Result of ``torch.profiler.profile(...)``, with its schedule and handlers.
    """

    def __init__(self, profiler: Any) -> None:
        self.profiler = profiler

    def on_train_begin(self, _args: Any, _state: Any, _control: Any, /, **_: Any) -> None:
        """Start the profiler."""
        self.profiler.start()

    def on_step_end(self, _args: Any, _state: Any, _control: Any, /, **_: Any) -> None:
        """Report the end of a step to the profiler."""
        self.profiler.step()

    def on_train_end(self, _args: Any, _state: Any, _control: Any, /, **_: Any) -> None:
        """Stop the profiler; its handler then has the whole recording."""
        self.profiler.stop()
