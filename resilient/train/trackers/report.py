"""The callback that gives trackers what is logged, and the checkpoint what trackers need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.train.callbacks.callback import TrainerCallback
from resilient.train.trackers.courier import Courier
from resilient.train.trackers.tracker import Opening

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.train.trackers.tracker import Tracker

# How long training waits for all trackers together: to begin, at its end, and when it is cut off.
_BEGIN_SECONDS, _END_SECONDS, _CUT_SECONDS = 15.0, 60.0, 3.0
# The same at the end, where one takes models: they are as big as a checkpoint.
_UPLOAD_SECONDS = 1800.0


class Reporting(TrainerCallback):
    """Reports to trackers from rank zero; the others keep their state and do nothing.

    Args:
        trackers: instances; their names differ.
    """

    def __init__(self, *trackers: Tracker) -> None:
        self._trackers = trackers
        self._couriers: dict[str, Courier] = {}
        self._saved: dict[str, dict[str, Any]] = {}

    def on_train_begin(self, args: Any, state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Go on with the runs that the checkpoint names, or begin new ones."""
        self._end(_END_SECONDS, completed=False)
        self._open(args, state, kwargs)

    def on_log(self, args: Any, state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Send an entry of the history."""
        self._post(kwargs["logs"], args, state, kwargs)

    def on_evaluate(self, args: Any, state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Send the speeds too, which are in no history."""
        self._post(kwargs["metrics"], args, state, kwargs)

    on_predict = on_evaluate

    def on_save(self, _args: Any, state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Send the models that are committed by now; this save's own comes with the next."""
        for courier in self._couriers.values():
            courier.upload(kwargs["shelf"], state.global_step)

    def on_train_end(self, args: Any, _state: Any, _control: Any, /, **kwargs: Any) -> None:
        """Wait until everything is sent."""
        takes_models = any(one.takes_models for one in self._couriers.values())
        for courier in self._couriers.values():
            courier.upload_final(kwargs["shelf"], best=args.load_best_model_at_end)
        self._end(_UPLOAD_SECONDS if takes_models else _END_SECONDS, completed=True)

    def close(self) -> None:
        """Send what can still be sent, when training was cut off."""
        self._end(_CUT_SECONDS, completed=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the run in each tool, and how far each tool has it."""
        return {**self._saved, **{name: one.state_dict() for name, one in self._couriers.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back which runs to go on with."""
        self._end(_END_SECONDS, completed=False)
        self._saved = {name: dict(one) for name, one in state_dict.items()}

    def _post(
        self, logs: Mapping[str, Any], args: Any, state: Any, context: Mapping[str, Any]
    ) -> None:
        if not state.is_world_process_zero:
            return
        if not self._couriers:
            # Evaluated before training, or after it.
            self._open(args, state, context)
        for courier in self._couriers.values():
            courier.post(logs, state.global_step)

    def _open(self, args: Any, state: Any, context: Mapping[str, Any]) -> None:
        if not state.is_world_process_zero:
            return
        history = state.history.copied()
        begun = getattr(context.get("shelf"), "begun", None)
        began = begun.folder if begun is not None else ""
        for tracker in self._trackers:
            saved = self._saved.get(tracker.name, {})
            courier = Courier(tracker, saved, context["emit"], began)
            opening = Opening(
                args,
                str(saved.get("run_id", "")),
                int(saved.get("step", 0)),
                context.get("model"),
                state.trial_name,
                state.trial_params,
            )
            self._couriers[tracker.name] = courier
            courier.open(opening, history, _BEGIN_SECONDS / len(self._trackers))

    def _end(self, within_seconds: float, *, completed: bool) -> None:
        for courier in self._couriers.values():
            courier.close(within_seconds / len(self._couriers), completed=completed)
        self._saved = self.state_dict()
        self._couriers = {}
