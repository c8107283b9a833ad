"""Where a run writes, how long it trains, and what is random in it."""

from __future__ import annotations

from dataclasses import dataclass

from resilient.train.arguments.fields.option import option


@dataclass
class BasicArguments:
    """The folder, the length, the batch and the seeds."""

    output_dir: str = option("trainer_output", "folder for checkpoints, logs and models")
    do_train: bool = option(default=False, help="for scripts: whether to train")
    do_eval: bool = option(
        default=False, help="for scripts: whether to evaluate; set by `eval_strategy`"
    )
    do_predict: bool = option(default=False, help="for scripts: whether to predict")
    resume_from_checkpoint: str | None = option(None, "for scripts: what to give to `train`")

    num_train_epochs: float = option(3.0, "passes over the training data")
    max_steps: int = option(-1, "optimizer steps in all; above 0 it overrides num_train_epochs")
    per_device_train_batch_size: int = option(8, "samples per rank and micro-batch")
    per_device_eval_batch_size: int = option(8, "samples per rank and batch of evaluation")
    auto_find_batch_size: bool = option(
        default=False, help="when memory runs out, go on with a smaller batch"
    )

    seed: int = option(42, "seed of Python's, NumPy's and torch's random numbers")
    data_seed: int | None = option(None, "seed of the order of samples; None: seed")
    random_numbers: str = option(
        "own", "own, or transformers: drawn as its Trainer draws them, for the same losses"
    )
    full_determinism: bool = option(
        default=False, help="deterministic algorithms only, and the environment that they need"
    )
    use_cpu: bool = option(default=False, help="train on the CPU though a GPU is there")

    debug: str | list[str] = option("", "underflow_overflow, tpu_metrics_debug")
    skip_memory_metrics: bool = option(default=True, help="do not measure memory")
    torch_empty_cache_steps: int | None = option(
        None, "steps between emptying the device's cache of free memory; None: never"
    )

    @property
    def order_seed(self) -> int:
        """The seed of the order of samples."""
        return self.seed if self.data_seed is None else self.data_seed
