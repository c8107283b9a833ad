"""A little run on several hosts, each with a near tier of its own; ranks are threads."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Barrier, BrokenBarrierError
from typing import TYPE_CHECKING

from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.checkpoint_engine import CheckpointEngine
from resilient.errors import PeerFailed, ResilientError
from resilient.state_dict.snapshot import Part
from resilient.testing.fault_store import Crash
from resilient.testing.memory_store import MemoryStore, run_ranks
from tests.crash.lives import Folded
from tests.helpers.tiered import desk_over

if TYPE_CHECKING:
    from resilient.format.keys import CheckpointId

STEPS = 4


@dataclass
class Run:
    """What one life on all hosts did.

    Attributes:
        finals: how each rank's state ended; empty for a rank that did not get there.
        started_at: the step that each rank went on from.
        acknowledged: what a save returned for and waited, at the coordinator.
        died: whether a crash ended it.
        error: the first error that is not another rank's.
        told: events, with the rank that told them.
    """

    finals: list[list[int]] = field(default_factory=list)
    started_at: dict[int, int] = field(default_factory=dict)
    acknowledged: list[CheckpointId] = field(default_factory=list)
    died: bool = False
    error: BaseException | None = None
    told: list = field(default_factory=list)

    def said(self, kind) -> list:
        """Return the events of one kind, each rank's."""
        return [event for event in self.told if isinstance(event, kind)]


def host(name) -> MemoryStore:
    """Return the disk of a host; like real ones they all have the same path."""
    del name
    return MemoryStore("test://near")


def live(  # noqa: PLR0913 - what tests vary
    nears, durable, until=STEPS, durable_every=2, *, attempt="0", is_cut=False, tiering=None
) -> Run:
    """Resume, train to ``until`` saving every step, and end; one rank for each of ``nears``.

    Args:
        nears: of each rank the near repository of its host; ranks of one host have the same.
        durable: the durable repository; a list has one view of it for each rank.
        until: the last step.
        durable_every: how many saves to one promotion.
        attempt: names the life.
        is_cut: end as if all processes were killed once every host has seen to the last save,
            and what was due is durable.
        tiering: in place of ``durable_every``.
    """
    run = Run()
    together = Barrier(len(nears))

    def rank_main(world, kv_store):
        view = durable[world.rank] if isinstance(durable, list) else durable
        context = desk_over(
            nears[world.rank],
            view,
            durable_every,
            kv_store=kv_store,
            world=world,
            scope=attempt,
            tiering=tiering,
            on_event=lambda _, event: run.told.append(event),
        )
        try:
            checkpointer = CheckpointEngine(context)
            return _train(checkpointer, world, until, run, kv_store, together if is_cut else None)
        except (Crash, ResilientError) as error:
            run.died = run.died or isinstance(error, Crash)
            if run.error is None or isinstance(run.error, PeerFailed):
                run.error = error
            return []

    run.finals = run_ranks(len(nears), rank_main)
    return run


def _train(checkpointer, world, until, run, kv_store, cut_at) -> list[int]:
    state, rank_state = Folded(0, is_large=True), Folded(world.rank)
    parts = {"model": Part(state), "rng_state": Part(rank_state, "rank")}
    try:
        result = checkpointer.resume(parts)
        run.started_at[world.rank] = result.step if result else 0
        while state.steps < until:
            state.step()
            rank_state.step()
            checkpoint = checkpointer.save(state.steps, parts, CheckpointInfo())
            checkpointer.wait()
            if world.is_coordinator:
                run.acknowledged.append(checkpoint)
            if cut_at:
                _wait_for_promotion(checkpointer, cut_at)
        if not cut_at:
            checkpointer.wait(in_every_tier=True)
    except (Crash, ResilientError):
        # Before anything waits for a thread that waits for the others.
        if cut_at:
            cut_at.abort()
        kv_store.fail(PeerFailed("a rank died"))
        raise
    finally:
        checkpointer._overlap.close()
        checkpointer._persister.close()
        checkpointer._context.close()
    return [*state.ending(), *rank_state.ending()]


def _wait_for_promotion(checkpointer, cut_at) -> None:
    """Wait until no host has anything on its way; what else there is stays as the save left it."""
    while checkpointer._context.promoter.is_busy:
        time.sleep(0.001)
    with suppress(BrokenBarrierError):
        cut_at.wait(60)
