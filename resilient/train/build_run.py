"""Construction of a training run's objects, restore of their state, and default callbacks.

All objects are created before any state is loaded.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from resilient.distributed.rank_group import exit_barrier
from resilient.errors import ConfigError
from resilient.format.keys import MANIFEST
from resilient.redaction import shell_quote
from resilient.start_guard import TRAINER, StartGuard
from resilient.state_dict.rng_state import RandomState
from resilient.state_dict.snapshot import Part
from resilient.storage.open import local_reference
from resilient.strategies.gradient_compression import PARTS
from resilient.strategies.pipeline import RANDOM
from resilient.train import schedules, step_count
from resilient.train.arguments.derived import is_canonical
from resilient.train.auto_batch_size import batch_size_search_for
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
from resilient.train.hf_interop.importer import (
    SourceGone,
    import_hf_run,
    is_source_gone,
    require_origin,
)
from resilient.train.hf_interop.saved_models import saved_models
from resilient.train.loss_guard import LossGuard, loss_guard_for
from resilient.train.meters import Meters, TokenCount, UsageCounter
from resilient.train.model.artifacts import SIDECAR_FILES, saved_processing, sidecar_parts
from resilient.train.model.precision import Precision
from resilient.train.model.transforms import compile_in_place
from resilient.train.run import CheckpointInfoBuilder, TrainingRun, pipeline_for
from resilient.train.sample_ledger import Ledger
from resilient.train.saver import BestCheckpoint, CheckpointSaver
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

# Names of the trainer's parts, in loading order.
RESERVED = (
    *("model", "optimizer", "scheduler", "scaler"),
    *PARTS,
    RANDOM,
    REDUCTION,
    *(
        "trainer_state",
        "data",
        "callbacks",
        "meters",
        "losses",
        "best",
        "rng_state",
        *SIDECAR_FILES,
    ),
)


def build_run(
    hooks: TrainerHooks,
    state: TrainerState,
    callbacks: CallbackHandler,
    registered: Mapping[str, Part],
) -> TrainingRun:
    """Return a run at step 0. Collective.

    Raises:
        ConfigError: The arguments do not fit the model or the data.
    """
    args, session = hooks.args, hooks.session
    session.rank_group.begin_training()
    cursor, layout = _place_in_data(hooks)
    topic, strategy = session.next_topic(), _wrap(hooks)
    gate = session.stop_gate(topic)
    checkpointer = session.checkpointer(session.emit, topic, gate)
    state.max_steps = step_count.planned_steps(args, layout, cursor, done=0)
    optimizer, scheduler = hooks.make_optimizer_and_scheduler(state.max_steps)
    schedules.require_evaluations(args, scheduler, hooks.eval_sets)
    bound = strategy.bind(hooks.model_wrapped, optimizer, Precision(args, session.device))
    hooks.precision = bound.updates
    meters, loss_guard = _meters_for(hooks)
    best, canonical_passes = BestCheckpoint(), passes_for(hooks, topic)
    parts = {
        **bound.parts,
        **_per_step_parts(bound.updates, scheduler),
        "trainer_state": Part(state, document="trainer_state.json", rows="log_history"),
        "data": Part(cursor),
        "callbacks": Part(callbacks),
        **_measurement_parts(meters, loss_guard, best, canonical_passes),
        **sidecar_parts(hooks.model, saved_processing(hooks.processing_class, hooks.data_collator)),
        **registered,
        # Last, so that loading another part cannot draw from the restored streams.
        "rng_state": Part(RandomState(), scope="rank"),
    }
    return TrainingRun(
        strategy=strategy,
        model=bound.model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=_loader_of(hooks),
        cursor=cursor,
        layout=layout,
        meters=meters,
        counter=_counter_for(hooks, state),
        saver=_saver_for(hooks, state, checkpointer, parts, best),
        gate=gate,
        accumulation=args.gradient_accumulation_steps,
        scheduled_steps=state.max_steps,
        loss_guard=loss_guard,
        exit_barrier=partial(exit_barrier, session.rank_group, topic),
        batch_size_search=batch_size_search_for(args, strategy, bound.model, session),
        pipeline=pipeline_for(hooks),
        canonical_passes=canonical_passes,
        until_step=session.rank_group.launch.until_step,
    )


def _saver_for(
    hooks: TrainerHooks,
    state: TrainerState,
    into: CheckpointEngine,
    parts: dict[str, Part],
    best: BestCheckpoint,
) -> CheckpointSaver:
    """Return the saver of the parts. Collective."""
    session, sampler, strategy = hooks.session, hooks.train_sampler, hooks.strategy
    assert sampler is not None and strategy is not None  # noqa: S101, PT018 - for mypy
    saver = CheckpointSaver(
        into,
        parts,
        describe_checkpoint=CheckpointInfoBuilder(
            hooks.args, sampler, strategy.name
        ).checkpoint_info,
        best=best,
        state=state,
        args=hooks.args,
        session=session,
        ledger=_ledger_for(hooks),
    )
    saver.reserved = RESERVED
    return saver


def _wrap(hooks: TrainerHooks) -> Strategy:
    """Wrap the model for training and return its parallel strategy. Collective."""
    args, session = hooks.args, hooks.session
    hooks.require_counting()
    hooks.strategy = strategy_for(args, session.device, session.world.size, hooks.model)
    compile_in_place(args, hooks.model)
    hooks.model_wrapped = hooks._wrap_model(hooks.model)  # noqa: SLF001 - the field's name
    return hooks.strategy


def _place_in_data(hooks: TrainerHooks) -> tuple[DataCursor, BatchLayout]:
    """Return the start position and the layout of the data, and set the trainer's sampler."""
    hooks.require_eval_data()
    world = hooks.session.data_world
    if is_stream(hooks.train_dataset):
        place = place_in_stream(hooks.args, world)
        hooks.train_sampler = ResumableSampler(*place, world.rank)
        return place
    size = require_map_style(hooks.train_dataset, "train_dataset")
    layout = make_batch_layout(hooks.args, micro_batch_owners(hooks.args, world), size)
    group = layout.batch * hooks.args.gradient_accumulation_steps
    origin = {"trainer": "transformers"} if hooks.args.random_numbers == "transformers" else None
    cursor = DataCursor(size, hooks.args.order_seed, group=group, origin=origin)
    sampling = hooks.train_sampling()
    if isinstance(sampling, LengthGrouped):
        cursor.streams = HFRandomStreams(hooks.args.seed, is_known=hooks.model_init is None)
    hooks.train_sampler = sampler_for(hooks.args, world, cursor, layout, sampling)
    return cursor, layout


