"""Rollback to a checkpoint after a NaN, infinite or spiking loss.

A rollback restarts training in the same processes, and claims a new generation (restart number) in
the repository. The rollback loads the checkpoint in place, as a resume does. The position in the
data moves past the data from the checkpoint to the end of the broken step. The sample ledger
records this data as skipped.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from resilient.distributed.heartbeat import Phase
from resilient.errors import NumbersBroken
from resilient.train.build_run import recompute_schedule
from resilient.train.events import TrainingRolledBack
from resilient.train.hf_interop.saved_models import saved_models
from resilient.train.loss_guard import LossDiverged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.train.run import TrainingRun
    from resilient.train.trainer import Trainer

REASON = "broken loss"
"""Reason of the skipped samples in the ledger."""


@contextmanager
def rolling_back(trainer: Trainer, run: TrainingRun) -> Iterator[None]:
    """Roll back if a step inside the context has a broken loss, skip its data, and save at once.

    Crash: until that save is durable, the next attempt trains on the same data and rolls back
        again.

    Raises:
        NumbersBroken: There is no checkpoint, or the rollback limit is reached.
    """
    try:
        yield
    except LossDiverged as divergence:
        trainer.precision.zero_grad(run.optimizer, run.all_parameters)
        trainer._emit_on_first_rank(divergence.as_event(trainer.state.global_step + 1))  # noqa: SLF001 - see below
        event = roll_back(trainer, run, divergence.reason)
        # This code is a part of the trainer's loop, so it uses private members of the trainer.
        trainer._emit = run.saver.emit  # noqa: SLF001
        trainer._emit_on_first_rank(event)  # noqa: SLF001
        trainer._save_step(run)  # noqa: SLF001


def roll_back(trainer: Trainer, run: TrainingRun, broken: str) -> TrainingRolledBack:
    """Begin an attempt from the newest checkpoint, and skip the broken step's data. Collective.

    Until the next save is durable, only memory records the skipped data.

    Crash: the next attempt begins from the same checkpoint and data, and rolls back again.

    Args:
        trainer: Trainer whose step was not applied.
        run: Run whose cursor is after the data of that step.
        broken: Reason why the step was not applied.

    Raises:
        NumbersBroken: There is no checkpoint, or the rollback limit is reached.
        SaveFailed: The save in flight failed, and ``on_save_failure`` stops training.
    """
    session, state, limit = trainer.session, trainer.state, trainer.args.rollback_limit
    callbacks = trainer.callback_handler
    session.progress.enter(Phase.FIRST)
    cursor, step = run.cursor, state.global_step + 1
    data_position = (cursor.epoch, cursor.samples, cursor.drawn)
    times = len(run.cursor.skipped) + 1
    if times > limit:
        raise _rejected_step(step, broken, f"it already went back {limit} times (`rollback_limit`)")
    # The counts that are not reported yet belong to steps that are rolled back.
    run.settle_counts()
    resume_result = None
    if run.saver.has_saved:
        checkpointer = session.checkpointer(session.emit, session.next_topic(), run.gate)
        resume_result = run.saver.begin_again(checkpointer)
    if resume_result is None:
        raise _rejected_step(step, broken, "there is no checkpoint to go back to")
    run.ledger.begin(resume_result, state.global_step, run.cursor)
    run.ledger.leave_out(run.cursor, REASON, until=data_position[:2])
    cursor.skip_to(*data_position)
    callbacks.context["saved_models"] = saved_models(session, run.saver)
    recompute_schedule(run, trainer, state, callbacks)
    run.turns_ahead += step - state.global_step
    session.progress.end_step(state.global_step)
    return TrainingRolledBack(
        broken, step, resume_result.checkpoint.folder, run.cursor.skipped[-1], times, limit
    )


def _rejected_step(step: int, broken: str, why: str) -> NumbersBroken:
    return NumbersBroken(
        f"step {step} was not applied: {broken}; {why}; committed checkpoints are from before it",
        hint="lower `learning_rate`, check the data of this step, or clip with `max_grad_norm`",
    )
