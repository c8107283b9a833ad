"""Checkpoint engine: resume, save, wait, and a thread that copies state during training.

Steps of a save, without and with a copy of the state in the background::

    capture -> stage -> | write -> agree -> commit -> delete   (saver daemon, or a thread)
    training waits      | training continues

    capture -> copy what a forward pass changes -> | copy the rest -> | write -> ...
    training waits                                 | forward, backward, before_update(), step

``capture`` collects the tensors, and ``stage`` copies them to host memory. Save and resume use one
agreement protocol (:mod:`resilient.distributed.coordination`). Every rank posts a value or a
failure. The coordinator (rank 0) decides, and every rank follows the decision. The protocol never
uses the collective backend, such as NCCL. Only the engine keeps track of the save in flight.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from resilient import events
from resilient.checkpoint import catalog
from resilient.checkpoint.daemon.factory import make_save_executor
from resilient.checkpoint.near_tier_discovery import discover_near_tiers
from resilient.checkpoint.restore.read import VerifiedCheckpoint, read_wanted
from resilient.checkpoint.resume_policy import (
    Claimant,
    newest_of_run,
    refuse_live_writer,
    resolve_resume_option,
)
from resilient.checkpoint.resume_selection import (
    ResumeChoice,
    ResumeResult,
    resolve_collectively,
    select_resume_checkpoint,
)
from resilient.checkpoint.save.dedup import DedupBase, make_dedup_base
from resilient.checkpoint.save.metadata import CheckpointInfo, SavedSteps, draft_manifest
from resilient.checkpoint.save.persist import SaveJob
from resilient.checkpoint.start_generation import start_generation
from resilient.checkpoint.writer_heartbeat import WriterHeartbeat
from resilient.clock import Stopwatch
from resilient.distributed.coordination import RankFailure, agree, capture_failure
from resilient.distributed.start_identity import StartIdentity
from resilient.errors import (
    ConfigError,
    Fenced,
    IncompatibleCheckpoint,
    NothingToResume,
    RepositoryNotFound,
    ResilientError,
    SaveFailed,
)
from resilient.format.keys import CheckpointId, whole_step
from resilient.format.partial_read import read_bytes
from resilient.processes import release_claim
from resilient.state_dict.changes import SETUP, ChangePolicy, ResumeCheck, setup_of
from resilient.state_dict.resharding import (
    LoadPlan,
    absent_parts,
    load,
    load_present_parts,
    stored_name,
)
from resilient.state_dict.round_trip import RoundTripCheck
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.staging import StagingBuffers, draft, stable_storages, stage

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Iterator, Mapping

    from resilient.checkpoint.context import CheckpointContext
    from resilient.checkpoint.generations import Generation
    from resilient.checkpoint.restore.read import ReadRequest
    from resilient.checkpoint.save.executor import SaveExecutor
    from resilient.distributed.coordination import ControlGroup
    from resilient.start_guard import StartGuard
    from resilient.state_dict.host_copy import DeferredCopies
    from resilient.state_dict.resharding import Examine
    from resilient.storage.store import Store


class BackgroundStaging:
    """One background task beside training, and the points where training waits for it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="resilient-stage")
        self._work: Future[Any] | None = None
        self._copies: DeferredCopies | None = None

    @property
    def is_idle(self) -> bool:
        """True if no work is pending."""
        return self._work is None or self._work.done()

    @property
    def is_copying(self) -> bool:
        """True if copies were started that ``settle`` has not collected yet."""
        return self._copies is not None

    def start(self, work: Callable[[], None]) -> None:
        """Run a task that only speeds up later saves; its errors are ignored."""
        self._work = self._thread.submit(capture_failure, work)

    def copy(
        self,
        copies: DeferredCopies,
        hand_over: Callable[[RankFailure | None], None],
        begin: threading.Event | None = None,
    ) -> None:
        """Make the copies in the background, then hand the result over.

        Args:
            copies: Copies to make.
            hand_over: Callback with None, or with the failure that makes the copies worthless.
            begin: Event to wait for before copying; ``wait`` does not wait for it.
        """
        self._copies = copies
        self._work = self._thread.submit(_copy, copies, hand_over, begin)

    def wait(self) -> None:
        """Help with the copy until all bytes are handed over, without its errors."""
        if self._copies is not None and self._work is not None:
            self._copies.make()
            self._work.exception()

    def settle(self) -> None:
        """Wait for the task and clear it.

        Raises:
            SaveFailed: The copy could not be handed over.
            ResilientError: The hand-over raised it.
        """
        self.wait()
        work, self._work, self._copies = self._work, None, None
        if work is None:
            return
        with raising_save_failed():
            work.result()

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown()