def _loader_of(hooks: TrainerHooks) -> Any:
    """Return the train loader at the run's position; report it if the loader was rebuilt.

    Raises:
        ConfigError: An override returned a loader that cannot begin at the run's position.
    """
    train_loader, sampler = hooks.get_train_dataloader(), hooks.train_sampler
    assert sampler is not None, "a run has a data position"  # noqa: S101
    loader = resumable_loader(hooks.args, train_loader, sampler)
    if loader is not train_loader and hooks.session.world.is_coordinator:
        hooks.session.emit(LoaderRebuilt(sampler.sampling.name))
    return loader


def _counter_for(hooks: TrainerHooks, state: TrainerState) -> UsageCounter:
    """Return the counter of tokens, if requested, and of operations, if the model reports them."""
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
    """Return the meters and the guard of the losses.

    Raises:
        ConfigError: Rollback is requested, but the data or missing checkpoints prevent it.
    """
    args, session = hooks.args, hooks.session
    # With canonical reduction each rank knows the step's loss without the others.
    ranks = 1 if is_canonical(args) else session.world.size
    loss_guard = loss_guard_for(args, hooks.train_dataset, session.device, ranks)
    return Meters(session.device, ranks, filters=args.logging_nan_inf_filter), loss_guard


def _measurement_parts(
    meters: Meters,
    loss_guard: LossGuard,
    best: BestCheckpoint,
    canonical_passes: CanonicalPasses | None,
) -> dict[str, Part]:
    """Return the parts with measurements, which are equal on all ranks in a canonical step."""
    losses = {"losses": Part(loss_guard, optional=True)} if loss_guard.is_on else {}
    if canonical_passes is None:
        return {"meters": Part(meters, scope="rank"), **losses, "best": Part(best)}
    arithmetic_part = Part(canonical_passes.arithmetic, optional=True)
    return {
        "meters": Part(meters, optional=True),
        **losses,
        "best": Part(best),
        REDUCTION: arithmetic_part,
    }


