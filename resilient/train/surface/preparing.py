"""What users override of a batch on its way to the model: where it goes, and what is taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from resilient.train.arguments.distribution import copies_ahead
from resilient.train.model.batch import split_columns, to_device
from resilient.train.reporting import ColumnsUnused

if TYPE_CHECKING:
    from torch import nn

    from resilient.train.arguments import TrainingArguments
    from resilient.train.session import Session


class PreparingHooks:
    """The part of :class:`resilient.Trainer` that prepares batches, with the field's names."""

    model: nn.Module
    args: TrainingArguments
    session: Session
    _told_unused: bool = False

    def _used_columns(self, inputs: Any) -> Any:
        """Return what the model's forward takes; tell once what it does not."""
        if not self.args.remove_unused_columns:
            return inputs
        used, unused = split_columns(inputs, self.model)
        self._tell_unused(unused)
        return used

    def _tell_unused(self, unused: tuple[str, ...]) -> None:
        """Tell once which columns the model is not given."""
        if unused and not self._told_unused and self.session.world.is_coordinator:
            self.session.emit(ColumnsUnused(unused))
        self._told_unused |= bool(unused)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Return a batch on the device; overridden, it prepares those of evaluation too."""
        if type(self)._prepare_input is not PreparingHooks._prepare_input:  # noqa: SLF001
            return self._prepare_input(inputs)
        if not self._on_gpu:
            return inputs
        return to_device(inputs, self.session.device, ahead=copies_ahead(self.args))

    def _prepare_input(self, data: Any) -> Any:
        """Return a tensor on the device; called for whatever holds tensors, too (overridden)."""
        if isinstance(data, Mapping):
            kind: Any = type(data)
            return kind({name: self._prepare_input(one) for name, one in data.items()})
        if isinstance(data, (tuple, list)):
            return type(data)(self._prepare_input(one) for one in data)
        return to_device(data, self.session.device, ahead=copies_ahead(self.args))

    @property
    def _on_gpu(self) -> bool:
        return self.session.device.type != "cpu"