@contextmanager
def raising_save_failed() -> Iterator[None]:
    """Turn any error of a hand-over into ``SaveFailed``.

    Raises:
        SaveFailed: The body raised a ResilientError.
        Fenced: The body raised it.
        ConfigError: The body raised it.
    """
    try:
        yield
    except (SaveFailed, Fenced, ConfigError):
        raise
    except ResilientError as error:
        raise SaveFailed(
            f"the staged state could not be handed to the saver daemon: {error.message}; older "
            "checkpoints are intact",
            hint=error.hint or "fix the cause and run the same command again",
        ) from error


def _copy(
    copies: DeferredCopies,
    hand_over: Callable[[RankFailure | None], None],
    begin: threading.Event | None,
) -> None:
    if begin is not None:
        begin.wait()
    copies.make(modestly=True)
    check_result = capture_failure(copies.require_unchanged)
    hand_over(check_result if isinstance(check_result, RankFailure) else None)


_BASES_MAX = 8


class CheckpointEngine:
    """Engine that resumes and saves the parts of one run in one repository.

    Args:
        context: Repository, ranks and options. The control group serves one thread at a time, so
            the context needs a separate connection.
        persister: Executor that writes and commits while training continues; a thread by default.

    Attributes:
        start: Identity of the start that its generation belongs to; None for a tool.
        claimant: Process that claims its generation; None for a tool.
    """

    def __init__(self, context: CheckpointContext, persister: SaveExecutor | None = None) -> None:
        self.start: StartIdentity | None = None
        self.claimant: Claimant | None = None
        self._context = context
        self._persister = persister or make_save_executor(None, "", {})
        self._staging_buffers = StagingBuffers(self._persister.buffer, self._persister.streams)
        self._overlap = BackgroundStaging()
        self._round_trip = RoundTripCheck()
        self._stall = Stopwatch(context.clock)
        self._generation: Generation | None = None
        self._saves = 0
        self._has_saved = False
        self._saved_steps = SavedSteps()
        self._pending: CheckpointId | None = None
        self._bases: tuple[DedupBase, ...] = ()
        self._loads = 0
        self._setup: dict[str, Any] = {}
        self._heartbeat: WriterHeartbeat | None = None

    @property
    def generation(self) -> int:
        """Generation number of this attempt; 0 before ``resume``."""
        return self._generation.number if self._generation else 0

    @property
    def run_id(self) -> str:
        """Id of the run in all of its attempts; empty before ``resume``."""
        return self._generation.run_id if self._generation else ""

    @property
    def comms(self) -> ControlGroup:
        """Connection to the other ranks."""
        return self._context.comms

    @property
    def saves(self) -> int:
        """Number of saves begun; equal on every rank between two saves."""
        return self._saves

    def meet(self) -> None:
        """Wait for the save in flight, then until every rank is ready to save.

        For callers that run collectives of the training backend before a save. A rank that does not
        save would break those collectives.

        Collective: every rank, before ``save``.
        Crash: nothing was stored.

        Raises:
            SaveFailed: The previous save failed, or a rank does not save.
            DeadlineExceeded: A rank did not answer in time.
        """
        self._require_generation()
        self.wait()
        within_seconds = self._context.limits.within_seconds
        agree(self.comms, f"save/{self._saves + 1}/call", None, lambda _: None, within_seconds)

    @property
    def store(self) -> Store:
        """Repository that this engine reads and writes."""
        return self._context.store

    @property
    def in_flight(self) -> SaveExecutor | None:
        """Executor of the save in flight; None if ``wait`` has returned since the last save."""
        return self._persister if self._pending else None

    def settle(self, resume_option: str, *, is_first: bool = True) -> str:
        """Return the reference from which this attempt resumes, given the resume option.

        The option applies until a checkpoint of this run exists; then the answer is ``auto``. The
        identities of all ranks count, because an agent that joined later has a new one. The first
        attempt of a start is refused while another writer is alive.

        Collective: every rank, once, before ``resume``.
        Crash: reads only.

        Args:
            resume_option: ``auto``, ``never``, a reference or a folder.
            is_first: Whether no earlier attempt of this start can have written.

        Raises:
            WriterAlive: Another process is proven alive and writes to the repository.
            NoIntactCheckpoint: A checkpoint of this run was lost, or an existing checkpoint may
                belong to this run.
            StoreError: The store failed.
        """
        context, start_identity, claimant = self._context, self.start, self.claimant

        def rule(answers: list[Any]) -> dict[str, str]:
            starts = [StartIdentity.from_json(answer) for answer in answers if answer]
            if claimant is not None and is_first:
                with context.comms.at_work() as keep_alive:
                    refuse_live_writer(context, starts, claimant, keep_alive)
            elif heartbeat := self._own_heartbeat():
                heartbeat.adopt(lambda: newest_of_run(context.store, starts))
            decision = resolve_resume_option(
                context.store, resume_option, starts, is_first=is_first
            )
            return {"reference": decision.reference, "reason": decision.reason}

        answers = start_identity.to_json() if start_identity else None
        ruling = agree(context.comms, "resume/wish", answers, rule, context.limits.within_seconds)
        if ruling["reason"]:
            context.emit_once(
                events.ResumeSettled(resume_option, ruling["reference"], ruling["reason"])
            )
        return str(ruling["reference"])

    def _own_heartbeat(self) -> WriterHeartbeat | None:
        """Return the heartbeat that this rank stores; None on other ranks and in tools."""
        claimant, context = self.claimant, self._context
        if claimant is None or not claimant.heartbeat_seconds or not context.world.is_coordinator:
            return None
        if self._heartbeat is None:
            self._heartbeat = WriterHeartbeat(
                context.store,
                context.clock,
                context.emit,
                claimant.heartbeat_seconds,
                claimant.process,
            )
        return self._heartbeat

    def resume(
        self,
        parts: Mapping[str, Part],
        *,
        ref: str = "auto",
        cause: str = "start",
        examine: Examine = None,
        guard: StartGuard | None = None,
        policy: ChangePolicy | None = None,
    ) -> ResumeResult | None:
        """Load the newest checkpoint that all ranks can verify, and claim a generation.

        Without a committed checkpoint the parts stay as they are, and the result is None. Models
        and optimizers are loaded in place (:mod:`resilient.state_dict.resharding`). After an error
        they may contain a mixture of states. Create them again; ``save`` refuses such a mixture.

        Collective: every rank, once, before the first save.
        Crash: the claimed number is used up; nothing else changed in the store.

        Args:
            parts: Parts to load into, in this order.
            ref: ``auto``, ``never``, or a reference to one checkpoint.
            cause: Cause of this attempt, one word.
            examine: Callback with the saved configuration after verification, which may refuse the
                live objects.
            guard: Conditions of a start at step 0 under ``auto``, and of any loaded state; None
                allows any start.
            policy: Allowed differences between the saved and the live objects.

        Raises:
            NoIntactCheckpoint: Checkpoints were committed, but none of them is intact.
            IncompatibleCheckpoint: The checkpoint is whole, but this code or model cannot load it.
            StartOverRefused: The guard found checkpoints that a start at step 0 would ignore.
            NothingToResume: The guard requires a checkpoint, and there is none.
            NotExclusive: The store cannot fence and the user did not set ``single_writer``.
            StoreError: The store failed.
        """
        began_seconds = self._context.clock.monotonic_seconds()
        rank, load_plan = self._context.world.rank, LoadPlan(parts, in_place=True)
        names = {stored_name(name, part, rank) for name, part in parts.items()}
        if self._context.world.size > 1:
            self._context = discover_near_tiers(self._context)
        store = self._persister.open(self._context)
        request = self._context.read_request(names, load_plan.boxes, load_plan.places)
        choice = self._select(store, ref, request, guard)
        if guard is not None and ref == "auto" and choice.verified is None:
            is_coordinator = self._context.world.is_coordinator
            self._agree(
                "resume/start",
                capture_failure(lambda: guard.check(store)) if is_coordinator else None,
            )
        self._setup = setup_of(parts)
        check = ResumeCheck(self._setup, policy or ChangePolicy(), self._context.emit_once, examine)
        absent_names = self._load(choice, parts, load_plan, check)
        if guard is not None and guard.accept is not None:
            self._agree("resume/accept", capture_failure(guard.accept))
        process = self.claimant.process if self.claimant else None
        self._generation = start_generation(self._context, choice, cause, self.start, process)
        self._context = self._context.for_generation(self._generation)
        if heartbeat := self._own_heartbeat():
            heartbeat.begin(self._generation)
        if choice.verified is None:
            return None
        self._context.report_reconstructed(choice.verified)
        self._bases = (make_dedup_base(choice.verified, store),)
        took_seconds = self._context.clock.monotonic_seconds() - began_seconds
        resume_result = ResumeResult.of(choice.verified.manifest, absent_names)
        size_bytes, name = read_bytes(choice.verified.files), resume_result.checkpoint.folder
        self._context.emit_once(
            events.CheckpointRestored(name, resume_result.step, size_bytes, took_seconds)
        )
        return resume_result

    def _select(
        self, store: Store, ref: str, request: ReadRequest, guard: StartGuard | None
    ) -> ResumeChoice:
        """Return the checkpoint that a reference names, verified on every rank."""
        within_seconds = self._context.limits.within_seconds
        try:
            return select_resume_checkpoint(
                store, self._context.comms, ref, request, within_seconds
            )
        except (NothingToResume, RepositoryNotFound) as error:
            if guard is None:
                raise
            raise guard.explain(error, ref, store) from None

    def _load(
        self,
        choice: ResumeChoice,
        parts: Mapping[str, Part],
        load_plan: LoadPlan,
        check: ResumeCheck,
    ) -> tuple[str, ...]:
        """Load on every rank; continue only if all ranks succeeded."""
        verified = choice.verified
        if verified is None:
            return ()
        inputs = (verified.manifest, verified.files, parts, self._context.world.rank, load_plan)
        own_result = capture_failure(lambda: load_present_parts(*inputs, check))
        self._agree("resume/load", own_result)
        return own_result if isinstance(own_result, tuple) else ()

    def warm(self, parts: Mapping[str, Part]) -> None:
        """Allocate the memory for a save of these parts in the background.

        Call this method after the first step; otherwise the first save waits for the allocation. It
        refuses the same states as ``save``.

        Crash: nothing was stored.

        Args:
            parts: Parts that will be saved.
        """
        if self._saves or not self._overlap.is_idle:
            return
        drafts = draft(capture(0, parts, self._context.world.rank), self._context.world)
        sizes = {rank_draft.name: rank_draft.layout.size_bytes for rank_draft in drafts}
        self._overlap.start(lambda: self._staging_buffers.warm(sizes))

    def save(
        self,
        step: int,
        parts: Mapping[str, Part],
        about: CheckpointInfo,
        *,
        keep: Collection[CheckpointId] = (),
        overlap: bool = False,
    ) -> CheckpointId:
        """Copy the state to host memory and persist it in the background.

        This method waits for the previous save, and also for this save if it is streamed. The live
        state may change when this method returns; with ``overlap``, when ``before_update`` returns.
        From then on a saver daemon commits the checkpoint even if every trainer dies.

        Collective: every rank, same step, after ``resume``.
        Crash: if its manifest was stored, the checkpoint exists and is whole. Otherwise it does not
            exist. Older checkpoints are untouched in both cases.

        Args:
            step: Step that names the checkpoint together with the generation; a whole number.
            parts: Parts to save.
            about: Further content of the manifest.
            keep: Checkpoints that retention must not delete; the manifest names them.
            overlap: Promise of the caller to call ``before_update`` before it changes parameters or
                optimizer state of these parts. A broken promise fails the save.

        Returns:
            Id of the checkpoint, which exists once it is committed.

        Raises:
            SaveFailed: The previous save failed, or no executor accepted this save; this save is
                not stored.
            ConfigError: The step is not valid, this attempt has already tried to save this step or
                a higher step, or ``resume`` was not called.
            UnsavableState: A value needs pickle, or ``resume`` would refuse or change some state.
                Each new structure of a part is checked once.
            Fenced: A newer generation exists.
        """
        generation, began_seconds = (
            self._require_generation(),
            self._context.clock.monotonic_seconds(),
        )
        self.wait()
        with self._stall.running():
            checkpoint = self._saved_steps.claim(CheckpointId(generation.number, whole_step(step)))
            self._saves += 1
            topic, world = f"save/{self._saves}", self._context.world
            about = self.with_setup(about)
            self._persister.begin(topic)
            stable_tensors = stable_storages(parts) if overlap else ()
            snapshot = capture(checkpoint.step, parts, world.rank, self._round_trip)
            staged = stage(snapshot, world, self._staging_buffers, stable_tensors)
            job = SaveJob(
                about=draft_manifest(self._context, generation, checkpoint.step, about, keep),
                files=staged.files,
                parts=staged.parts,
                keep=tuple(keep),
                is_first=not self._has_saved,
                topic=topic,
                began_seconds=began_seconds,
                stall_seconds=self._stall.seconds,
                bases=self._bases if self._context.limits.save_unchanged == "refer" else (),
                streamed=staged.streamed,
                segment=about.segment,
                token=generation.token,
            )
            if staged.rest:
                self._overlap.copy(staged.rest, partial(self._hand_over, job, staged.rest))
            else:
                self._hand_over(job, staged.rest)
            self._pending = checkpoint
            self._saved_steps.add(checkpoint)
        return checkpoint

    def with_setup(self, about: CheckpointInfo) -> CheckpointInfo:
        """Return manifest content with the setup of optimizers and schedulers added.

        Crash: nothing was stored.
        """
        if not self._setup:
            return about
        return replace(about, config={**about.config, SETUP: self._setup})

    def _require_generation(self) -> Generation:
        if self._generation is None:
            raise ConfigError(
                "cannot save before `resume` has returned: after a failed resume the state in "
                "memory may be incomplete or mixed",
                hint="call resume() first; if it failed, create model and optimizer again",
            )
        return self._generation

    def _hand_over(
        self, job: SaveJob, copies: DeferredCopies, copy_failure: RankFailure | None = None
    ) -> None:
        copies.forget()
        with raising_save_failed():
            self._persister.submit(self._context, replace(job, copy_failure=copy_failure))

    def before_update(self) -> None:
        """Wait until all of the live state may change; call it before each optimizer step.

        This call is needed after ``save`` with ``overlap``. The next ``wait`` or ``save`` raises
        errors of the save.

        Crash: as in ``save``.
        """
        if self._overlap.is_copying:
            with self._stall.running():
                self._overlap.wait()

    def wait(self, *, in_every_tier: bool = False) -> None:
        """Wait until the save in flight is durable.

        Collective: only with ``in_every_tier``, if each host has its own near tier.
        Crash: as in ``save``.

        Args:
            in_every_tier: Wait also until the save was promoted from the near tier.

        Raises:
            SaveFailed: The save could not be made durable; older checkpoints are intact.
            Fenced: A newer generation exists, so nothing was committed.
        """
        pending_save, self._pending, stall = self._pending, None, self._stall
        # The wait for this save counts as stall of the next save, whichever call waited first.
        self._stall = stall if pending_save is None else Stopwatch(self._context.clock)
        try:
            with stall.running():
                self._overlap.settle()
            with self._stall.running():
                self._persister.wait()
        except ResilientError:
            if pending_save is not None:  # The save may still be committed.
                self._bases = (DedupBase(pending_save), *self._bases)[:_BASES_MAX]
            raise
        if pending_save is not None:
            self._has_saved, self._bases = True, (DedupBase(pending_save),)
        if in_every_tier:
            self._context.finish()

    def load_part(self, checkpoint: CheckpointId | str, name: str, part: Part) -> None:
        """Load one part from a committed checkpoint, for example of ``best:loss``.

        Either all ranks load the part or none does. An error of one rank is raised on all ranks.

        Collective: every rank, same checkpoint and part.
        Crash: only this process's memory changed.

        Raises:
            NothingToResume: The reference names no checkpoint.
            KeyNotFound: The checkpoint was deleted by retention.
            IntegrityError: The checkpoint is damaged.
            IncompatibleCheckpoint: The checkpoint has no such part, or another shape of it.
            SaveFailed: The save in flight failed; nothing was loaded.
        """
        self.wait()
        self._loads += 1
        topic, rank = f"load/{self._loads}", self._context.world.rank
        if isinstance(checkpoint, str):
            checkpoint = resolve_collectively(self._context, f"{topic}/name", checkpoint)
        name_in_store, load_plan = stored_name(name, part, rank), LoadPlan({name: part})

        def read_part() -> VerifiedCheckpoint:
            context = self._context
            read_checkpoint = read_wanted(
                context.store, checkpoint, context.read_request({name_in_store}, load_plan.boxes)
            )
            context.report_reconstructed(read_checkpoint)
            if absent_parts(read_checkpoint.manifest, {name: replace(part, optional=False)}, rank):
                raise IncompatibleCheckpoint(f"{checkpoint} holds no `{name_in_store}`")
            return read_checkpoint

        verified: Any = capture_failure(read_part)
        self._agree(f"{topic}/read", verified)
        own_result = capture_failure(
            lambda: load(verified.manifest, verified.files, {name: part}, rank, load_plan)
        )
        self._agree(topic, own_result)

    def _agree(self, topic: str, own_result: Any) -> None:
        """Continue only if no rank failed."""
        answer = own_result if isinstance(own_result, RankFailure) else None
        agree(
            self._context.comms, topic, answer, lambda _: None, self._context.limits.within_seconds
        )

    def committed(self) -> list[CheckpointId]:
        """Return every committed checkpoint in the store, newest first.

        Crash: reads only.
        """
        return catalog.committed(self._context.store)

    def holds_run(self) -> bool:
        """Return whether a resume would find a checkpoint, or evidence that all were lost.

        Crash: reads only.
        """
        descent = catalog.lineage(self._context.store)
        return bool(descent.candidates or descent.lost)

    def close(self) -> None:
        """Wait until the save in flight is durable in its last tier, then release all resources.

        Crash: as in ``save``.

        Raises:
            SaveFailed: The save in flight failed, or only the near tier has the last save.
        """
        try:
            self.wait()
            self._context.finish(is_closing=True)
        finally:
            if self._heartbeat is not None:
                self._heartbeat.end()
            self._overlap.close()
            self._persister.close()
            self._context.close()
            self._staging_buffers.close()
            if self._generation is not None and self.claimant is not None:
                release_claim(self._generation.token)