def _ledger_for(hooks: TrainerHooks) -> Ledger:
    """Return a ledger that records the sample orders of this run."""
    session = hooks.session
    ledger = Ledger(is_kept=session.world.is_coordinator, ranks=session.data_world.size)
    if hooks.train_sampler is not None:
        hooks.train_sampler.on_order = ledger.see_order
    return ledger


def _per_step_parts(updates: OptimizerStepper, scheduler: LRScheduler) -> dict[str, Part]:
    """Return the parts that advance with each step."""
    scaler = updates.scaler
    return {
        "scheduler": Part(ScheduleState(scheduler)),
        # Optional: after a switch to fp16, or in a Transformers run on a CPU, the checkpoint has no
        # scaler.
        **({"scaler": Part(cast("Stateful", scaler), optional=True)} if scaler else {}),
    }


def restore(
    run: TrainingRun,
    hooks: TrainerHooks,
    state: TrainerState,
    callbacks: CallbackHandler,
    *,
    resume_from: str | bool | None,
) -> None:
    """Load the last attempt's state, and plan the rest of the run. Collective."""
    session, registered = hooks.session, set(run.saver.parts) - set(RESERVED)
    registered_parts = {name: run.saver.parts[name] for name in registered}
    launch = session.rank_group.launch
    settled = run.saver.settle(
        _requested_checkpoint(session, reference=resume_from), is_first=launch.is_first
    )
    digest = import_hf_run(hooks, settled, registered_parts, session.next_topic())
    reference = "auto" if digest else _reference(session, settled)
    requires = resume_from is True and launch.cause == "start"

    def accept() -> None:
        require_origin(run.cursor.origin, digest, session.repository)

    guard = StartGuard(TRAINER, (session.args.output_dir,), requires, accept)
    resume_result = run.saver.resume(reference, launch.cause, guard)
    if is_source_gone(digest) and session.world.is_coordinator:
        run.saver.emit(SourceGone(settled))
    run.saver.ledger.begin(resume_result, state.global_step, run.cursor)
    per_device_batch = hooks.args.per_device_train_batch_size
    if (
        run.batch_size_search
        and resume_result
        and resume_result.config.get("per_device_train_batch_size") == per_device_batch
    ):
        # The last attempt's batch size fits into memory again, and gives the same bits.
        set_batch_size(run, hooks, state.train_batch_size)
    callbacks.context["saved_models"] = saved_models(session, run.saver)
    if callbacks.missing_names and session.world.is_coordinator:
        run.saver.emit(CallbacksGone(callbacks.missing_names))
    had_no_step_left = state.global_step >= state.max_steps
    recompute_schedule(run, hooks, state, callbacks, keeps_plan=True)
    # A run that reached its last step continues if it now has more steps. A run that a callback
    # ended stays ended.
    if had_no_step_left and state.global_step < state.max_steps:
        callbacks.control.should_training_stop = False


def set_batch_size(run: TrainingRun, hooks: TrainerHooks, batch: int) -> None:
    """Cut the rest of the data into micro-batches of ``batch`` samples."""
    run.layout = replace(run.layout, batch=batch)
    if hooks.train_sampler is not None:
        hooks.train_sampler.layout = run.layout


def cut_batches(
    run: TrainingRun,
    hooks: TrainerHooks,
    state: TrainerState,
    callbacks: CallbackHandler,
    batch: int,
) -> None:
    """Continue with smaller micro-batches, and plan the rest of the run for them."""
    set_batch_size(run, hooks, batch)
    recompute_schedule(run, hooks, state, callbacks)


