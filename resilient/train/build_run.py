"""Build and restore a run.

Put a run together, then restore it: everything exists before anything is loaded.

Which callbacks a trainer has before anybody gives it one.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from resilient.distributed.rank_group import exit_barrier
from resilient.errors import ConfigError
from resilient.redaction import shell_quote
from resilient.start_guard import TRAINER, StartGuard
from resilient.state_dict.rng_state import RandomState
from resilient.state_dict.snapshot import Part
from resilient.strategies.gradient_compression import PARTS
from resilient.strategies.pipeline.registry import RANDOM
from resilient.train import schedules, step_count
from resilient.train.arguments.derived import is_canonical
from resilient.train.auto_batch_size import fitting_for
from resilient.train.callbacks.base import DefaultFlowCallback
from resilient.train.callbacks.builtin import EmptyCacheCallback, ProgressCallback
from resilient.train.canonical_reduction import (
    REDUCTION,
    micro_batch_owners,
    passes_for,
    sampler_for,
)
from resilient.train.data.custom_loader import LoaderRebuilt, resumable_loader
from resilient.train.data.ordering import HFRandomStreams, LengthGrouped
from resilient.train.data.sampler import (
    DataCursor,
    ResumableSampler,
    make_batch_layout,
    require_map_style,
)
from resilient.train.data.streaming import is_stream, place_in_stream
from resilient.train.events import CallbacksGone
from resilient.train.hf_interop.importer import import_hf_run, require_origin
from resilient.train.hf_interop.saved_models import saved_models
from resilient.train.ledger import Ledger
from resilient.train.loss_guard import LossGuard, watch_for
from resilient.train.meters import Meters, TokenCount, UsageCounter
from resilient.train.model.artifacts import PAPERS, saved_processing, sidecar_parts
from resilient.train.model.precision import Precision
from resilient.train.model.transforms import compile_in_place
from resilient.train.run import CheckpointInfoBuilder, TrainingRun, pipeline_for
from resilient.train.saver import BestCheckpoint, HoldingSaver
from resilient.train.schedules.factory import ScheduleState
from resilient.train.session import place_of
from resilient.train.strategy_selection import strategy_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.optim.lr_scheduler import LRScheduler

    from resilient.checkpoint_engine import CheckpointEngine
    from resilient.state_dict.snapshot import Stateful
    from resilient.strategies.base import OptimizerStepper, Strategy
    from resilient.train.arguments import TrainingArguments
    from resilient.train.callbacks.base import CallbackHandler, TrainerCallback
    from resilient.train.canonical_reduction import CanonicalPasses
    from resilient.train.data.sampler import BatchLayout
    from resilient.train.session import Session
    from resilient.train.state import TrainerState
    from resilient.train.trainer_hooks import TrainerHooks

# The parts of ours, in the order in which they are loaded.
RESERVED = (
    *("model", "optimizer", "scheduler", "scaler"),
    *PARTS,
    RANDOM,
    REDUCTION,
    *("trainer_state", "data", "callbacks", "meters", "losses", "best", "rng_state", *PAPERS),
)


def build_run(
    hooks: TrainerHooks,
    state: TrainerState,
    callbacks: CallbackHandler,
    registered: Mapping[str, Part],
) -> TrainingRun:
    """Return a run at its very beginning. Collective.

    Raises:
        ConfigError: the arguments do not fit the model or the data.
    """
    args, session = hooks.args, hooks.session
    session.gang.begin_training()
    cursor, deal = _place_in_data(hooks)
    topic, strategy = session.next_topic(), _wrap(hooks)
    gate = session.stop_gate(topic)
    into = session.checkpointer(session.emit, topic, gate)
    state.max_steps = step_count.planned_steps(args, deal, cursor, done=0)
    optimizer, scheduler = hooks.make_optimizer_and_scheduler(state.max_steps)
    schedules.require_evaluations(args, scheduler, hooks.eval_sets)
    bound = strategy.bind(hooks.model_wrapped, optimizer, Precision(args, session.device))
    hooks.precision = bound.updates
    (meters, watch), best, leaves = _meters_for(hooks), BestCheckpoint(), passes_for(hooks, topic)
    parts = {
        **bound.parts,
        **_stepping(bound.updates, scheduler),
        "trainer_state": Part(state, document="trainer_state.json", rows="log_history"),
        "data": Part(cursor),
        "callbacks": Part(callbacks),
        **_measured(meters, watch, best, leaves),
        **sidecar_parts(hooks.model, saved_processing(hooks.processing_class, hooks.data_collator)),
        **registered,
        # Last, so that nothing that is loaded can draw from the restored streams.
        "rng_state": Part(RandomState(), scope="rank"),
    }
    return TrainingRun(
        strategy=strategy,
        model=bound.model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=_loader_of(hooks),
        cursor=cursor,
        deal=deal,
        meters=meters,
        counter=_counter_for(hooks, state),
        saver=_saver_for(hooks, state, into, parts, best),
        gate=gate,
        accumulation=args.gradient_accumulation_steps,
        scheduled_steps=state.max_steps,
        watch=watch,
        farewell=partial(exit_barrier, session.gang, topic),
        fitting=fitting_for(args, strategy, bound.model, session),
        pipeline=pipeline_for(hooks),
        leaves=leaves,
        until_step=session.gang.launch.until_step,
    )


def _saver_for(
    hooks: TrainerHooks,
    state: TrainerState,
    into: CheckpointEngine,
    parts: dict[str, Part],
    best: BestCheckpoint,
) -> HoldingSaver:
    """Return what saves the parts. Collective."""
    session, sampler, strategy = hooks.session, hooks.train_sampler, hooks.strategy
    assert sampler is not None and strategy is not None  # noqa: S101, PT018 - for mypy
    teller = CheckpointInfoBuilder(strategy.name)
    saver = HoldingSaver(
        into,
        parts,
        about=lambda: teller.about(hooks.args, sampler.cursor, deal_of(hooks)),
        best=best,
        state=state,
        args=hooks.args,
        session=session,
        ledger=_ledger_for(hooks),
    )
    saver.reserved = RESERVED
    return saver


def _wrap(hooks: TrainerHooks) -> Strategy:
    """Make the model what is trained, and return how it is parallel. Collective."""
    args, session = hooks.args, hooks.session
    hooks.require_counting()
    hooks.strategy = strategy_for(args, session.device, session.world.size, hooks.model)
    compile_in_place(args, hooks.model)
    hooks.model_wrapped = hooks._wrap_model(hooks.model)  # noqa: SLF001 - the field's name
    return hooks.strategy


def _place_in_data(hooks: TrainerHooks) -> tuple[DataCursor, BatchLayout]:
    """Return the start of the data and how it is cut, and give the hooks a sampler on them."""
    hooks.require_eval_data()
    world = hooks.session.data_world
    if is_stream(hooks.train_dataset):
        place = place_in_stream(hooks.args, world)
        hooks.train_sampler = ResumableSampler(*place, world.rank)
        return place
    size = require_map_style(hooks.train_dataset, "train_dataset")
    deal = make_batch_layout(hooks.args, micro_batch_owners(hooks.args, world), size)
    group = deal.batch * hooks.args.gradient_accumulation_steps
    origin = {"trainer": "transformers"} if hooks.args.random_numbers == "transformers" else None
    cursor = DataCursor(size, hooks.args.order_seed, group=group, origin=origin)
    sampling = hooks.train_sampling()
    if isinstance(sampling, LengthGrouped):
        cursor.streams = HFRandomStreams(hooks.args.seed, is_known=hooks.model_init is None)
    hooks.train_sampler = sampler_for(hooks.args, world, cursor, deal, sampling)
    return cursor, deal


def _loader_of(hooks: TrainerHooks) -> Any:
    """Return the train loader, at the position of the run; tell it if ours is not what was made.

    Raises:
        ConfigError: an override made one that has no such position.
    """
    made, sampler = hooks.get_train_dataloader(), hooks.train_sampler
    assert sampler is not None, "a run has a place in its data"  # noqa: S101
    loader = resumable_loader(hooks.args, made, sampler)
    if loader is not made and hooks.session.world.is_coordinator:
        hooks.session.emit(LoaderRebuilt(sampler.sampling.name))
    return loader


def _counter_for(hooks: TrainerHooks, state: TrainerState) -> UsageCounter:
    """Return what counts for a trainer: tokens if it is told to, operations if it can."""
    args, session = hooks.args, hooks.session
    tokens_of = None
    if args.include_num_input_tokens_seen != "no":
        padding = getattr(getattr(hooks, "processing_class", None), "pad_token_id", None)
        skips = args.include_num_input_tokens_seen == "non_padding"
        tokens_of = TokenCount(hooks.model, padding, session.emit, skips_padding=skips)
    flos_of = hooks.floating_point_ops if hooks.knows_flos else None
    ranks = session.world.size
    copies = ranks // session.data_world.size
    return UsageCounter(state, session.device, ranks, copies, tokens_of, flos_of)


def _meters_for(hooks: TrainerHooks) -> tuple[Meters, LossGuard]:
    """Return what measures the losses, and what judges them.

    Raises:
        ConfigError: training is to go back, and in this data or without checkpoints it cannot.
    """
    args, session = hooks.args, hooks.session
    # What a step's loss is with canonical reduction, each rank knows without the others.
    ranks = 1 if is_canonical(args) else session.world.size
    watch = watch_for(args, hooks.train_dataset, session.device, ranks)
    return Meters(session.device, ranks, filters=args.logging_nan_inf_filter), watch


def _measured(
    meters: Meters, watch: LossGuard, best: BestCheckpoint, leaves: CanonicalPasses | None
) -> dict[str, Part]:
    """Return the parts of what was measured; of a canonical step all ranks know the same."""
    losses = {"losses": Part(watch, optional=True)} if watch.is_on else {}
    if leaves is None:
        return {"meters": Part(meters, scope="rank"), **losses, "best": Part(best)}
    begun = Part(leaves.arithmetic, optional=True)
    return {"meters": Part(meters, optional=True), **losses, "best": Part(best), REDUCTION: begun}


def _ledger_for(hooks: TrainerHooks) -> Ledger:
    """Return a ledger that hears of the orders that this run's samples come in."""
    session = hooks.session
    ledger = Ledger(is_kept=session.world.is_coordinator, ranks=session.data_world.size)
    if hooks.train_sampler is not None:
        hooks.train_sampler.on_order = ledger.see_order
    return ledger


