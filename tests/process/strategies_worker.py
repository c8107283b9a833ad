"""Runs of one small training under every strategy: unbroken, killed and started again.

python strategies_worker.py FOLDER PORT... [KIND ...]

Each life of each run is a world of its own, which meets at the next port. Each rank writes down
what it held and what it sent (``seen-<rank>``), so that a request that was ignored shows.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import warnings
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from resilient import Trainer, TrainerCallback, TrainingArguments
from resilient.strategies.module_wrapper import find_redirect
from tests.process.deepspeed_forks import exit_codes, fork_world
from tests.process.dying import die_together
from tests.process.overflowing import Overflow
from tests.process.strategy_kinds import KINDS, worlds_of

STEPS = 6
SAVE_STEPS = 2
_HEAVY = (
    *("torch.distributed.pipelining", "resilient.strategies.pipeline.strategy"),
    *("torch.distributed.fsdp", "torch.distributed.tensor", "torch._inductor.compile_fx"),
    *("resilient.strategies.fsdp", "resilient.strategies.fsdp1"),
    "torch.distributed.algorithms.ddp_comm_hooks",
)
_COLLECTIVES = ("all_reduce", "reduce_scatter_single", "all_gather_single", "all_gather")


class Rows(torch.utils.data.Dataset):
    """Points and the class that each belongs to."""

    def __init__(self, size) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = (self.x.sum(1) > 0).long() + (self.x[:, 0] > 0.5).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


class Block(nn.Module):
    def __init__(self, width, dropout) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)
        self.calls = 0
        self.dtypes: set[str] = set()

    def forward(self, hidden):
        self.calls += 1
        inner = torch.tanh(self.up(self.norm(hidden)))
        self.dtypes.add(str(inner.dtype))
        return hidden + self.drop(self.down(inner))


class Shift(nn.Module):
    """Moves the output by a number that training changes: a buffer, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.zeros(3))

    def forward(self, logits):
        if self.training:
            self.by.lerp_(torch.tensor([1.0, 0.0, -1.0], dtype=self.by.dtype), 0.01)
        return logits + self.by


class Tower(nn.Module):
    """Blocks between a first layer and a head; uneven, so that shards are."""

    def __init__(self, kind) -> None:
        super().__init__()
        width = kind.width
        self.spare = nn.Linear(2, 2) if kind.has_spare else None  # never used
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width, kind.dropout) for _ in range(3))
        self.head = nn.Linear(width, 3)
        self.shift = Shift() if kind.has_buffer else None

    def forward(self, x, labels):
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        logits = (logits if self.shift is None else self.shift(logits)).float()
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Sent:
    """The dtypes in which collectives of more than a few numbers were made, by their names."""

    def __init__(self) -> None:
        self.dtypes: dict[str, set[str]] = {name: set() for name in _COLLECTIVES}
        self.numbers = dict.fromkeys(_COLLECTIVES, 0)
        for name in _COLLECTIVES:
            setattr(dist, name, partial(self._call, name, getattr(dist, name)))

    def _call(self, name, collective, *tensors, **options):
        self.numbers[name] += sum(one.numel() for one in tensors if isinstance(one, torch.Tensor))
        # The last tensor is what a rank gives.
        given = [one for one in tensors if isinstance(one, torch.Tensor)] or [options["input"]]
        if given[-1].is_floating_point() and given[-1].numel() > 8:
            self.dtypes[name].add(str(given[-1].dtype).removeprefix("torch."))
        return collective(*tensors, **options)


class Watch(TrainerCallback):
    """Writes down what was held and sent, and dies in the middle of a step."""

    def __init__(self, folder, die_after, holds="") -> None:
        self._folder = folder
        self._die_after = die_after
        self._holds = holds
        self._sent = Sent()
        self.trainer = None
        self.total = 0
        self._gathered = set()

    def on_train_begin(self, args, state, control, /, **context):
        block = context["model"].blocks[0]
        block.register_forward_hook(self._look)

    def _look(self, block, _inputs, _outputs) -> None:
        if block.training:
            weight = block.up.weight
            is_whole = weight.dim() > 1 and not hasattr(weight, "to_local")
            self._gathered.add("whole" if is_whole else "cut")

    def on_step_begin(self, args, state, control, /, **_):
        if self._die_after and state.global_step == self._die_after:
            die_together(self._folder, self._die_after, SAVE_STEPS)

    def on_train_end(self, args, state, control, /, **context):
        model = context["model"]
        here = [one for one in model.parameters() if not one.is_meta]
        said = {
            "held": sum(_local(one).numel() for one in here),
            "total": self.total,
            "moments": sum(
                _local(one["exp_avg"]).numel()
                for one in context["optimizer"].state.values()
                if "exp_avg" in one
            ),
            "kinds": sorted({type(one).__name__ for one in here}),
            "names": [name for name, one in model.named_parameters() if not one.is_meta],
            "losses": [one["loss"] for one in state.log_history if "loss" in one],
            "evaluations": [one["eval_loss"] for one in state.log_history if "eval_loss" in one],
            "norms": [one["grad_norm"] for one in state.log_history if "grad_norm" in one],
            "calls": [block.calls for block in model.blocks],
            "dtypes": sorted(set().union(*(block.dtypes for block in model.blocks))),
            "after_forward": sorted(self._gathered),
            "linear": type(model.blocks[0].up).__name__,
            "sent": {name: sorted(dtypes) for name, dtypes in self._sent.dtypes.items()},
            "numbers": self._sent.numbers,
            "strategy": _details(model),
            "ddp": _ddp_details(self.trainer.model_wrapped),
            "flat": _flat_details(model),
            "scaler": [one.__name__ for one in type(self.trainer.precision.scaler).__mro__],
            "buffers": sorted({str(one.dtype) for one in model.buffers()}),
        }
        rank = os.environ["RANK"]
        (self._folder / f"seen-{rank}").write_text(json.dumps(said))
        if self._holds:
            found = _digests(model, context["optimizer"])
            (self._folder / f"held-{self._holds}-{rank}").write_text(json.dumps(found))


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _digests(model, optimizer):
    """Return a digest of each tensor of the model and the optimizer that is on this rank."""
    found = {}
    for name, one in model.state_dict(keep_vars=True).items():
        if one.is_meta:
            continue
        found[f"model/{name}"] = one
        for kind, value in optimizer.state.get(one, {}).items():
            found[f"optimizer/state/{name}/{kind}"] = value
    return {name: _digest(one) for name, one in found.items()}


