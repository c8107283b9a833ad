"""The trainer without its loop: construction, evaluation, logs, and what is written by hand."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from resilient.errors import ConfigError
from resilient.state.capture import Part, Stateful
from resilient.train.assembly import RESERVED
from resilient.train.callbacks.cadence import cadence_callbacks
from resilient.train.callbacks.callback import CallbackHandler, TrainerCallback, require_list
from resilient.train.data.collate import collator_for
from resilient.train.deciding import decide_parallelism
from resilient.train.default_callbacks import default_callbacks
from resilient.train.evaluation import results
from resilient.train.measures.memory import MemoryMeter
from resilient.train.model.card import Told, write_card
from resilient.train.model.export import gather_state, write_model
from resilient.train.model.papers import (
    processing_of,
    saved_processing,
    warn_of_tokenizer,
    write_beside,
)
from resilient.train.model.precision import Precision
from resilient.train.model.weights import load_weights
from resilient.train.run import set_seed
from resilient.train.session import open_session
from resilient.train.settings import own_arguments, settle_model, settle_process
from resilient.train.state import TrainerControl, TrainerState
from resilient.train.surface import searching
from resilient.train.surface.asking import AskingMethods
from resilient.train.surface.predicting import TrainerPrediction
from resilient.train.surface.theirs import require_called

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from resilient.train.arguments import TrainingArguments
    from resilient.train.evaluation.evaluate import EvalPrediction
    from resilient.train.search.study import BestRun, Study


class TrainerBase(AskingMethods, TrainerPrediction):
    """Everything of a trainer but ``train``; see :class:`resilient.Trainer` for the arguments."""

    made_with: Mapping[str, Any]
    trial: Any = None
    _has_trained_weights: bool = False
    hp_name: Callable[[Any], str] | None = None

    def __new__(cls, *given: Any, **named: Any) -> Self:
        """Remember what a trainer is made with: a search makes others like it.

        Raises:
            ConfigError: it overrides what only Transformers' trainer calls.
        """
        require_called(cls)
        made = super().__new__(cls)
        made.made_with = searching.by_name(cls.__init__, TrainerBase.__init__, given, named)
        return made

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
        # Ranks draw different dropout masks; replicas begin as rank 0's all the same.
        alike = self.args.random_numbers == "transformers"
        set_seed(self.args.seed + (0 if alike else self.session.data_world.rank))
        settle_process(self.args, self.session.device)
        self.model_init = model_init
        model = searching.first_model(model, model_init)
        settle_model(self.args, model)
        decide_parallelism(self.args, self.session, model)
        self.model = self.model_wrapped = model.to(self.session.device)
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
        hearing = [*cadence_callbacks(self.session), *require_list(callbacks)]
        self.callback_handler = CallbackHandler(
            default_callbacks(self.args, hearing), self.args, self.state, self.control
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

    @property
    def tokenizer(self) -> Any:
        """The older name of ``processing_class``."""
        warn_of_tokenizer(3)
        return self.processing_class

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], Mapping[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, Any]], Any] | None = None,
        n_trials: int = 20,
        direction: str | Sequence[str] = "minimize",
        backend: str | Study = "optuna",
        hp_name: Callable[[Any], str] | None = None,
        **options: Any,
    ) -> BestRun | list[BestRun]:
        """Train with many sets of hyper-parameters and return the best. Collective.

        Each trial is a training of its own in ``<output_dir>/run-<number>``, with a new model of
        ``model_init``. A search that was killed goes on: with the trial that was under way, where
        it was, and with as many others as are missing.

        Args:
            hp_space: trial -> values by the names of arguments; others are for ``model_init``.
            compute_objective: metrics -> what is searched for; None: their sum, or the loss.
            n_trials: how many, in all lives of the search.
            direction: ``minimize``, ``maximize``, or one of them for each objective.
            backend: ``optuna``, or a study of yours (:class:`resilient.train.search.study.Study`).
            hp_name: trial -> its name, for ``trial_name`` of the state.
            **options: of ``optuna.create_study``: storage, study_name, sampler, pruner.

        Raises:
            ConfigError: there is no ``model_init``, or Optuna is not installed.
        """
        plan = searching.Plan(hp_space, compute_objective, n_trials, direction, hp_name)
        found = searching.start(self, plan, backend, options)
        return found[0] if isinstance(direction, str) else found

    def register(
        self,
        name: str,
        stateful: Stateful,
        scope: Literal["replicated", "rank"] = "replicated",
    ) -> None:
        """Save and restore something of yours with every checkpoint.

        Args:
            name: the part's name in the checkpoint.
            stateful: has ``state_dict`` and ``load_state_dict``.
            scope: ``replicated`` if all ranks hold the same, ``rank`` if each has its own.

        Raises:
            ConfigError: the name is taken, by another part of yours or by one of ours.
        """
        if name in RESERVED:
            raise ConfigError(
                f"cannot register `{name}`: the trainer's own parts have this name (reserved: "
                f"{', '.join(RESERVED)}); give it another"
            )
        if name in self.registered:
            raise ConfigError(f"a part named `{name}` is registered already")
        self.registered[name] = Part(stateful, scope)

    def save_model(
        self,
        output_dir: str | None = None,
        _internal_call: bool = False,  # noqa: FBT001, FBT002 - the field's signature
    ) -> None:
        """Write the model for use elsewhere, on rank zero, as ``from_pretrained`` reads it.

        Weights (``model.safetensors``; of PEFT's only the adapter), configurations, the tokenizer
        if it was given, and the arguments (``training_args.json``).

        Collective if the model is sharded: its weights are gathered on rank zero.
        """
        state = gather_state(self.model, keep=self.state.is_world_process_zero)
        if self.state.is_world_process_zero:
            folder = Path(output_dir or self.args.output_dir)
            write_model(self.model, state, folder)
            processing = saved_processing(self.processing_class, self.data_collator)
            write_beside(folder, processing, self.args.to_dict())

    def load_model(self, checkpoint: str) -> str:
        """Load only the weights of a checkpoint, of any run of this model. Collective.

        Nothing else is restored: what is trained next begins at step 0 (``train(False)``, or in an
        output folder of its own). Call it before ``train``.

        Args:
            checkpoint: its path (``runs/other/checkpoint-120``), its repository (the newest), or
                its name in this trainer's own.

        Returns:
            The folder's name of the checkpoint.

        Raises:
            RepositoryNotFound: nothing was ever saved there.
            NothingToResume: there is no such checkpoint.
            IntegrityError: it is damaged; the model is as it was.
            IncompatibleCheckpoint: it holds another model.
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
        """Write a draft of the model's card, ``README.md`` of the output folder, on rank zero.

        It says what it is told, the arguments, and the results of the evaluations so far. Of a
        card that is there the tags are kept, and nothing else. The network is not asked.

        Args:
            language: of the data.
            license: of the model.
            tags: for the Hub.
            model_name: the title; None: the name of the output folder.
            finetuned_from: the model that it was before; None: as its configuration says.
            tasks: identifiers of tasks.
            dataset_tags: identifiers of datasets on the Hub.
            dataset: their names.
            dataset_args: which configuration of each.

        Raises:
            ConfigError: the card that is there cannot be read.
            StoreError: the folder cannot be written; an older card is untouched.
        """
        if self.state.is_world_process_zero:
            about = (language, license, tags, model_name, finetuned_from, tasks)
            told = Told(*about, dataset_tags, dataset, dataset_args)
            write_card(Path(self.args.output_dir), self.model, told, self.args, self.state)

    def save_state(self) -> None:
        """Write ``trainer_state.json`` into the output folder, on rank zero."""
        if self.state.is_world_process_zero:
            self.state.save_to_json(Path(self.args.output_dir) / "trainer_state.json")

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Write metrics to standard output, one to a line, on rank zero."""
        if self.state.is_world_process_zero:
            sys.stdout.write(results.shown(split, metrics))

    def save_metrics(
        self, split: str, metrics: Mapping[str, Any], *, combined: bool = True
    ) -> None:
        """Write ``<split>_results.json`` into the output folder, on rank zero.

        Args:
            split: ``train``, ``eval``, ``test`` or ``all``.
            metrics: what ``train``, ``evaluate`` or ``predict`` returned.
            combined: also add them to ``all_results.json``.
        """
        if self.state.is_world_process_zero:
            results.save(Path(self.args.output_dir), split, metrics, combined=combined)
