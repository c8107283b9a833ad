"""A model's stages in one process, one after another."""

from __future__ import annotations

import torch

from resilient.strategies.parallelism_options import PipelineOptions
from resilient.strategies.pipeline.partition import StageModules, split_model
from resilient.strategies.pipeline.runtime import Stage

NTH = torch.zeros(1, dtype=torch.int64)


def parts(model, points, ranks=0):
    """Return the plan of shapes and the stages, which begin at ``points`` or are even."""
    options = PipelineOptions(ranks or len(points) + 1, split_points=tuple(points))
    trees = StageModules(model, split_model(model, options))
    plan = trees.planner()
    stages = [Stage(n, *trees.stage(n), model) for n in range(options.stages)]
    return plan, stages


def run_stages(model, points, run, batch, ranks=0):
    """Return what the last stage makes, and the tensors between stages."""
    plan, stages = parts(model, points, ranks)
    shapes, tensors = plan.shapes(run, batch), []
    for stage in stages:
        stage.shapes, stage.runs = shapes, (run,)
        tensors.append(stage(*tensors[-1:], nth=NTH))
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors[:-1]] == list(shapes)
    return tensors[-1], tensors[:-1]
