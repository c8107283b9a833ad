"""``batch_eval_metrics``: metrics that are computed batch by batch, and hold no predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.train.evaluation.evaluate import EvalPrediction
from resilient.train.evaluation.gather import first_of, gather_objects, nested

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from resilient.train.evaluation.evaluate import Share


class BatchMetrics:
    """Calls ``compute_metrics(prediction, compute_result=...)`` with each batch of a dataset.

    Every rank makes the same calls, in the dataset's order, whatever the number of ranks; so all
    must run as many batches as the others (``in_step`` of the share). Tensors are on the host.

    Args:
        compute: keeps what it needs of a batch, and returns metrics when ``compute_result``.
        share: which batches are this rank's.
        include: ``include_for_metrics``.
    """

    def __init__(self, compute: Callable[..., Any], share: Share, include: list[str]) -> None:
        self._compute = compute
        self._share = share
        self._include = include
        self._seen = 0
        self._last: EvalPrediction | None = None

    def add(self, loss: torch.Tensor | None, predictions: Any, labels: Any, inputs: Any) -> None:
        """Take one batch of each rank. Collective."""
        mine = None
        if self._share.counts(self._seen) and not self._share.is_stand_in:
            mine = nested(_on_host, (predictions, labels, inputs, loss))
        self._seen += 1
        for one in gather_objects(mine, self._share.world.size):
            if one is not None:
                self._take(*one)

    def result(self) -> Mapping[str, Any]:
        """Return the metrics, of the last call."""
        if self._last is None:
            return {}
        metrics: Mapping[str, Any] = self._compute(self._last, compute_result=True)
        return metrics

    def _take(self, predictions: Any, labels: Any, inputs: Any, loss: Any) -> None:
        """Hand over the batch before: which one is the last is known when no other comes."""
        if predictions is None or labels is None:
            return
        if self._last is not None:
            self._compute(self._last, compute_result=False)
        losses = None
        if loss is not None and "loss" in self._include:
            losses = loss.repeat(len(first_of(predictions)))
        self._last = EvalPrediction(
            predictions, labels, inputs if "inputs" in self._include else None, losses
        )


def _on_host(value: torch.Tensor) -> torch.Tensor:
    return value.detach().cpu()
