"""Checkpoints that refer to what older ones wrote: how they are made and looked into."""

from __future__ import annotations

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.restore.read import read
from resilient.format.keys import CheckpointId
from resilient.state_dict.resharding import assemble
from resilient.state_dict.snapshot import Part
from tests.helpers.manifests import Values, frozen_parts_of, save

MODEL = "model.r00000.safetensors"


def step(number):
    return CheckpointId(1, number)


def put_step(store, number, bases=(), **tensors):
    """Save a model of these tensors; without any, one of which most is frozen."""
    parts = {"model": Part(Values(**tensors))} if tensors else frozen_parts_of(number)
    save(store, step(number), bases=bases, parts=parts)
    return read_manifest(store, step(number))


def value(store, number, name):
    verified = read(store, step(number))
    entry = next(tensor for tensor in verified.manifest.tensors if tensor.name == name)
    return assemble(entry, verified.files)


def place(manifest, name):
    (tensor,) = next(tensor for tensor in manifest.tensors if tensor.name == name).regions
    return tensor


def files(manifest):
    return {file.name for file in manifest.files}
