"""One rank that evaluates an uneven dataset in every way there is.

python evaluation_worker.py OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from resilient.train.arguments import TrainingArguments
from resilient.train.trainer import Trainer

# No multiples of the batch; on 3 ranks one has a batch less than the others, or none.
SIZES, BATCH = (19, 6), 4
WAYS = {
    "plain": {},
    "spilled": {"eval_accumulation_steps": 2},
    "spilled at once": {"eval_accumulation_steps": 1},
    "spilled late": {"eval_accumulation_steps": 50},
    "objects": {"eval_use_gather_object": True},
    "apart": {"eval_do_concat_batches": False},
    "with more": {"include_for_metrics": ["inputs", "loss"]},
    "a stream": {"include_for_metrics": ["loss"]},
    "a stream by batch": {"batch_eval_metrics": True, "dataloader_num_workers": 2},
    "own loop": {},
    "by batch": {"batch_eval_metrics": True, "include_for_metrics": ["inputs", "loss"]},
}


class Rows(Dataset):
    """Sequences of different lengths, padded to the longest of their batch by ``together``."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = 1 + index * 7 % 5
        return {"x": torch.randn(length, 3, generator=generator), "label": index % 3}


class Stream(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        rows = Rows(self.size)
        return (rows[index] for index in range(self.size))


def together(samples):
    longest = max(len(one["x"]) for one in samples)
    padded = [
        nn.functional.pad(one["x"], (0, 0, 0, longest - len(one["x"])), value=-100.0)
        for one in samples
    ]
    return {"x": torch.stack(padded), "labels": torch.tensor([one["label"] for one in samples])}


class Nested(nn.Module):
    """Returns predictions in a tuple in a dict, of another length for each batch, and texts."""

    main_input_name = "x"

    def __init__(self, *, texts):
        super().__init__()
        self.texts = texts
        torch.manual_seed(3)
        self.layer = nn.Linear(3, 3)

    def forward(self, x, labels):
        scores = self.layer(x)
        pooled = torch.where(x[..., :1] == -100, 0.0, scores).sum(1)
        more = {"texts": [f"label {one}" for one in labels.tolist()]} if self.texts else {}
        kept = torch.where(x[..., :1] == -100, -100.0, scores)
        return {
            "loss": nn.functional.cross_entropy(pooled, labels),
            "logits": pooled,
            "rest": (kept, {"pooled": pooled.bfloat16()}),
            **more,
            "cache": torch.tensor(0.0),
        }


class OwnLoop(Trainer):
    """Adds up each batch over the ranks, so it needs equally many batches on each of them."""

    def evaluation_loop(self, dataloader, description, *given, **named):
        rounds = 0
        for _ in dataloader:
            rounds += 1
            if dist.is_initialized():
                met = torch.ones(1)
                dist.all_reduce(met)
                assert met.item() == dist.get_world_size()
        output = super().evaluation_loop(dataloader, description, *given, **named)
        batches = -(-output.num_samples // BATCH)
        assert rounds == -(-batches // self.session.data_world.size)
        return output


class Calls:
    """Remembers what it was asked to judge."""

    def __init__(self):
        self.seen = []

    def __call__(self, prediction, compute_result=None):
        self.seen.append((tuple(prediction), compute_result))
        return {"calls": len(self.seen)}


def evaluate(out, name, size):
    calls = Calls()
    kind = Stream if "stream" in name else Rows
    trainer = (OwnLoop if name == "own loop" else Trainer)(
        Nested(texts=name == "objects"),
        TrainingArguments(
            out,
            per_device_eval_batch_size=BATCH,
            use_cpu=True,
            disable_tqdm=True,
            remove_unused_columns=False,
            **WAYS[name],
        ),
        data_collator=together,
        eval_dataset=kind(size),
        compute_metrics=calls,
    )
    metrics = trainer.evaluate(ignore_keys=["cache"])
    judged, calls.seen = calls.seen, []
    output = trainer.predict(kind(size), ignore_keys=["cache"])
    for timed in ("runtime", "samples_per_second", "steps_per_second"):
        metrics.pop(f"eval_{timed}")
    return metrics, judged, output[:2], trainer.session.world.rank


def evaluate_all(out):
    return {(name, size): evaluate(out, name, size) for name in WAYS for size in SIZES}


def main(out):
    found = evaluate_all(out)
    rank = found["plain", SIZES[0]][-1]
    torch.save({name: one[:-1] for name, one in found.items()}, Path(out) / f"found-{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