def recompute_schedule(
    run: TrainingRun,
    hooks: TrainerHooks,
    state: TrainerState,
    callbacks: CallbackHandler,
    *,
    keeps_plan: bool = False,
) -> None:
    """Plan the rest of the run from its position, and adapt our own schedule to its length.

    Args:
        run: The restored run.
        hooks: Trainer, which can create a schedule of another length.
        state: Receives the length of the run.
        callbacks: Receive the trained objects.
        keeps_plan: Keep the checkpoint's plan if none of its inputs changed. A new plan would
            move the steps of an epoch that a callback cut short to a later epoch.
    """
    cursor = run.cursor
    if not (keeps_plan and step_count.is_current(cursor.planned, hooks.args, run.layout)):
        is_cut = cursor.is_open and callbacks.control.should_epoch_stop
        place = replace(cursor, epoch=cursor.epoch + 1, samples=0) if is_cut else cursor
        cursor.planned = step_count.planned_run(hooks.args, run.layout, place, state.global_step)
    assert cursor.planned is not None  # noqa: S101 - for mypy
    planned_steps, epochs = cursor.planned["steps"], cursor.planned["epochs"]
    # The saved schedule's length, and that of the schedule made for this attempt's arguments.
    if {planned_steps} != {state.max_steps, run.scheduled_steps} and hooks.makes_scheduler:
        old_scheduler, hooks.lr_scheduler = run.scheduler, None
        run.scheduler = hooks.create_scheduler(planned_steps, run.optimizer)
        schedules.continue_schedule(old_scheduler, run.scheduler, run.optimizer)
        run.saver.parts["scheduler"] = Part(ScheduleState(run.scheduler))
    callbacks.context |= {
        "optimizer": run.optimizer,
        "lr_scheduler": run.scheduler,
        "train_dataloader": run.loader,
        "emit": run.saver.emit,
        "save_timings": run.saver.timings,
    }
    run.scheduled_steps = planned_steps
    state.init_training_references(hooks, planned_steps, epochs, getattr(hooks, "trial", None))
    state.train_batch_size = run.layout.batch
    state.compute_steps(hooks.args, planned_steps)


class NewestCheckpoint(str):
    """Path of the newest checkpoint that a script looked up; a resume chooses the newest itself."""

    __slots__ = ()


def _requested_checkpoint(session: Session, *, reference: str | bool | None) -> str:
    """Return the checkpoint that the user requested; the script overrides the launcher.

    A path to the repository leaves the choice to the launcher, as None and True do.
    """
    launched = local_reference(session.rank_group.launch.resume)
    if reference is None or isinstance(reference, bool | NewestCheckpoint):
        return "never" if reference is False else launched
    path = local_reference(os.fspath(reference))
    return launched if place_of(path) == place_of(session.repository) else path


def _reference(session: Session, settled: str) -> str:
    """Return the checkpoint of the repository that the settled reference names.

    Raises:
        ConfigError: The script named a path outside of the repository.
    """
    if settled in ("auto", "never", local_reference(session.rank_group.launch.resume)):
        return settled
    return _name_at(settled, session.repository)


def _name_at(path: str, repository: str) -> str:
    """Return the checkpoint name in ``path``, or a bare name unchanged.

    Raises:
        ConfigError: The path is outside of the repository, so it names a checkpoint of another run.
        IntegrityError: The path is a damaged checkpoint of another tool.
        IncompatibleCheckpoint: The path is a checkpoint of a tool whose checkpoints are not
            imported.
        UnknownLayout: The path exists, and no known tool wrote it.
    """
    folder, slash, name = path.rstrip("/").rpartition("/")
    if slash and place_of(folder or "/") != place_of(repository):
        if Path(path).exists() and not Path(path, MANIFEST).exists():
            from resilient.diff.verification import require_trainer_folder

            require_trainer_folder(path, strict=False)
        is_there = os.path.lexists(path)
        continue_hint = "" if is_there else "to continue its run: omit `resume_from_checkpoint`; "
        raise ConfigError(
            f"cannot resume from `{path}`: it is not in the repository `{repository}`; name a "
            f"checkpoint of that repository, or set `repo` of TrainingArguments to `{folder}`",
            hint=f"{continue_hint}resilient ckpt ls {shell_quote(repository)}",
        )
    return name


def default_callbacks(
    args: TrainingArguments, more: Iterable[TrainerCallback | type[TrainerCallback]]
) -> list[TrainerCallback | type[TrainerCallback]]:
    """Return the built-in callbacks around those of the user, in Transformers' order."""
    wants_bar = not args.disable_tqdm if args.disable_tqdm is not None else sys.stderr.isatty()
    return [
        DefaultFlowCallback,
        *_trackers(args),
        *more,
        *([EmptyCacheCallback] if args.torch_empty_cache_steps else []),
        *([ProgressCallback] if wants_bar else []),
    ]


def _trackers(args: TrainingArguments) -> list[TrainerCallback]:
    """Return the tracker callback, imported only if trackers are used."""
    if not args.report_to:
        return []
    from resilient.train.trackers.reporting import ReportTo

    return [ReportTo(list(args.report_to))]
