"""How a trainer gets its optimizer and its schedule: given, or made from the arguments."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

from resilient.errors import ConfigError
from resilient.train import optimizers, schedules

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from resilient.train.arguments import TrainingArguments


class MakingHooks:
    """What optimises, overridable by the field's names.

    An override of ``create_optimizer`` or ``create_scheduler`` sets what it makes on the trainer,
    or returns it; both are done here.

    Attributes:
        optimizer_cls_and_kwargs: a class and its options, over our groups of parameters.
        makes_scheduler: whether the scheduler is ours, and may be made anew for another length.
    """

    args: TrainingArguments
    model: nn.Module
    optimizer: Optimizer | None
    lr_scheduler: LRScheduler | None
    optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None
    makes_scheduler: bool = True
    _given: tuple[Any, Any] = (None, None)
    _given_states: tuple[Any, Any] | None = None

    def create_optimizer(self) -> Optimizer:
        """Make ``self.optimizer`` unless one was given, and return it.

        What ``get_decay_parameter_names`` leaves out (biases and norms) is in a group of its own,
        without weight decay.
        """
        if self.optimizer is None:
            recipe = self.optimizer_cls_and_kwargs
            if recipe is None:
                recipe = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            self._require_decay_to_count(recipe[1])
            names = self.get_decay_parameter_names(self.model)
            self.optimizer = optimizers.make_optimizer(self.args, self.model, recipe, names)
        return self.optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters that weight decay applies to."""
        return optimizers.decay_parameter_names(model)

    def _require_decay_to_count(self, options: Mapping[str, Any]) -> None:
        """Refuse an override that the groups of such an optimizer would not heed.

        Raises:
            ConfigError: it names what decays, and the options hold groups of their own.
        """
        kind, ours = type(self), MakingHooks
        makes_groups = kind.get_optimizer_cls_and_kwargs is not ours.get_optimizer_cls_and_kwargs
        if makes_groups or kind.get_decay_parameter_names is ours.get_decay_parameter_names:
            return
        if "params" in options and self.optimizer_cls_and_kwargs is None:
            raise ConfigError(
                f"`{kind.__name__}.get_decay_parameter_names` would not count: "
                f"`{self.args.optim}` has groups of its own",
                hint="override `get_optimizer_cls_and_kwargs`, and return those groups as `params`",
            )

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[Optimizer], dict[str, Any]]:
        """Return the class that ``args.optim`` names, and its options but for the parameters.

        ``create_optimizer`` calls it, so an override is obeyed. Options may hold the parameters
        or their groups by the name ``params``, as they do for optimizers that treat modules
        differently (GaLore, APOLLO, Muon).

        Args:
            args: of the run.
            model: whose parameters they will be; only such optimizers need it.

        Raises:
            ConfigError: an option is not the optimizer's, the package that it comes from is not
                installed, or it needs the model and none is given.
        """
        return optimizers.optimizer_recipe(args, model)

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LRScheduler:
        """Make ``self.lr_scheduler`` unless one was given, and return it."""
        if self.lr_scheduler is None:
            self.lr_scheduler = schedules.create_scheduler(
                self.args, optimizer or self.create_optimizer(), num_training_steps
            )
        return self.lr_scheduler

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Make both; this is what ``train`` calls, and what may be overridden in one."""
        self.optimizer = self.create_optimizer()
        self.lr_scheduler = self.create_scheduler(num_training_steps, self.optimizer)

    def make_optimizer_and_scheduler(self, steps: int) -> tuple[Optimizer, LRScheduler]:
        """Return both for a run of ``steps``, from whatever was given or overridden.

        Raises:
            ConfigError: an override left one of them out, or DeepSpeed's config names a schedule
                and another one is here.
        """
        self.create_optimizer_and_scheduler(steps)
        if self.optimizer is None or self.lr_scheduler is None:
            raise ConfigError(
                "`create_optimizer_and_scheduler` left `self.optimizer` or `self.lr_scheduler` None"
            )
        both = MakingHooks.create_optimizer_and_scheduler
        if type(self).create_optimizer_and_scheduler is not both:
            # Only the override knows how to make its schedule for another length.
            self.makes_scheduler = False
        schedules.require_own(self.args, self.lr_scheduler)
        return self.optimizer, self.lr_scheduler

    def _note_given_states(self) -> None:
        """Remember how a given optimizer and scheduler are before the first training."""
        if self._given_states is None:
            optimizer, scheduler = (
                None if one is None else deepcopy(one.state_dict()) for one in self._given
            )
            self._given_states = (optimizer, scheduler)

    def _make_optimizers_anew(self) -> None:
        """Forget the optimizer and the scheduler of an earlier training.

        What the trainer made is made again. What was given goes back to the state that it had
        before the first training.
        """
        self.optimizer, self.lr_scheduler = self._given
        for one, state in zip(self._given, self._given_states or (), strict=False):
            if one is not None:
                one.load_state_dict(deepcopy(state))

    def _take_optimizers(
        self,
        optimizers: tuple[Optimizer | None, LRScheduler | None],
        given: tuple[type[Optimizer], dict[str, Any]] | None,
    ) -> None:
        self.optimizer, self.lr_scheduler = self._given = optimizers
        self.makes_scheduler = self.lr_scheduler is None
        if given is not None and self.optimizer is not None:
            raise ConfigError(
                "`optimizers` holds an optimizer and `optimizer_cls_and_kwargs` is given: leave "
                "one of them out"
            )
        self.optimizer_cls_and_kwargs = given
