"""Trainer: construction, the training loop, and methods for scripts."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Self

from resilient.distributed.heartbeat import Phase
from resilient.errors import ConfigError
from resilient.state_dict.snapshot import Part, Stateful
from resilient.train import schedules, step_count, trainer_evaluation
from resilient.train.build_run import RESERVED, build_run, cut_batches, default_callbacks, restore
from resilient.train.callbacks.base import (
    CallbackHandler,
    TrainerCallback,
    require_list,
    shown_states,
)
from resilient.train.callbacks.save_schedule import cadence_callbacks
from resilient.train.data.collate import collator_for
from resilient.train.events import BatchSizeReduced, SpecialTokensAligned, TrainingEnded
from resilient.train.hf_compat import refuse_uncalled_overrides
from resilient.train.memory import MemoryMeter
from resilient.train.model.artifacts import (
    align_special_tokens,
    processing_of,
    saved_processing,
    warn_of_tokenizer,
    write_processing_and_arguments,
)
from resilient.train.model.card import ModelCardInfo, write_card
from resilient.train.model.precision import Precision
from resilient.train.model.transforms import checking_numbers, noisy_embeddings, showing_compilers
from resilient.train.model.weights_io import gather_state, load_weights, write_model
from resilient.train.optimizers.factory import set_mode
from resilient.train.preemption import listening_to_signals
from resilient.train.rollback import rolling_back
from resilient.train.run import pass_through, set_seed
from resilient.train.saver import is_best
from resilient.train.search import runner
from resilient.train.session import (
    configure_model,
    configure_process,
    open_session,
    own_arguments,
    place_model,
)
from resilient.train.state import TrainerControl, TrainerState
from resilient.train.strategy_selection import choose_parallelism
from resilient.train.trainer_evaluation import TrainerEvaluation, speeds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from resilient.train.arguments import TrainingArguments
    from resilient.train.auto_batch_size import AutoBatchSize
    from resilient.train.evaluation.loop import EvalPrediction
    from resilient.train.run import TrainingRun
    from resilient.train.search.study import BestRun, Study


class TrainOutput(NamedTuple):
    """Result of ``train``; ``training_loss`` covers all attempts of the run."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class Trainer(TrainerEvaluation):
    """Trainer that trains a model to the end, across any number of restarts.

    Args:
        model: Module that returns its loss first or as ``loss``; it is moved to the device.
        args: Training arguments.
        train_dataset: Map-style dataset, or a stream (``IterableDataset``).
        eval_dataset: Dataset of either kind, or a dict of datasets (metrics ``eval_<name>_*``).
        data_collator: Function from samples to a batch; None stacks them.
        compute_loss_func: ``(outputs, labels, num_items_in_batch)`` -> loss; the model does not
            get the labels.
        compute_metrics: Function from ``EvalPrediction`` to a dict of numbers.
        callbacks: Callbacks, called after the built-in ones, in this order.
        optimizers: Your own optimizer and scheduler, or None for those of ``args``.
        model_init: Function that makes the model, and a new one for each trial of a search. If the
            function takes an argument, it gets the trial.
        optimizer_cls_and_kwargs: Optimizer class and its options, used with our parameter groups.
        preprocess_logits_for_metrics: Function from the predictions and labels of a batch to the
            kept part of the predictions. This function reduces the memory for
            predictions.
        processing_class: Tokenizer or processor of the data. The processing class is saved beside
            the model, and pads batches unless there is a ``data_collator``. ``tokenizer`` is its
            older name.
    """

    made_with: Mapping[str, Any]
    trial: Any = None
    hp_name: Callable[[Any], str] | None = None
    _ignore_keys_for_eval: Sequence[str] | None = None
    _has_trained: bool = False
    _has_trained_weights: bool = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record the constructor arguments, from which a hyper-parameter search makes trainers.

        Raises:
            ConfigError: The class overrides a method that only Transformers' trainer calls.
        """
        refuse_uncalled_overrides(cls)
        trainer = super().__new__(cls)
        trainer.made_with = runner.by_name(cls.__init__, Trainer.__init__, args, kwargs)
        return trainer

    def __init__(  # noqa: PLR0913, PLR0917 - the field's signature, in its order
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[Any], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
        callbacks: Iterable[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
    ) -> None:
        self.args = own_arguments(args)
        self.session = open_session(self.args)
        self.memory = MemoryMeter(self.session.device, is_on=not self.args.skip_memory_metrics)
        self.memory.start("init")
        # Ranks draw different dropout masks, but replicas begin with rank 0's weights.
        has_transformers_seed = self.args.random_numbers == "transformers"
        set_seed(self.args.seed + (0 if has_transformers_seed else self.session.data_world.rank))
        configure_process(self.args, self.session.device)
        self.model_init = model_init
        model = runner.first_model(model, model_init)
        configure_model(self.args, model)
        choose_parallelism(self.args, self.session, model)
        self.model = self.model_wrapped = place_model(self.args, model, self.session.device)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class = processing_of(processing_class, tokenizer)
        self.data_collator = data_collator or collator_for(self.processing_class)
        self.compute_loss_func = compute_loss_func
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self._take_optimizers(optimizers, optimizer_cls_and_kwargs)
        self.precision = Precision(self.args, self.session.device)
        self.state = TrainerState(
            is_local_process_zero=self.session.world.local_rank == 0,
            is_world_process_zero=self.session.world.is_coordinator,
        )
        self.control = TrainerControl()
        all_callbacks = [*cadence_callbacks(self.session), *require_list(callbacks)]
        self.callback_handler = CallbackHandler(
            default_callbacks(self.args, all_callbacks), self.args, self.state, self.control
        )
        self._emit = self.session.emit
        self.callback_handler.context |= {
            "model": self.model,
            "processing_class": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "emit": self._emit,
        }
        self.registered: dict[str, Part] = {}
        self.learn_losses()
        self.memory.stop("init")
        self.callback_handler.fire("on_init_end")

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,  # noqa: FBT001 - the field's signature
        trial: Any = None,
        ignore_keys_for_eval: Sequence[str] | None = None,
    ) -> TrainOutput:
        """Train to the end, starting at the last checkpoint of the run if there is one.

        Args:
            resume_from_checkpoint: None or True resumes the checkpoint that the launcher names, by
                default the newest one that all ranks can verify. If the repository is empty, the
                newest intact ``checkpoint-<step>`` of Hugging Face's Trainer in ``output_dir`` is
                imported. Without such a folder, None starts at step 0 and True raises. False always
                starts at step 0, with a new optimizer and scheduler and a new model from
                ``model_init``. A checkpoint's name, or its path in the repository, selects that
                checkpoint. A name without a generation (``checkpoint-120``) selects the newest
                checkpoint of that step. A folder saved by Hugging Face's Trainer is imported, and
                training continues from it.
            trial: Trial of a hyper-parameter search, or a dict of values by argument name; the
                model is made again by ``model_init``.
            ignore_keys_for_eval: Model outputs that are not predictions, for evaluations during
                training; None: the keys that the model's config names.

        Raises:
            Preempted: A stop was requested; everything up to the last step is durable.
            SaveFailed: A checkpoint could not be made durable.
            ConfigError: The arguments do not fit the model or the data, or they name a checkpoint
                that is not in this repository.
            NothingToResume: The repository has no such checkpoint; also a ValueError.
            NoIntactCheckpoint: Every checkpoint there is damaged or incomplete.
            StartOverRefused: A start at step 0 would ignore checkpoints of another tool.
        """
        self._ignore_keys_for_eval = ignore_keys_for_eval
        if resume_from_checkpoint is False:
            self._begin_anew(remakes_model=trial is None)
        if trial is not None:
            runner.take_trial(self, trial)
        self._note_given_states()
        self._has_trained = self._has_trained_weights = self.is_in_train = True
        with ExitStack() as stack:
            stack.callback(self._leave_training)
            self._align_special_tokens()
            stack.callback(self.callback_handler.close)
            stack.enter_context(showing_compilers(self.session.progress, self.args))
            self.session.progress.enter(Phase.FIRST)
            stack.callback(self.session.progress.enter, Phase.OUTSIDE)
            run = build_run(self, self.state, self.callback_handler, self.registered)
            stack.callback(run.close)
            stack.callback(self._end_eval_workers)
            restore(
                run, self, self.state, self.callback_handler, resume_from=resume_from_checkpoint
            )
            self._emit = run.saver.emit
            run.gate.start(self.state.global_step, lambda: self.state.global_step)
            stack.enter_context(listening_to_signals(run.gate))
            stack.push(run.settle)
            stack.callback(self.memory.leave)
            stack.enter_context(checking_numbers(self.model, self.args.debug))
            stack.enter_context(noisy_embeddings(self.model, self.args.neftune_noise_alpha))
            return self._train(run)

    @property
    def tokenizer(self) -> Any:
        """Deprecated name of ``processing_class``."""
        warn_of_tokenizer(3)
        return self.processing_class

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], Mapping[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, Any]], Any] | None = None,
        n_trials: int = 20,
        direction: str | Sequence[str] = "minimize",
        backend: str | Study | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **options: Any,
    ) -> BestRun | list[BestRun]:
        """Train with many sets of hyper-parameters and return the best. Collective.

        Each trial is a separate training in ``<output_dir>/run-<number>``, with a new model from
        ``model_init``. A search that was killed continues: the interrupted trial resumes where it
        stopped, and the missing trials follow.

        Args:
            hp_space: Function from a trial to values by argument name. Names that are not arguments
                go to ``model_init``.
            compute_objective: Function from metrics to the objective; None: their sum, or the loss.
            n_trials: Number of trials over all attempts of the search.
            direction: ``minimize``, ``maximize``, or one of them for each objective.
            backend: ``optuna``, or your own :class:`resilient.train.search.study.Study`; None:
                ``optuna``.
            hp_name: Function from a trial to its name, for ``trial_name`` of the state.
            **options: Options of ``optuna.create_study``: storage, study_name, sampler, pruner.

        Raises:
            ConfigError: There is no ``model_init``, or Optuna is not installed.
        """
        plan = runner.SearchPlan(hp_space, compute_objective, n_trials, direction, hp_name)
        result = runner.start(self, plan, "optuna" if backend is None else backend, options)
        return result[0] if isinstance(direction, str) else result

    def register(
        self,
        name: str,
        stateful: Stateful,
        scope: Literal["replicated", "rank"] = "replicated",
    ) -> None:
        """Save and restore a stateful object of yours with every checkpoint.

        Args:
            name: Name of the part in the checkpoint.
            stateful: Object with ``state_dict`` and ``load_state_dict``.
            scope: ``replicated`` if all ranks have the same state, ``rank`` if each has its own.

        Raises:
            ConfigError: Another part of yours, or one of the trainer's parts, has this name.
        """
        if name in RESERVED:
            raise ConfigError(
                f"cannot register `{name}`: the trainer's own parts use this name (reserved: "
                f"{', '.join(RESERVED)}); choose another name"
            )
        if name in self.registered:
            raise ConfigError(f"a part named `{name}` is already registered")
        self.registered[name] = Part(stateful, scope)

    def save_model(
        self,
        output_dir: str | None = None,
        _internal_call: bool = False,  # noqa: FBT001, FBT002 - the field's signature
    ) -> None:
        """Write the model for other tools, on rank 0, as ``from_pretrained`` reads it.

        The folder gets the weights (``model.safetensors``; only the adapter of a PEFT model), the
        configurations, the tokenizer if there is one, and the arguments (``training_args.json``).

        Collective if the model is sharded: rank 0 gathers its weights. With the argument
        ``push_to_hub``, rank 0 also uploads the folder.
        """
        state = gather_state(self.model, keep=self.state.is_world_process_zero)
        if self.state.is_world_process_zero:
            folder = Path(output_dir or self.args.output_dir)
            write_model(self.model, state, folder)
            processing = saved_processing(self.processing_class, self.data_collator)
            write_processing_and_arguments(folder, processing, self.args.to_dict())
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def load_model(self, checkpoint: str) -> str:
        """Load only the weights of a checkpoint, from any run of this model. Collective.

        No other state is restored, so the next training begins at step 0 (``train(False)``, or in a
        new output folder). Call this method before ``train``.

        Args:
            checkpoint: Path of the checkpoint (``runs/other/checkpoint-120``), a repository (its
                newest checkpoint), or a name in this trainer's repository.

        Returns:
            The folder name of the checkpoint.

        Raises:
            RepositoryNotFound: The repository has no checkpoint.
            NothingToResume: There is no such checkpoint.
            IntegrityError: The checkpoint is damaged; the model is unchanged.
            IncompatibleCheckpoint: The checkpoint has another model.
        """
        loaded = load_weights(self.session, self.model, os.fspath(checkpoint))
        self._has_trained_weights = False
        return loaded

    def create_model_card(  # noqa: PLR0913, PLR0917 - the field's signature, in its order
        self,
        language: str | None = None,
        license: str | None = None,  # noqa: A002 - the field's name
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write a draft of the model card, ``README.md`` of the output folder, on rank 0.

        The card contains the values given here, the arguments and the evaluation results so far.
        Only the tags of an existing card are kept. No network access.

        Args:
            language: Language of the data.
            license: License of the model.
            tags: Tags for the Hub.
            model_name: Title of the card; None: the name of the output folder.
            finetuned_from: Model before this training; None: the name in its configuration.
            tasks: Identifiers of tasks.
            dataset_tags: Identifiers of datasets on the Hub.
            dataset: Names of the datasets.
            dataset_args: Configuration of each dataset.

        Raises:
            ConfigError: The existing card cannot be read.
            StoreError: The folder cannot be written; an existing card is unchanged.
        """
        if self.state.is_world_process_zero:
            card_fields = (language, license, tags, model_name, finetuned_from, tasks)
            info = ModelCardInfo(*card_fields, dataset_tags, dataset, dataset_args)
            write_card(Path(self.args.output_dir), self.model, info, self.args, self.state)

    def save_state(self) -> None:
        """Write ``trainer_state.json`` into the output folder, on rank 0."""
        if self.state.is_world_process_zero:
            self.state.save_to_json(Path(self.args.output_dir) / "trainer_state.json")

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Write metrics to standard output, one per line, on rank 0."""
        if self.state.is_world_process_zero:
            sys.stdout.write(trainer_evaluation.shown(split, self.metrics_format(metrics)))

    def save_metrics(
        self, split: str, metrics: Mapping[str, Any], *, combined: bool = True
    ) -> None:
        """Write ``<split>_results.json`` into the output folder, on rank 0.

        Args:
            split: ``train``, ``eval``, ``test`` or ``all``.
            metrics: Result of ``train``, ``evaluate`` or ``predict``.
            combined: Also add the metrics to ``all_results.json``.
        """
        if self.state.is_world_process_zero:
            trainer_evaluation.save(Path(self.args.output_dir), split, metrics, combined=combined)

    def is_world_process_zero(self) -> bool:
        """Return whether this process is the first of all ranks."""
        return self.args.process_index == 0

    def is_local_process_zero(self) -> bool:
        """Return whether this process is the first rank of its host."""
        return self.args.local_process_index == 0

    def num_examples(self, dataloader: Any) -> int:
        """Return the samples of a loader's dataset, or an estimate if the dataset has no length."""
        try:
            return len(dataloader.dataset)
        except (AttributeError, TypeError):
            return len(dataloader) * self.args.per_device_train_batch_size

    def get_num_trainable_parameters(self) -> int:
        """Return the number of trained values; for a sharded model, those of this rank."""
        return sum(
            parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad
        )

    def get_learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group.

        Raises:
            ValueError: There is no optimizer yet.
        """
        if self.optimizer is None:
            raise ValueError("there is no optimizer before training")
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_optimizer_group(self, param: Any = None) -> Any:
        """Return the group that holds ``param``, or the parameters of each group.

        As in Transformers, the parameters of all groups are returned if no group has ``param``.

        Raises:
            ValueError: There is no optimizer yet.
        """
        if self.optimizer is None:
            raise ValueError("there is no optimizer before training")
        for group in self.optimizer.param_groups:
            if any(parameter is param for parameter in group["params"]):
                return group
        return [group["params"] for group in self.optimizer.param_groups]

    @property
    def best_checkpoint(self) -> str:
        """URL of the best model's checkpoint, for ``load_model``; empty if no checkpoint has it.

        ``state.best_model_checkpoint`` names only the step, because the state must not depend on
        the number of restarts. The folder name also contains the generation of the attempt that
        saved the checkpoint.
        """
        saved_models = self.callback_handler.context.get("saved_models")
        best = saved_models.best.checkpoint if saved_models is not None else None
        return (
            f"{saved_models.url.rstrip('/')}/{best}"
            if saved_models is not None and best is not None
            else ""
        )

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback after the existing ones."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> Any:
        """Remove and return a callback, given as instance or class; None if there is none."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Remove a callback, given as instance or class."""
        self.callback_handler.pop_callback(callback)

    def _begin_anew(self, *, remakes_model: bool) -> None:
        """Reset the state, the optimizer and the model of an earlier training of this trainer.

        Weights that were loaded after that training are kept.

        Args:
            remakes_model: Whether ``model_init`` makes the model of this training.
        """
        self.state.begin_anew()
        self.control.load_state_dict(vars(TrainerControl()))
        if not self._has_trained:
            return
        self._make_optimizers_anew()
        if remakes_model and self.model_init is not None and self._has_trained_weights:
            runner.remake_model(self, None)

    def _leave_training(self) -> None:
        self.is_in_train = False

    def _align_special_tokens(self) -> None:
        """Write the special tokens of the processing class into the model's configurations."""
        tokens = align_special_tokens(self.model, self.processing_class)
        if tokens and self.session.world.is_coordinator:
            self.session.emit(SpecialTokensAligned(tokens))

    def _train(self, run: TrainingRun) -> TrainOutput:
        began_seconds, first_step = self.session.clock.monotonic_seconds(), self.state.global_step
        self.memory.start("train")
        first_tokens = self.state.num_input_tokens_seen
        # Of the script, or of an earlier training that ended within a step; no checkpoint has them.
        self.precision.zero_grad(run.optimizer, run.all_parameters)
        self._begin(run)
        # The end of an open epoch must be handled, even if no step remains.
        while run.cursor.is_open or not self._is_done(run):
            with rolling_back(self, run):
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
        self._emit_on_first_rank(TrainingEnded(self.state.global_step, loss, took_seconds))
        steps = self.state.global_step - first_step
        tokens = self.state.num_input_tokens_seen - first_tokens
        metrics = {"train_loss": loss, "total_flos": self.state.total_flos}
        metrics |= speeds("train", took_seconds, steps * run.step_samples, steps, tokens)
        metrics |= {"epoch": self.state.epoch, **self.memory.stop("train")}
        return TrainOutput(self.state.global_step, loss, metrics)

    def _train_epoch(self, run: TrainingRun) -> None:
        """Train from the cursor to the end of its epoch or of the run."""
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
            run.cache_step(self.state, partial(shown_states, self.callback_handler))
        fire("on_epoch_end")
        run.end_epoch(cut_short=control.should_epoch_stop)
        self._log_evaluate_save(run)

    def _train_step(self, run: TrainingRun, batches: Iterator[Any]) -> Iterator[Any]:
        """Run one optimizer step; return the iterator over the following micro-batches."""
        fire, optimizer, state = self.callback_handler.fire, run.optimizer, self.state
        self.session.progress.begin_step()
        if run.canonical_passes is not None:
            run.canonical_passes.begin_step(state.global_step)
        fire("on_step_begin")
        start = run.cursor.samples
        if run.batch_size_search is None:
            self._make_gradients(run, run.model, batches)
        else:
            batches = self._make_fitting_gradients(run, run.batch_size_search, batches)
        grad_norm = self.precision.clip(optimizer, run.all_parameters, self.args.max_grad_norm)
        run.judge_step(grad_norm, expects_infinite=self.args.fp16)
        # The previous save may still be copying tensors that the optimizer is about to change.
        run.wait_for_copy(self._timing)
        fire("on_pre_optimizer_step")
        stepped = self.precision.step(optimizer)
        fire("on_optimizer_step")
        if stepped:
            schedules.step_after_update(run.scheduler)
        self.precision.zero_grad(optimizer, run.all_parameters)
        state.global_step += 1
        state.epoch = step_count.epoch_fraction(run.layout, run.cursor)
        run.counter.end_step()
        self.session.progress.end_step(state.global_step)
        run.end_step(self, start, updated=stepped)
        fire("on_step_end")
        return batches

    def _make_gradients(self, run: TrainingRun, model: nn.Module, batches: Iterator[Any]) -> None:
        """Run the forward and backward passes of a step, one per micro-batch."""
        if run.canonical_passes is not None:
            run.canonical_passes.make(self, run, batches)
            return
        # The last group of an epoch may be short; the loss is divided by the group's actual size.
        group = min(self.args.gradient_accumulation_steps, run.rounds_left())
        self.current_gradient_accumulation_steps = group
        progress = self.session.progress
        with progress.during(Phase.LOADING):
            fetched, count = self.get_batch_samples(batches, group, self.session.device)
            samples = iter(fetched)
            inputs = next(samples)
        count_arguments = () if count is None else (count,)
        if run.pipeline is not None:
            pass_through(self, run, [inputs, *samples], count_arguments)
            return
        for batches_left in reversed(range(group)):
            with self._gradient_sync(run.model, batches_left):
                run.add_loss(self.training_step(model, inputs, *count_arguments))
            if run.counter.is_on:
                run.counter.add(inputs)
            run.cursor.advance(run.layout)
            if batches_left:
                self.callback_handler.fire("on_substep_end")
                with progress.during(Phase.LOADING):
                    inputs = next(samples)

    def _make_fitting_gradients(
        self, run: TrainingRun, fitting: AutoBatchSize, batches: Iterator[Any]
    ) -> Iterator[Any]:
        """Retry the passes of a step with smaller batches until they fit (auto_find_batch_size)."""
        while not fitting.attempt(run, partial(self._make_gradients, run, fitting.model, batches)):
            old_batch, new_batch = run.layout.batch, run.layout.batch // 2
            cut_batches(run, self, self.state, self.callback_handler, new_batch)
            self._emit_on_first_rank(BatchSizeReduced(old_batch, new_batch))
            batches = run.batches(begins=False)
        return batches

    def _begin(self, run: TrainingRun) -> None:
        self._emit_on_first_rank(run.started(self.state, self.session.data_world.size))
        run.model.train()
        set_mode(run.optimizer, training=True)
        self.callback_handler.fire("on_train_begin")
        if run.canonical_passes is not None and not self._is_done(run):
            run.canonical_passes.start(self, run)
        if self.args.eval_on_start and not self.state.global_step:
            self._evaluate_step(run)
        if self.control.should_evaluate:
            # The last attempt stopped during this evaluation and saved without its results.
            run.saver.allow_resave()
            self._log_evaluate_save(run)

    def _log_evaluate_save(self, run: TrainingRun) -> None:
        """Log, evaluate, find the best model and save, in this order, as the flags request."""
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
            with self.session.progress.during(Phase.EVALUATING):
                metrics = self._evaluate_step(run)
            schedules.step_after_evaluation(run.scheduler, self.args, metrics)
            self._judge(run, metrics)
        if control.should_save:
            control.should_save = False
            self._save_step(run)

    def _evaluate_step(self, run: TrainingRun) -> dict[str, Any]:
        metrics = self._evaluate_unless_stopped(run.gate, self._ignore_keys_for_eval)
        return self._leave(run) if metrics is None else metrics

    def _judge(self, run: TrainingRun, metrics: Mapping[str, Any]) -> None:
        """Decide whether the model just evaluated is the best so far."""
        if is_best(self.args, self.state, metrics):
            run.saver.record_best()
            self.control.should_save |= self.args.save_strategy == "best"

    def _save_step(self, run: TrainingRun) -> None:
        run.settle_for_saving(self.state, shown_states(self.callback_handler))
        with self._timing("saving"), self.session.progress.during(Phase.SAVING):
            is_saved = run.saver.save()
        if is_saved:
            self.callback_handler.fire("on_save")

    def _leave(self, run: TrainingRun) -> NoReturn:
        run.leave(self.state.global_step, partial(self._save_step, run), self._emit_on_first_rank)

    def _is_done(self, run: TrainingRun) -> bool:
        state = self.state
        if self.control.should_training_stop or state.global_step >= state.max_steps:
            return True
        return run.cursor.epoch >= state.num_train_epochs
