"""The passes of a step with canonical reduction: this rank's micro-batches, joined with all others.

Each micro-batch is computed under its own random numbers, and so is what comes between steps: a
run draws the same numbers wherever its micro-batches are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from resilient.strategies.canonical.refusing import Unchanged, refuse_mixing
from resilient.train.arguments.reduction import is_canonical
from resilient.train.data.sampling import seed_between_steps, seed_worker
from resilient.train.reduction.probe import Arithmetic, require_same
from resilient.train.reduction.rehearsal import rehearse
from resilient.world.pulse import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from resilient.strategies.canonical.updates import ReplicaUpdates
    from resilient.train.run import Run
    from resilient.train.surface.hooks import TrainerHooks
    from resilient.train.trainer import Trainer

# The part of a checkpoint that says what a run was begun with.
REDUCTION = "reduction"


@dataclass(frozen=True, slots=True)
class LeafPasses:
    """Makes the gradients of a step.

    Attributes:
        updates: joins gradients.
        arithmetic: what the run was begun with.
        topic: names this training on the board.
    """

    updates: ReplicaUpdates
    arithmetic: Arithmetic
    topic: str

    def start(self, trainer: Trainer, run: Run) -> None:
        """Refuse what would make the bits depend on ranks, before anything is trained. Collective.

        Raises:
            ConfigError: a module mixes micro-batches, or hosts compute other bits.
        """
        refuse_mixing(run.model)
        self.arithmetic.require_same(trainer.session, f"{self.topic}/arithmetic")
        digest = rehearse(trainer, run, self.arithmetic.seed)
        what = "the same gradients of the same micro-batch"
        require_same(trainer.session, f"{self.topic}/rehearsal", digest, what)

    def begin_step(self, step: int) -> None:
        """Give what is drawn before the passes of a step its own random numbers.

        Args:
            step: how many steps were made before.
        """
        self._seed(step, self._leaves)

    def make(self, trainer: Trainer, run: Run, batches: Iterator[Any]) -> None:
        """Make the gradients of a step, the same on every rank. Collective.

        Raises:
            ConfigError: a forward pass has changed a buffer or a parameter.
        """
        step, mine = trainer.state.global_step, self.updates.reducer.leaves
        trainer.current_gradient_accumulation_steps = 1
        pulse = trainer.session.pulse
        with pulse.during(Phase.LOADING):
            samples, count = trainer.get_batch_samples(batches, len(mine), trainer.session.device)
        samples, counted = iter(samples), () if count is None else (count,)
        for leaf in mine:
            with pulse.during(Phase.LOADING):
                inputs = next(samples)
            before = Unchanged.of(run.model)
            self._seed(step, leaf)
            loss = trainer.training_step(run.model, inputs, *counted)
            before.require_same(run.model)
            self.updates.reducer.take(leaf, loss)
            if run.counter.is_on:
                run.counter.add(inputs)
            if leaf + 1 < mine.stop:
                trainer.callback_handler.fire("on_substep_end")
        pulse.need_others()
        run.add_loss(torch.tensor(self.updates.finish(), dtype=torch.float64))
        run.cursor.advance(run.deal)
        seed_between_steps(self.arithmetic.seed, step, self._leaves)

    @property
    def _leaves(self) -> int:
        return self.updates.reducer.plan.leaves

    def _seed(self, step: int, place: int) -> None:
        seed_worker((self.arithmetic.seed, step, place))


def passes_for(hooks: TrainerHooks, topic: str) -> LeafPasses | None:
    """Return what makes the passes of a step; None unless gradients are joined canonically.

    Args:
        hooks: their ``precision`` makes the steps of a model that is bound.
        topic: names this training on the board.
    """
    if not is_canonical(hooks.args):
        return None
    updates: Any = hooks.precision
    return LeafPasses(updates, Arithmetic(hooks.args.seed), topic)
