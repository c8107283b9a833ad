"""How a run shows how far it is: a bar, or a line per log."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from resilient.train.callbacks.callback import TrainerCallback

if TYPE_CHECKING:
    from collections.abc import Mapping


class _Bar(tqdm):  # type: ignore[type-arg]
    """A bar that is drawn as it was when a line is written above it, unless that is long ago.

    What it says is made anew ten times a second, and not for each of a hundred lines.
    """

    _said: str = ""
    _said_at: float = 0.0

    def __str__(self) -> str:
        now = time.monotonic()
        if now - self._said_at >= self.mininterval:
            self._said, self._said_at = str(super().__str__()), now
        return self._said

    def close(self) -> None:
        """Say for the last time where it stands."""
        self._said_at = 0.0
        super().close()


class ProgressCallback(TrainerCallback):
    """A progress bar on rank zero that goes on from the resumed step.

    Args:
        max_str_len: longer texts among the logs are not shown beside the bar.
    """

    def __init__(self, max_str_len: int = 100) -> None:
        self.max_str_len = max_str_len
        self.training_bar: Any = None
        self.prediction_bar: Any = None

    def on_train_begin(self, _args: Any, state: Any, _control: Any, /, **_: Any) -> None:
        """Open the bar at the step that training goes on from."""
        if state.is_world_process_zero:
            self.training_bar = _Bar(
                total=state.max_steps, initial=state.global_step, dynamic_ncols=True
            )

    def on_step_end(self, _args: Any, state: Any, _control: Any, /, **_: Any) -> None:
        """Move the bar by one step."""
        if self.training_bar is not None:
            # A smaller batch makes more steps.
            self.training_bar.total = state.max_steps
            self.training_bar.update(1)

    def on_prediction_step(
        self, _args: Any, state: Any, _control: Any, /, *, eval_dataloader: Any = None, **_: Any
    ) -> None:
        """Move a second bar, which lives as long as an evaluation."""
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
        """Show the numbers beside the bar, when it is next drawn: a step ends right after."""
        if self.training_bar is not None:
            shown = _short(kwargs["logs"], self.max_str_len)
            self.training_bar.set_postfix(shown, refresh=False)

    def on_train_end(self, _args: Any, _state: Any, _control: Any, /, **_: Any) -> None:
        """Close the bar."""
        if self.training_bar is not None:
            self.training_bar.close()
        self.training_bar = None


class PrinterCallback(TrainerCallback):
    """Writes the logs to standard output, on the first rank of each host."""

    def on_log(self, _args: Any, state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Write one line."""
        if state.is_local_process_zero:
            sys.stdout.write(f"{_short(kwargs['logs'])}\n")


def _short(logs: Mapping[str, Any], most: int | None = None) -> dict[str, Any]:
    """Return logs for people: short numbers, no text longer than ``most`` characters."""
    shown = {name: one for name, one in logs.items() if name != "total_flos"}
    for name, value in shown.items():
        if isinstance(value, float):
            shown[name] = f"{value:.4g}"
        elif most is not None and isinstance(value, str) and len(value) > most:
            shown[name] = f"[{len(value)} characters, more than max_str_len {most}]"
    return shown