def _digest(tensor):
    tensor = tensor.detach()
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return sha256(whole.contiguous().numpy().tobytes()).hexdigest()


def _details(model):
    """Return what FSDP2 was told about the first module that is gathered by itself."""
    units = {name: one for name, one in model.named_modules() if hasattr(one, "unshard")}
    if not units:
        return {}
    state = [*units.values()][:2][-1]._get_fsdp_state()
    spread = [one for one in model.parameters() if hasattr(one, "device_mesh")]
    return {
        "units": list(units),
        "forward_prefetch": len(state._states_to_forward_prefetch),
        "backward_prefetch": [one is state for one in state._states_to_backward_prefetch],
        "mesh": list(spread[0].device_mesh.shape),
        "placements": [str(one) for one in spread[-1].placements],
        "offload": type(state._fsdp_param_group.offload_policy).__name__,
    }


def _flat_details(model):
    """Return what FSDP1 was told about the first module that is gathered by itself."""
    detour = find_redirect(model)
    if detour is None:
        return {}
    wrapper = detour.wrapper
    units = {
        name.replace("_fsdp_wrapped_module.", "").removesuffix("._fsdp_wrapped_module"): one
        for name, one in wrapper.named_modules()
        if isinstance(one, FullyShardedDataParallel)
    }
    told = [*units.values()][:2][-1]
    precision = told.mixed_precision
    return {
        "units": [name.removeprefix("_fsdp_wrapped_module") for name in units],
        "sharding_strategy": told.sharding_strategy.name,
        "backward_prefetch": told.backward_prefetch and told.backward_prefetch.name,
        "forward_prefetch": told.forward_prefetch,
        "use_orig_params": told._use_orig_params,
        "limit_all_gathers": told.limit_all_gathers,
        "offload": told.cpu_offload.offload_params,
        "dtypes": [
            str(getattr(precision, f"{name}_dtype")) for name in ("param", "reduce", "buffer")
        ],
        "device": str(told.compute_device),
        "groups": [
            dist.get_process_group_ranks(one)
            for one in (told.process_group, getattr(told, "_inter_node_pg", None))
            if one is not None
        ],
        "numbers": detour.numbers,
    }


def _ddp_details(model):
    """Return what DDP was told, and what its process group was."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return {}
    group = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    return {
        "find_unused_parameters": model.find_unused_parameters,
        "static_graph": model.static_graph,
        "broadcast_buffers": model.broadcast_buffers,
        "buckets": model._get_ddp_logging_data()["bucket_sizes"].count(",") + 1,
        "backend": dist.get_backend(),
        "timeout_seconds": group.options._timeout.total_seconds(),
        "parts": sorted(model.parts),
    }


def main(folder, ports, kinds):
    for name in _HEAVY:
        import_module(name)
    gc.collect()
    gc.freeze()
    for (run, kind, die_after, steps), port in zip(worlds_of(kinds), ports, strict=True):
        size = KINDS[kind].ranks
        ranks = fork_world(size, port, partial(train, folder / run, kind, die_after, steps))
        if ranks is None:
            return
        ends = exit_codes(ranks)
        assert ends == ({-signal.SIGKILL} if die_after else {0}), (run, kind, ends)


def train(folder, kind, die_after, steps=0):
    # FSDP1 is old, and torch warns of ways to use it.
    warnings.simplefilter("error" if KINDS[kind].version == 1 else "ignore")
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    torch.manual_seed(int(os.environ["RANK"]))  # all begin as rank 0 all the same
    folder.mkdir(exist_ok=True)
    watch = Watch(folder, die_after, f"{kind}-{steps}" if steps else "")
    model = Tower(KINDS[kind])
    watch.total = sum(one.numel() for one in model.parameters())
    trainer = Trainer(
        model,
        TrainingArguments(
            **{
                "output_dir": str(folder),
                "max_steps": steps or STEPS,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "learning_rate": 0.01,
                "max_grad_norm": 1.0,
                "warmup_steps": 2,
                "lr_scheduler_type": "cosine",
                "logging_steps": 1,
                "eval_strategy": "steps",
                "eval_steps": 3,
                "save_strategy": "steps",
                "save_steps": SAVE_STEPS,
                "disable_tqdm": True,
                "use_cpu": True,
                **KINDS[kind].arguments,
            }
        ),
        train_dataset=Rows(KINDS[kind].rows),
        eval_dataset=Rows(13),
        callbacks=[watch],
    )
    watch.trainer = trainer
    if KINDS[kind].overflows:
        trainer.add_callback(Overflow(trainer, folder))
    trainer.train()
    trainer.save_model(str(folder / "exported"))


if __name__ == "__main__":
    numbers = [int(one) for one in sys.argv[2:] if one.isdigit()]
    main(Path(sys.argv[1]), numbers, [one for one in sys.argv[2:] if not one.isdigit()])
