"""How much a run has computed: tokens and floating-point operations, of all ranks and lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from resilient.train.model.losses import base_of
from resilient.train.reporting import TokensNotCounted

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from resilient.events import Emitter
    from resilient.train.state import TrainerState

# Operations are added over ranks in two halves, as their number outgrows 64 bits.
_HALF_BITS = 32


@dataclass(slots=True)
class Counter:
    """Counts on this rank, and adds to the state what all ranks counted.

    It holds nothing when a checkpoint is made: ``settle`` is called before. Numbers are whole, so
    they do not depend on when that was.

    Attributes:
        state: has ``num_input_tokens_seen`` and ``total_flos``.
        device: where ranks add.
        ranks: how many add.
        copies: how many of them train on the same samples.
        tokens_of: a batch -> its tokens; None if nobody wants them.
        flos_of: a batch -> its operations; None if nobody can say.
    """

    state: TrainerState
    device: torch.device
    ranks: int = 1
    copies: int = 1
    tokens_of: Callable[[Any], int] | None = None
    flos_of: Callable[[Any], int] | None = None
    is_on: bool = field(init=False)
    _tokens: int = 0
    _flos: int = 0

    def __post_init__(self) -> None:
        self.is_on = self.tokens_of is not None or self.flos_of is not None

    def add(self, inputs: Any) -> None:
        """Count a micro-batch that was trained on."""
        if self.tokens_of is not None:
            self._tokens += self.tokens_of(inputs)
        if self.flos_of is not None:
            self._flos += int(self.flos_of(inputs))

    def mark(self) -> tuple[int, int]:
        """Return what ``rewind`` needs to forget what is counted from now on."""
        return self._tokens, self._flos

    def rewind(self, mark: tuple[int, int]) -> None:
        """Forget what was counted since ``mark``."""
        self._tokens, self._flos = mark

    def end_step(self) -> None:
        """Tell the state the tokens of the step, if somebody wants them. Collective."""
        if self.tokens_of is not None:
            self.settle()

    def settle(self) -> None:
        """Tell the state what was counted since. Collective, if anything is counted."""
        if not self.is_on:
            return
        tokens, flos = self._tokens, self._flos
        self._tokens = self._flos = 0
        if self.ranks > 1:
            high, low = divmod(flos, 1 << _HALF_BITS)
            counts = torch.tensor([tokens, high, low], device=self.device)
            dist.all_reduce(counts)
            tokens, high, low = (one // self.copies for one in counts.tolist())
            flos = (high << _HALF_BITS) + low
        self.state.num_input_tokens_seen += tokens
        self.state.total_flos += flos


class TokenCount:
    """The tokens of a batch: of its main input, all or without padding.

    Args:
        model: ``main_input_name`` says what its main input is; ``input_ids`` by default.
        padding: the token that does not count where there is no ``attention_mask``; None: none.
        emit: hears once of batches that cannot be counted.
        skips_padding: whether padding does not count.
    """

    def __init__(
        self, model: nn.Module, padding: int | None, emit: Emitter, *, skips_padding: bool
    ) -> None:
        self._name = main_input_name(model)
        self._padding = padding
        self._emit = emit
        self._skips_padding = skips_padding
        self._told = False

    def __call__(self, inputs: Any) -> int:
        """Return the number of tokens; 0 where the main input is not there."""
        main = inputs.get(self._name) if isinstance(inputs, Mapping) else None
        if main is None:
            self._tell(f"it holds no `{self._name}`; `main_input_name` of the model names another")
            return 0
        if not self._skips_padding:
            return int(main.numel())
        if "attention_mask" in inputs:
            return int(inputs["attention_mask"].sum())
        if self._padding is not None:
            return int((main != self._padding).sum())
        self._tell("nothing says which are padding, so all are counted")
        return int(main.numel())

    def _tell(self, why: str) -> None:
        if not self._told:
            self._told = True
            self._emit(TokensNotCounted(why))


def main_input_name(model: nn.Module) -> str:
    """Return the name of a model's main input in a batch."""
    return str(getattr(base_of(model), "main_input_name", "input_ids"))


def transformer_flos(model: nn.Module, parameters: int, inputs: Any) -> int:
    """Return ``6 * tokens * parameters``: forward and backward of a transformer, approximately.

    0 where the main input is not in the batch.
    """
    main = inputs.get(main_input_name(model)) if isinstance(inputs, Mapping) else None
    return 0 if main is None else 6 * int(main.numel()) * parameters
