"""A checkpoint of a terabyte, of files with holes: what a look at it reads, here and from S3."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.services.sparse import BUCKET, SparseServer

SHARDS, EACH, COLUMNS = 20, 25, 4096
TENSOR_BYTES = 256_000 * COLUMNS * 2
READ_BYTES_MAX = 2_000_000
CPU_SECONDS_MAX = 6.0
"""Imports take about 1.5 s; a read of the data of a terabyte would take minutes."""


def write_sparse(folder: Path, tensor_bytes: int = TENSOR_BYTES) -> int:
    """Write a checkpoint of a Trainer without its data; return how long it says it is."""
    folder.mkdir(parents=True)
    places: dict[str, str] = {}
    shape = [tensor_bytes // 2 // COLUMNS, COLUMNS]
    for number in range(SHARDS):
        name = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        header = {}
        for one in range(EACH):
            span = [one * tensor_bytes, (one + 1) * tensor_bytes]
            header[f"layers.{number}.w{one}"] = {
                "dtype": "BF16",
                "shape": shape,
                "data_offsets": span,
            }
            places[f"layers.{number}.w{one}"] = name
        data = json.dumps(header).encode()
        data += b" " * (-len(data) % 8)
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", len(data)) + data)
            file.truncate(8 + len(data) + EACH * tensor_bytes)
    total = SHARDS * EACH * tensor_bytes
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    state = {"global_step": 500, "epoch": 1.0, "max_steps": 1000, "log_history": []}
    state["train_batch_size"] = 4
    state["stateful_callbacks"] = {"TrainerControl": {"args": {}, "attributes": {}}}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return total


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bucket")
    assert write_sparse(folder / "run" / "checkpoint-500") > 10**12
    return folder


def read_bytes():
    return int(Path("/proc/self/io").read_text().split()[1])


def check(document):
    assert (document["layout"], document["resumable"]["answer"]) == ("hf-trainer", "partly")
    (part,) = document["parts"]
    assert (part["tensors"], part["size_bytes"]) == (SHARDS * EACH, SHARDS * EACH * TENSOR_BYTES)


def test_a_look_at_a_terabyte_on_this_machine_reads_less_than_two_megabytes(bucket, call):
    place = bucket / "run" / "checkpoint-500"
    call("ckpt", "inspect", place)  # what is imported is no part of the look
    before, began = read_bytes(), time.process_time()
    outcome = call("ckpt", "inspect", place, "--json")
    assert time.process_time() - began < CPU_SECONDS_MAX
    assert read_bytes() - before < READ_BYTES_MAX
    assert outcome.status == 0, outcome.stderr
    check(json.loads(outcome.stdout))


@pytest.mark.slow
def test_a_look_at_a_terabyte_in_s3_reads_less_than_two_megabytes(bucket):
    with SparseServer(bucket) as server:
        options = {"endpoint": server.endpoint, "region": "us-east-1", "key": "k", "secret": "s"}
        told = {**os.environ, "RESILIENT_STORAGE_OPTIONS": json.dumps(options)}
        url = f"s3://{BUCKET}/run/checkpoint-500"
        words = [sys.executable, "-m", "resilient_cli", "ckpt", "inspect", url, "--json"]
        began = os.times().children_user + os.times().children_system
        done = subprocess.run(words, capture_output=True, check=False, env=told, timeout=120)
        spent = os.times().children_user + os.times().children_system - began
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout))
    assert 0 < server.sent_bytes < READ_BYTES_MAX, server.requests
    assert spent < CPU_SECONDS_MAX
