"""What arguments and the launcher say together: who this process is, and on which device."""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from resilient.train.arguments.fields.basic import BasicArguments
from resilient.train.arguments.fields.distributed import DistributedArguments
from resilient.train.arguments.fields.logging import LoggingArguments
from resilient.train.arguments.fields.optimization import OptimizationArguments
from resilient.train.arguments.fields.saving import RepositoryArguments, SavingArguments
from resilient.train.state import absolute_steps
from resilient.vault.registry.retention import parse_retention
from resilient.world.launch import read_launch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from resilient.vault.registry.retention import Retention
    from resilient.world.world import World

NOT_DISTRIBUTED = "not_distributed"
DISTRIBUTED = "distributed"
# The standard library's numbers; Transformers has `detail` too, which is all that there is.
_LOUDNESS = {"detail": 10, "debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


class Derived(
    DistributedArguments,
    SavingArguments,
    RepositoryArguments,
    LoggingArguments,
    OptimizationArguments,
    BasicArguments,
):
    """The properties that the field knows; the launcher's variables say who this process is."""

    @property
    def _world(self) -> World:
        return read_launch(os.environ).world

    @property
    def world_size(self) -> int:
        """How many ranks train together."""
        return self._world.size

    @property
    def process_index(self) -> int:
        """This process's rank among all."""
        return self._world.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its host."""
        return self._world.local_rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its host; 0 if nobody launched it."""
        return self._world.local_rank

    @property
    def parallel_mode(self) -> str:
        """``distributed`` if several ranks train together, else ``not_distributed``."""
        return DISTRIBUTED if self.world_size > 1 else NOT_DISTRIBUTED

    @property
    def device(self) -> torch.device:
        """The device that this process trains on."""
        import torch

        if self.n_gpu == 0:
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank)

    @property
    def n_gpu(self) -> int:
        """GPUs of this process: one, or none; more GPUs are more processes."""
        import torch

        return 0 if self.use_cpu or not torch.cuda.is_available() else 1

    @property
    def train_batch_size(self) -> int:
        """Samples of this process per micro-batch of training."""
        return self.per_device_train_batch_size * max(1, self.n_gpu)

    @property
    def eval_batch_size(self) -> int:
        """Samples of this process per batch of evaluation."""
        return self.per_device_eval_batch_size * max(1, self.n_gpu)

    @property
    def should_save(self) -> bool:
        """Whether this process writes what is written once: models, states, metrics."""
        return self._world.is_coordinator

    @property
    def should_log(self) -> bool:
        """Whether this process shows logs."""
        return self.local_process_index == 0 if self.log_on_each_node else self.process_index == 0

    def get_process_log_level(self) -> int:
        """Return how loud an event must be for this process to show it (logging's numbers).

        ``log_level`` counts where logs are shown, ``log_level_replica`` elsewhere; ``passive`` is
        ``info`` on the first rank of all and ``warning`` on the others.
        """
        name = self.log_level if self.should_log else self.log_level_replica
        if name == "passive":
            name = "info" if self.process_index == 0 else "warning"
        return _LOUDNESS[name]

    @property
    def ddp_timeout_delta(self) -> timedelta:
        """How long a collective may take."""
        return timedelta(seconds=self.ddp_timeout)

    @property
    def retention(self) -> Retention:
        """Which checkpoints stay."""
        return parse_retention(self.save_retention or {}, self.save_total_limit)

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the steps of warm-up of a run; a ratio is rounded up."""
        return absolute_steps(self.warmup_steps, num_training_steps)

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:  # noqa: FBT001, FBT002, ARG002 - the field's signature
        """Let one process work first, and the others when it is done; they find what it cached.

        Without a process group there is nobody to wait for. Collective.

        Args:
            local: the first of each host goes first, else the first of all.
            desc: what is done, for people who read the script.
        """
        import torch.distributed as dist

        first = self.local_process_index == 0 if local else self.process_index == 0
        together = dist.is_available() and dist.is_initialized()
        if together and not first:
            dist.barrier()
        try:
            yield
        finally:
            if together and first:
                dist.barrier()