def deal_of(hooks: TrainerHooks) -> BatchLayout:
    """Return how the data is cut now, which may change in the middle of a run."""
    assert hooks.train_sampler is not None, "a run has a place in its data"  # noqa: S101
    return hooks.train_sampler.deal


def _stepping(updates: OptimizerStepper, scheduler: LRScheduler) -> dict[str, Part]:
    """Return the parts that count with each step."""
    scaler = updates.scaler
    return {
        "scheduler": Part(ScheduleState(scheduler)),
        # A run that goes over to fp16 has none, nor has Transformers on a CPU: it begins anew.
        **({"scaler": Part(cast("Stateful", scaler), optional=True)} if scaler else {}),
    }


def restore(
    run: TrainingRun,
    hooks: TrainerHooks,
    state: TrainerState,
    callbacks: CallbackHandler,
    *,
    wanted: str | bool | None,
) -> None:
    """Load where the last life got to, and plan the rest of the run from there. Collective."""
    session, registered = hooks.session, set(run.saver.parts) - set(RESERVED)
    more = {name: run.saver.parts[name] for name in registered}
    launch = session.gang.launch
    settled = run.saver.settle(_wish(session, wanted=wanted), is_first=launch.is_first)
    digest = import_hf_run(hooks, settled, more, session.next_topic())
    reference = "auto" if digest else _reference(session, settled)
    requires = wanted is True and launch.cause == "start"
    guard = StartGuard(TRAINER, (session.args.output_dir,), requires_checkpoint=requires)
    resumed = run.saver.resume(reference, launch.cause, guard)
    run.ledger.begin(resumed, state.global_step, run.cursor)
    require_origin(run.cursor.origin, digest, session.repository)
    asked = hooks.args.per_device_train_batch_size
    if run.fitting and resumed and resumed.config.get("per_device_train_batch_size") == asked:
        # What fitted in the last life fits in this one, and makes the same bits.
        set_batch(run, hooks, state.train_batch_size)
    callbacks.context["shelf"] = saved_models(session, run.saver)
    if callbacks.gone and session.world.is_coordinator:
        run.saver.emit(CallbacksGone(callbacks.gone))
    had_no_step_left = state.global_step >= state.max_steps
    recompute_schedule(run, hooks, state, callbacks, keeps_plan=True)
    # A run that had no step left is not finished when it is given more; one that a callback
    # ended stays ended.
    if had_no_step_left and state.global_step < state.max_steps:
        callbacks.control.should_training_stop = False


