"""The first micro-batch of a life, computed by every rank before any step is made of it.

Ranks that compute the same micro-batch must get the same bits, and a pass must leave the model as
it was. Both are seen before anything is trained, on the very operations that train it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from resilient.errors import ConfigError
from resilient.state.rng import RandomState
from resilient.strategies.canonical.probing import checksum_of, digest_of
from resilient.strategies.canonical.refusing import Unchanged, refuse_changed, tensors_of
from resilient.train.data.sampling import KeyedDataset, seed_worker
from resilient.train.reduction.leaves import LeafSampler

if TYPE_CHECKING:
    from resilient.train.run import Run
    from resilient.train.trainer import Trainer


def rehearse(trainer: Trainer, run: Run, seed: int) -> str:
    """Compute the first micro-batch of the next step, and leave no trace of it. Collective.

    Args:
        trainer: whose model it is; its ``compute_loss`` is called.
        run: of it.
        seed: of the random numbers of micro-batches.

    Returns:
        A digest of the loss and all gradients; empty if there is no batch to compute.

    Raises:
        ConfigError: the pass changes a buffer or parameter, or has other bits the second time.
    """
    before = RandomState().state_dict()
    try:
        batch = _first_batch(trainer, run)
        if batch is None:
            return ""
        # Only accelerators have kernels that add in whatever order their threads come.
        times = 1 if trainer.session.device.type == "cpu" else 2
        digests = [_pass(trainer, run, batch, seed) for _ in range(times)]
    finally:
        RandomState().load_state_dict(before)
    if len(set(digests)) > 1:
        raise ConfigError(
            "the same micro-batch, computed twice by one rank, gives other gradients, so "
            "reduction='canonical' has no bits to keep: an operation of the model is not "
            "deterministic although torch was told to choose those that are",
            hint="look for kernels of your own, or of a package, that add atomically",
        )
    return digests[0]


def _first_batch(trainer: Trainer, run: Run) -> Any:
    """Return the first micro-batch of the next step; None if nobody can tell which it is."""
    loader, sampler = run.loader, trainer.train_sampler
    if sampler is None or not run.rounds_left() or not isinstance(loader, DataLoader):
        return None
    if not isinstance(loader.dataset, KeyedDataset):
        return None
    first = LeafSampler(run.cursor, run.deal, range(1), sampler.sampling)
    return loader.collate_fn(loader.dataset.__getitems__(next(iter(first))))


def _pass(trainer: Trainer, run: Run, batch: Any, seed: int) -> str:
    before = {name: checksum_of(one) for name, one in tensors_of(run.model)}
    unchanged = Unchanged.of(run.model)
    samples, count = trainer.get_batch_samples(iter([batch]), 1, trainer.session.device)
    seed_worker((seed, trainer.state.global_step, 0))
    for inputs in samples:
        loss = trainer.step_loss(run.model, trainer._prepare_inputs(_copied(inputs)), count)  # noqa: SLF001 - the field's name
        trainer.precision.backward(loss)
    unchanged.require_same(run.model)
    changed = [name for name, one in tensors_of(run.model) if checksum_of(one) != before[name]]
    refuse_changed(run.model, changed)
    gradients = [one.grad for one in run.parameters if one.grad is not None]
    digest = digest_of([loss, *gradients])
    for one in run.parameters:
        one.grad = None
    return digest


def _copied(inputs: Any) -> Any:
    """Return a batch that may be changed: ``compute_loss`` may take entries out of it."""
    return dict(inputs) if isinstance(inputs, dict) else inputs
