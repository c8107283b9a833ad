"""Train one model with replicas and with shards, and say what this rank held.

python fsdp_worker.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from resilient import Trainer, TrainerCallback, TrainingArguments


class Rows(Dataset):
    def __init__(self, size) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 6, generator=generator)
        self.y = torch.randint(0, 3, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


class Block(nn.Module):
    def __init__(self, width) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden):
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3 + dist.get_rank() if dist.is_initialized() else 3)
        self.first = nn.Linear(6, 17, bias=False)  # the norm would cancel it
        self.batch_norm = nn.BatchNorm1d(17)
        self.blocks = nn.ModuleList(Block(17) for _ in range(3))
        self.last = nn.Linear(17, 3)
        self.means = []  # the running mean with which each forward pass of training began

    def forward(self, x, labels):
        if self.training:
            self.means.append(self.batch_norm.running_mean.tolist())
        hidden = self.batch_norm(self.first(x))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.last(hidden)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Look(TrainerCallback):
    """Looks at the optimizer in the middle of training."""

    def __init__(self) -> None:
        self.found = {}

    def on_step_end(self, args, state, control, /, **context):
        model, optimizer = context["model"], context["optimizer"]
        moments = [one["exp_avg"] for one in optimizer.state.values()]
        named = dict(model.named_parameters())
        self.found = {
            "plain_parameters": [n for n, one in named.items() if not isinstance(one, DTensor)],
            "plain_moments": [one.shape for one in moments if not isinstance(one, DTensor)],
            "total": sum(one.numel() for one in named.values()),
        }
        if args.parallelism == "fsdp":
            self.found["held"] = sum(one.to_local().numel() for one in named.values())
            self.found["row_bytes"] = sum(one[0].numel() for one in named.values())


def train(folder, parallelism):
    look = Look()
    trainer = Trainer(
        Net(),
        TrainingArguments(
            output_dir=str(folder / parallelism),
            parallelism=parallelism,
            fsdp_transformer_layer_cls_to_wrap="Block" if parallelism == "fsdp" else "",
            use_cpu=True,
            max_steps=5,
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            max_grad_norm=0.05,
            learning_rate=0.01,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=2,
            per_device_eval_batch_size=4,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Rows(96),
        eval_dataset=Rows(25),
        callbacks=[look],
    )
    trainer.train()
    history = trainer.state.log_history
    evaluations = [one["eval_loss"] for one in history if "eval_loss" in one]
    norms = [one["grad_norm"] for one in history if "grad_norm" in one]
    return trainer, look.found, evaluations, norms


def main(folder):
    torch.set_num_threads(1)
    replicas, _, evaluations_by_ddp, _ = train(folder, "ddp")
    shards, found, evaluations, norms = train(folder, "fsdp")
    shards.save_model(str(folder / "exported"))
    assert len(shards.predict(Rows(5)).label_ids) == 5
    state = shards.model.state_dict()
    by_fsdp = {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).clone()
        for name, one in state.items()
    }
    # From here all ranks see the same samples: what still differs, differed before.
    shards.model.train()
    shards.model(Rows(8).x, Rows(8).y)["loss"].backward()
    dist.barrier()
    result = found | {
        "evaluations": evaluations,
        "evaluations_by_ddp": evaluations_by_ddp,
        "norm": norms,
        "means": shards.model.means,
        "running_mean": shards.model.batch_norm.running_mean,
        "by_ddp": replicas.model.state_dict(),
        "by_fsdp": by_fsdp,
        "exported": load_file(folder / "exported" / "model.safetensors"),
    }
    torch.save(result, folder / f"result-{dist.get_rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