def set_batch(run: TrainingRun, hooks: TrainerHooks, batch: int) -> None:
    """Cut what is left of the data into micro-batches of ``batch`` samples."""
    run.deal = replace(run.deal, batch=batch)
    if hooks.train_sampler is not None:
        hooks.train_sampler.deal = run.deal


def cut_batches(
    run: TrainingRun,
    hooks: TrainerHooks,
    state: TrainerState,
    callbacks: CallbackHandler,
    batch: int,
) -> None:
    """Go on with smaller micro-batches, and plan the rest of the run for them."""
    set_batch(run, hooks, batch)
    recompute_schedule(run, hooks, state, callbacks)


def recompute_schedule(
    run: TrainingRun,
    hooks: TrainerHooks,
    state: TrainerState,
    callbacks: CallbackHandler,
    *,
    keeps_plan: bool = False,
) -> None:
    """Plan the rest of the run from where it is; a schedule of ours goes on over its new length.

    Args:
        run: restored.
        hooks: makes a schedule of another length.
        state: gets the length of the run.
        callbacks: are given what is trained.
        keeps_plan: whether the plan of the checkpoint stays if nothing that it follows from
            changed. A plan that is made again would give the steps of an epoch that a callback
            cut short to a later one.
    """
    cursor = run.cursor
    if not (keeps_plan and step_count.is_current(cursor.planned, hooks.args, run.deal)):
        is_cut = cursor.is_open and callbacks.control.should_epoch_stop
        place = replace(cursor, epoch=cursor.epoch + 1, samples=0) if is_cut else cursor
        cursor.planned = step_count.planned_run(hooks.args, run.deal, place, state.global_step)
    assert cursor.planned is not None  # noqa: S101 - for mypy
    planned, epochs = cursor.planned["steps"], cursor.planned["epochs"]
    # The schedule that was saved, and the one that was made for this life's arguments.
    if {planned} != {state.max_steps, run.scheduled_steps} and hooks.makes_scheduler:
        old, hooks.lr_scheduler = run.scheduler, None
        run.scheduler = hooks.create_scheduler(planned, run.optimizer)
        schedules.carry_over(old, run.scheduler, run.optimizer)
        run.saver.parts["scheduler"] = Part(ScheduleState(run.scheduler))
    callbacks.context |= {
        "optimizer": run.optimizer,
        "lr_scheduler": run.scheduler,
        "train_dataloader": run.loader,
        "emit": run.saver.emit,
        "took": run.saver.took,
    }
    run.scheduled_steps = planned
    state.init_training_references(hooks, planned, epochs, getattr(hooks, "trial", None))
    state.train_batch_size = run.deal.batch
    state.compute_steps(hooks.args, planned)


