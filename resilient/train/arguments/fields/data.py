"""How samples become batches."""

from __future__ import annotations

from dataclasses import dataclass

from resilient.train.arguments.fields.option import option


@dataclass
class DataArguments:
    """Loaders, columns and the order of samples."""

    dataloader_num_workers: int = option(0, "processes that load data; 0 loads in the loop")
    dataloader_drop_last: bool = option(default=False, help="drop an incomplete last round")
    dataloader_pin_memory: bool = option(default=True, help="pin batches (CUDA only)")
    dataloader_prefetch_factor: int | None = option(None, "batches loaded ahead per worker")
    dataloader_persistent_workers: bool = option(default=False, help="keep workers over epochs")
    dataloader_multiprocessing_context: str | None = option(
        None, "how workers start: fork, spawn, forkserver; None: torch's default"
    )
    dataloader_in_order: bool = option(
        default=True, help="take batches in the order in which they were asked for"
    )
    remove_unused_columns: bool = option(
        default=True, help="keep from the model what its forward does not take by name"
    )
    label_names: list[str] | None = option(None, "keys of a batch that are labels")
    train_sampling_strategy: str = option(
        "random", "order of samples: random, sequential, group_by_length, batch_rebalance"
    )
    length_column_name: str = option("length", "column with the lengths, for group_by_length")
