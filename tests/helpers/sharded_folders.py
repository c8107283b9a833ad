"""Folders of Transformers with what FSDP and DeepSpeed leave there."""

from __future__ import annotations

import json
import math
import warnings

import torch
import torch.distributed.checkpoint as dcp

STEP = 7
SHAPES = {"lin.weight": (1, 4), "lin.bias": (1,)}


def values(start):
    """Return a number of its own for each place of each parameter."""
    tensors, place = {}, start
    for name, shape in SHAPES.items():
        count = math.prod(shape)
        tensors[name] = torch.arange(place, place + count, dtype=torch.float32).view(shape)
        place += count
    return tensors


def optimizer():
    first, second = values(100), values(200)
    state = {
        name: {"step": torch.tensor(7.0), "exp_avg": first[name], "exp_avg_sq": second[name]}
        for name in SHAPES
    }
    groups = [
        {"lr": 0.5, "betas": (0.9, 0.99), "weight_decay": decay, "params": [name]}
        for name, decay in zip(SHAPES, (0.1, 0.0), strict=True)
    ]
    return {"state": state, "param_groups": groups}


def write_fsdp(folder, kind):
    """Leave what accelerate leaves: distributed checkpoints, or whole files."""
    for name in ("model.safetensors", "optimizer.pt"):
        (folder / name).unlink()
    if kind == "full":
        torch.save(values(0), folder / "pytorch_model_fsdp.bin")
        torch.save(optimizer(), folder / "optimizer.bin")
        return
    for name, state in (
        ("pytorch_model_fsdp_0", {"model": values(0)}),
        ("optimizer_0", {"optimizer": optimizer()}),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is a single process
            dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / name), no_dist=True)


def write_zero(folder, stage, ranks, *, vectors=1, **tracker):
    """Leave what an engine leaves, cut as DeepSpeed cuts."""
    for name in ("model.safetensors", "optimizer.pt"):
        (folder / name).unlink()
    engine = folder / f"global_step{STEP}"
    engine.mkdir()
    (folder / "latest").write_text(engine.name)
    beside = folder / "trainer_state.json"
    if beside.exists():
        beside.write_text(json.dumps({**json.loads(beside.read_text()), "global_step": STEP}))
    shapes = [{name: torch.Size(shape)} for name, shape in SHAPES.items()]
    config = {"zero_optimization": {"stage": stage, **tracker.pop("config", {})}}
    whole = {name: torch.zeros(0 if stage == 3 else SHAPES[name]) for name in SHAPES}
    for rank in range(ranks):
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        model_state = {
            "module": {**whole, "seen": torch.tensor(28)},
            "param_shapes": shapes,
            "ds_config": config,
            "global_steps": STEP,
            "dp_world_size": ranks,
            **tracker,
        }
        torch.save(model_state, engine / f"{prefix}mp_rank_00_model_states.pt")
        slices_by_kind = {
            kind: [line[rank] for line in cut_values(stage, ranks, start)]
            for kind, start in (("fp32", 0), ("exp_avg", 100), ("exp_avg_sq", 200))
        }
        if stage == 3 and vectors == 1:  # all groups in one vector
            slices_by_kind = {kind: [torch.cat(lines)] for kind, lines in slices_by_kind.items()}
        state = {
            nth: {"step": torch.tensor(7.0), "exp_avg": entry, "exp_avg_sq": second}
            for nth, (entry, second) in enumerate(
                zip(slices_by_kind["exp_avg"], slices_by_kind["exp_avg_sq"], strict=True)
            )
        }
        groups = [{**entry, "params": [0]} for entry in optimizer()["param_groups"]]
        base = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
        flat = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        optimizer_state = {
            base: {"state": state, "param_groups": groups},
            flat: slices_by_kind["fp32"],
        }
        optimizer_state["dynamic_loss_scale"] = tracker.get("dynamic_loss_scale", False)
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer_state}, engine / name)
    return engine


def cut_values(stage, ranks, start):
    """Return what each rank holds of each group."""
    lines = []
    for tensor in values(start).values():
        width = math.ceil(tensor.numel() / ranks)
        if stage < 3:  # the line is made a multiple of twice the ranks
            width = 2 * math.ceil(tensor.numel() / (2 * ranks))
        flat = torch.nn.functional.pad(
            tensor.reshape(-1), (0, width * ranks - tensor.numel()), value=9
        )
        lines.append(flat.split(width))
    return lines