def _wish(session: Session, *, wanted: str | bool | None) -> str:
    """Return how the user wants to resume; the word of the script goes before the launcher's.

    A path to the repository leaves the choice to the launcher, as None and True do.
    """
    launch = session.gang.launch
    if wanted is None or isinstance(wanted, bool):
        return "never" if wanted is False else launch.resume
    path = os.fspath(wanted)
    return launch.resume if place_of(path) == place_of(session.repository) else path


def _reference(session: Session, settled: str) -> str:
    """Return which checkpoint of the repository the settled reference names.

    Raises:
        ConfigError: The script named a path that leads elsewhere.
    """
    if settled in ("auto", "never", session.gang.launch.resume):
        return settled
    return _name_at(settled, session.repository)


def _name_at(path: str, repository: str) -> str:
    """Return the checkpoint's name in ``path``, or in a bare name.

    Raises:
        ConfigError: the path leads elsewhere, where a checkpoint of that name is another one.
    """
    folder, slash, name = path.rstrip("/").rpartition("/")
    if slash and place_of(folder or "/") != place_of(repository):
        raise ConfigError(
            f"cannot resume from `{path}`: it is not in the repository `{repository}`; name a "
            f"checkpoint of that, or set `repo` of TrainingArguments to `{folder}`",
            hint=f"resilient ckpt ls {shell_quote(repository)}",
        )
    return name


def default_callbacks(
    args: TrainingArguments, more: Iterable[TrainerCallback | type[TrainerCallback]]
) -> list[TrainerCallback | type[TrainerCallback]]:
    """Return the built-in callbacks around those of the user, in the field's order."""
    wants_bar = not args.disable_tqdm if args.disable_tqdm is not None else sys.stderr.isatty()
    return [
        DefaultFlowCallback,
        *_trackers(args),
        *more,
        *([EmptyCacheCallback] if args.torch_empty_cache_steps else []),
        *([ProgressCallback] if wants_bar else []),
    ]


def _trackers(args: TrainingArguments) -> list[TrainerCallback]:
    """Return what reports to trackers, which nobody pays for who has none."""
    if not args.report_to:
        return []
    from resilient.train.trackers.reporting import ReportTo

    return [ReportTo(list(args.report_to))]
