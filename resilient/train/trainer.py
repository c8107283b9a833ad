"""The Trainer: starting is resuming, and the loop is on this page."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from resilient.train import plan, schedules
from resilient.train.assembly import assemble, cut_batches, restore
from resilient.train.best import is_best
from resilient.train.callbacks.shown_states import shown_states
from resilient.train.model.compiling import showing_compilers
from resilient.train.model.noise import noisy_embeddings
from resilient.train.model.overflow import looking_at_numbers
from resilient.train.model.special_tokens import align_special_tokens
from resilient.train.optimizers.create import set_mode
from resilient.train.passes import pass_through
from resilient.train.reporting import BatchCut, SpecialTokensAligned, TrainingEnded
from resilient.train.rollback import going_back
from resilient.train.signals import listening_to_signals
from resilient.train.state import TrainerControl
from resilient.train.surface import searching
from resilient.train.surface.base import TrainerBase
from resilient.train.surface.predicting import speeds
from resilient.world.pulse import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from resilient.train.fitting import Fitting
    from resilient.train.run import Run


class TrainOutput(NamedTuple):
    """What ``train`` returns; ``training_loss`` covers all lives of the run."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class Trainer(TrainerBase):
    """Trains a model to the end, through any number of lives.

    Args:
        model: any module that returns its loss first or as ``loss``; moved to the device.
        args: what the run is told.
        train_dataset: map-style, or a stream (``IterableDataset``).
        eval_dataset: either, or a dict of them (metrics ``eval_<name>_*``).
        data_collator: samples -> batch; None stacks them.
        compute_loss_func: ``(outputs, labels, num_items_in_batch)`` -> loss; the labels are kept
            from the model.
        compute_metrics: ``EvalPrediction`` -> dict of numbers.
        callbacks: after the built-in ones, in this order.
        optimizers: an optimizer and a scheduler of your own, or None for those of ``args``.
        model_init: makes the model instead, and a new one for each trial of a search, which it is
            given if it takes an argument.
        optimizer_cls_and_kwargs: a class of optimizers and its options, over our groups.
        preprocess_logits_for_metrics: predictions and labels of a batch -> what is kept of the
            predictions, when all would not fit.
        processing_class: the tokenizer or processor of the data; saved beside the model, and pads
            batches unless there is a ``data_collator``. ``tokenizer`` is its older name.
    """

    _ignore_keys_for_eval: Sequence[str] | None = None
    _has_trained: bool = False
    _has_trained_weights: bool = False

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,  # noqa: FBT001 - the field's signature
        trial: Any = None,
        ignore_keys_for_eval: Sequence[str] | None = None,
    ) -> TrainOutput:
        """Train to the end, from wherever the last life got to.

        Args:
            resume_from_checkpoint: None or True resumes what the launcher names, by default the
                newest checkpoint that all ranks can prove. A repository without checkpoints takes
                over the newest intact ``checkpoint-<step>`` of Hugging Face's Trainer in
                ``output_dir``; with None and no checkpoint there the run starts at step 0, and
                True raises. False starts at step 0 in any case, with a new optimizer and
                scheduler and a new model of ``model_init``. A
                checkpoint's name, or its path in the repository, picks it, the newest of that
                step if it says no generation (``checkpoint-120``); a folder that Hugging Face's
                Trainer saved is taken over and gone on with.
            trial: of a hyper-parameter search, or a dict of values by the names of arguments: the
                model is made anew by ``model_init``.
            ignore_keys_for_eval: outputs of the model that are no predictions, in evaluations
                that training makes; None: those that its config names.

        Raises:
            Preempted: asked to stop; everything up to the last step is durable.
            SaveFailed: a checkpoint could not be made durable.
            ConfigError: the arguments do not fit the model or the data, or name a checkpoint that
                is not in this repository.
            NothingToResume: the repository holds no such checkpoint; also a ValueError.
            NoIntactCheckpoint: every checkpoint there is damaged or incomplete.
            StartOverRefused: a start at step 0 would ignore checkpoints of another tool.
        """
        self._ignore_keys_for_eval = ignore_keys_for_eval
        if resume_from_checkpoint is False:
            self._begin_anew(remakes_model=trial is None)
        if trial is not None:
            searching.take_trial(self, trial)
        self._note_given_states()
        self._has_trained = self._has_trained_weights = True
        self._align_special_tokens()
        with ExitStack() as stack:
            stack.callback(self.callback_handler.close)
            stack.enter_context(showing_compilers(self.session.pulse, self.args))
            self.session.pulse.enter(Phase.FIRST)
            stack.callback(self.session.pulse.enter, Phase.OUTSIDE)
            run = assemble(self, self.state, self.callback_handler, self.registered)
            stack.callback(run.close)
            restore(run, self, self.state, self.callback_handler, wanted=resume_from_checkpoint)
            self._emit = run.saver.emit
            run.gate.start(self.state.global_step, lambda: self.state.global_step)
            stack.enter_context(listening_to_signals(run.gate))
            stack.push(run.settle)
            stack.callback(self.memory.leave)
            stack.enter_context(looking_at_numbers(self.model, self.args.debug))
            stack.enter_context(noisy_embeddings(self.model, self.args.neftune_noise_alpha))
            return self._train(run)

    def _begin_anew(self, *, remakes_model: bool) -> None:
        """Forget an earlier training of this trainer: its state, its optimizer, its model.

        Weights that were loaded since then stay.

        Args:
            remakes_model: whether ``model_init`` makes the model of this training.
        """
        self.state.begin_anew()
        self.control.load_state_dict(vars(TrainerControl()))
        if not self._has_trained:
            return
        self._make_optimizers_anew()
        if remakes_model and self.model_init is not None and self._has_trained_weights:
            searching.remake_model(self, None)

    def _align_special_tokens(self) -> None:
        """Write the special tokens of the processing class into the model's configurations."""
        tokens = align_special_tokens(self.model, self.processing_class)
        if tokens and self.session.world.is_coordinator:
            self.session.emit(SpecialTokensAligned(tokens))

    def _train(self, run: Run) -> TrainOutput:
        began_seconds, first_step = self.session.clock.monotonic_seconds(), self.state.global_step
        self.memory.start("train")
        first_tokens = self.state.num_input_tokens_seen
        self._begin(run)
        # An epoch that is open has an end to handle, even when no step is left.
        while run.cursor.is_open or not self._is_done(run):
            with going_back(self, run):
                self._train_epoch(run)
        if self.args.save_strategy != "no":
            self._save_step(run)
        run.saver.wait()
        if self.args.load_best_model_at_end:
            run.saver.load_best()
        set_mode(run.optimizer, training=False)
        run.counter.settle()
        loss = run.meters.training_loss()
        self.log({"train_loss": loss})
        self.callback_handler.fire("on_train_end")
        run.is_over = True
        took_seconds = self.session.clock.monotonic_seconds() - began_seconds
        self._tell(TrainingEnded(self.state.global_step, loss, took_seconds))
        steps = self.state.global_step - first_step
        tokens = self.state.num_input_tokens_seen - first_tokens
        metrics = {"train_loss": loss, "total_flos": self.state.total_flos}
        metrics |= speeds("train", took_seconds, steps * run.step_samples, steps, tokens)
        metrics |= {"epoch": self.state.epoch, **self.memory.stop("train")}
        return TrainOutput(self.state.global_step, loss, metrics)

    def _train_epoch(self, run: Run) -> None:
        """Train from the cursor to the end of its epoch, or to the end of the run."""
        control, fire = self.control, self.callback_handler.fire
        begins = not run.cursor.is_open
        if begins:
            control._new_epoch()  # noqa: SLF001 - the field's name
            run.cursor.is_open = True
        fire("on_epoch_begin")
        batches = run.batches(begins=begins)
        while not (self._is_done(run) or control.should_epoch_stop or run.rounds_left() == 0):
            if not run.may_begin(self.state.global_step + 1):
                self._leave(run)
            batches = self._train_step(run, batches)
            self._log_evaluate_save(run)
            run.hold_step(self.state, partial(shown_states, self.callback_handler))
        fire("on_epoch_end")
        run.end_epoch(cut_short=control.should_epoch_stop)
        self._log_evaluate_save(run)

    def _train_step(self, run: Run, batches: Iterator[Any]) -> Iterator[Any]:
        """Make one optimizer step; return the micro-batches that come after it."""
        fire, optimizer, state = self.callback_handler.fire, run.optimizer, self.state
        self.session.pulse.begin_step()
        if run.leaves is not None:
            run.leaves.begin_step(state.global_step)
        fire("on_step_begin")
        start = run.cursor.samples
        if run.fitting is None:
            self._make_gradients(run, run.model, batches)
        else:
            batches = self._make_fitting_gradients(run, run.fitting, batches)
        grad_norm = self.precision.clip(optimizer, run.parameters, self.args.max_grad_norm)
        run.judge_step(grad_norm, expects_infinite=self.args.fp16)
        # The save before may still be copying what the optimizer is about to change.
        run.wait_for_copy(self._timing)
        fire("on_pre_optimizer_step")
        stepped = self.precision.step(optimizer)
        fire("on_optimizer_step")
        if stepped:
            schedules.step_after_update(run.scheduler)
        self.precision.zero_grad(optimizer)
        state.global_step += 1
        state.epoch = plan.epoch_fraction(run.deal, run.cursor)
        run.counter.end_step()
        self.session.pulse.end_step(state.global_step)
        run.end_step(self, start, updated=stepped)
        fire("on_step_end")
        return batches

    def _make_gradients(self, run: Run, model: nn.Module, batches: Iterator[Any]) -> None:
        """Make the passes of a step: as many micro-batches as it takes."""
        if run.leaves is not None:
            run.leaves.make(self, run, batches)
            return
        # The last group of an epoch may be short; its loss is divided by its own size.
        group = min(self.args.gradient_accumulation_steps, run.rounds_left())
        self.current_gradient_accumulation_steps = group
        pulse = self.session.pulse
        with pulse.during(Phase.LOADING):
            fetched, count = self.get_batch_samples(batches, group, self.session.device)
            samples = iter(fetched)
            inputs = next(samples)
        counted = () if count is None else (count,)
        if run.pipeline is not None:
            pass_through(self, run, [inputs, *samples], counted)
            return
        for left in reversed(range(group)):
            with self._joining(run.model, left):
                run.add_loss(self.training_step(model, inputs, *counted))
            if run.counter.is_on:
                run.counter.add(inputs)
            run.cursor.advance(run.deal)
            if left:
                self.callback_handler.fire("on_substep_end")
                with pulse.during(Phase.LOADING):
                    inputs = next(samples)

    def _make_fitting_gradients(
        self, run: Run, fitting: Fitting, batches: Iterator[Any]
    ) -> Iterator[Any]:
        """Do the same with smaller and smaller batches until they fit (auto_find_batch_size)."""
        while not fitting.attempt(run, partial(self._make_gradients, run, fitting.model, batches)):
            old, new = run.deal.batch, run.deal.batch // 2
            cut_batches(run, self, self.state, self.callback_handler, new)
            self._tell(BatchCut(old, new))
            batches = run.batches(begins=False)
        return batches

    def _begin(self, run: Run) -> None:
        self._tell(run.started(self.state, self.session.data_world.size))
        run.model.train()
        set_mode(run.optimizer, training=True)
        self.callback_handler.fire("on_train_begin")
        if run.leaves is not None and not self._is_done(run):
            run.leaves.start(self, run)
        if self.args.eval_on_start and not self.state.global_step:
            self._evaluate_step(run)
        if self.control.should_evaluate:
            run.saver.outdate()  # the last life was stopped in it, and saved the step without
            self._log_evaluate_save(run)

    def _log_evaluate_save(self, run: Run) -> None:
        """Do what the control flags ask for, in the field's order: log, evaluate, best, save."""
        control = self.control
        if control.should_log:
            control.should_log = False
            run.counter.settle()
            if run.meters.recent_steps:
                self.log(run.take_metrics())
        if control.should_evaluate:
            control.should_evaluate = False
            run.saver.before_update()
            run.strategy.align(run.model)
            with self.session.pulse.during(Phase.EVALUATING):
                metrics = self._evaluate_step(run)
            schedules.step_after_evaluation(run.scheduler, self.args, metrics)
            self._judge(run, metrics)
        if control.should_save:
            control.should_save = False
            self._save_step(run)

    def _evaluate_step(self, run: Run) -> dict[str, Any]:
        metrics = self._evaluate_unless_stopped(run.gate, self._ignore_keys_for_eval)
        return self._leave(run) if metrics is None else metrics

    def _judge(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Decide whether the model that was just evaluated is the best so far."""
        if is_best(self.args, self.state, metrics):
            run.saver.found_best()
            self.control.should_save |= self.args.save_strategy == "best"

    def _save_step(self, run: Run) -> None:
        run.settle_for_saving(self.state, shown_states(self.callback_handler))
        with self._timing("saving"), self.session.pulse.during(Phase.SAVING):
            is_saved = run.saver.save()
        if is_saved:
            self.callback_handler.fire("on_save")

    def _leave(self, run: Run) -> NoReturn:
        run.leave(self.state.global_step, partial(self._save_step, run), self._tell)

    def _is_done(self, run: Run) -> bool:
        state = self.state
        if self.control.should_training_stop or state.global_step >= state.max_steps:
            return True
        return run.cursor.epoch >= state.num_train_epochs
