"""Checkpoints that refer to what older ones wrote: how they are made and looked into."""

from __future__ import annotations

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.restore.read import read
from resilient.format.keys import CheckpointId
from resilient.state_dict.load import assemble
from resilient.state_dict.snapshot import Part
from tests.helpers.manifests import Values, frozen_parts_of, save

MODEL = "model.r00000.safetensors"


def step(number):
    return CheckpointId(1, number)


def saved(store, number, bases=(), **tensors):
    """Save a model of these tensors; without any, one of which most is frozen."""
    parts = {"model": Part(Values(**tensors))} if tensors else frozen_parts_of(number)
    save(store, step(number), bases=bases, parts=parts)
    return read_manifest(store, step(number))


def value(store, number, name):
    proved = read(store, step(number))
    entry = next(one for one in proved.manifest.tensors if one.name == name)
    return assemble(entry, proved.files)


def place(manifest, name):
    (one,) = next(one for one in manifest.tensors if one.name == name).regions
    return one


def files(manifest):
    return {one.name for one in manifest.files}
