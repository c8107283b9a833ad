"""What can happen to a checkpoint, done to its files."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from resilient.layouts.torch_zip import resolve_pieces
from resilient.storage.folder import open_folder
from tests.damage.samples import (
    INDEX,
    LEDGER,
    OPTIMIZER,
    PARITY,
    RANDOM,
    RECORD,
    SCHEDULE,
    SECOND,
    STATE,
    STEP_NAME,
    WEIGHTS,
)
from tests.helpers.foreign_folders import look
from tests.helpers.resumming import recompute_sums

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.damage.samples import Sample

NAN, INFINITE = struct.pack("<f", float("nan")), struct.pack("<f", float("inf"))


class Inapplicable(Exception):
    """A checkpoint of this layout has nothing that could suffer this."""


@dataclass(frozen=True)
class Scene:
    """A copy of a checkpoint that may be spoiled.

    Attributes:
        sample: its layout.
        path: the folder or the file.
    """

    sample: Sample
    path: Path

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def file(self, role: str) -> Path:
        if role not in self.sample.files:
            raise Inapplicable
        return self.folder / self.sample.files[role]


@dataclass(frozen=True)
class Kind:
    """One damage: spoils a scene, and returns where the checkpoint is then, if elsewhere."""

    name: str
    spoil: Callable[[Scene], Path | None]


def on(role: str, change: Callable[[bytes], bytes]) -> Callable[[Scene], None]:
    def spoil(scene: Scene) -> None:
        path = scene.file(role)
        before = path.read_bytes()
        after = change(before)
        if after == before:
            raise Inapplicable
        path.write_bytes(after)

    return spoil


def missing(role: str) -> Callable[[Scene], None]:
    def spoil(scene: Scene) -> None:
        path = scene.file(role)
        if path == scene.path:
            raise Inapplicable  # nothing would be left to look at
        path.unlink()

    return spoil


def flipped(data: bytes, at: int) -> bytes:
    spoiled = bytearray(data)
    spoiled[at] ^= 0x40
    return bytes(spoiled)


def in_pickle(data: bytes) -> bytes:
    """Flip a bit of the first member's pickle, or of the text where there is none."""
    if data.startswith(b"PK"):
        return flipped(data, data.find(b"\x80\x02", data.find(b"data.pkl")) + 3)
    # Of an index the middle of a module's name; of JSON and safetensors the first key.
    return flipped(data, min(20, len(data) - 1))


def at_end(data: bytes) -> bytes:
    """Flip a bit of a zip's directory."""
    at = data.rfind(b"PK\x01\x02")
    return flipped(data, at + 20) if data.startswith(b"PK") else data


def number_at(role: str, part: str, value: bytes | None) -> Callable[[Scene], None]:
    """Change the first number of a tensor: flip one of its bits, or make it another one.

    A number that is set has a right checksum: it was saved like that.
    """

    def spoil(scene: Scene) -> None:
        path = scene.file(role)
        at = _place(scene, path, part)
        data = bytearray(path.read_bytes())
        if value is None:
            path.write_bytes(flipped(bytes(data), at + 1))
            return
        data[at : at + 4] = value
        path.write_bytes(recompute_sums(bytes(data)))

    return spoil


def _place(scene: Scene, path: Path, part: str) -> int:
    if scene.sample.is_ours:
        return len(path.read_bytes()) - 4
    folder = open_folder(str(scene.path))
    name = str(path.relative_to(scene.folder))
    for one in look(scene.path).tensors:
        if one.part == part and one.dtype == "F32" and one.pieces and one.files == (name,):
            piece = resolve_pieces(folder, folder.list(), one.pieces[0], one.dtype)
            return piece.start + 4 * piece.first
    raise Inapplicable


def swapped(scene: Scene) -> None:
    one, other = scene.file(WEIGHTS), scene.file(OPTIMIZER)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def rewritten(role: str, change: Callable[[object], None]) -> Callable[[Scene], None]:
    """Save what torch loads of a file anew, changed."""

    def spoil(scene: Scene) -> None:
        path = scene.file(role)
        if (
            scene.sample.is_ours
            or path.suffix in (".safetensors", ".json", ".distcp")
            or path.name.startswith("latest")
        ):
            raise Inapplicable
        value = torch.load(path, weights_only=False)
        try:
            change(value)
        except (KeyError, TypeError, AttributeError, IndexError):
            raise Inapplicable from None
        torch.save(value, path)

    return spoil


def optimizer_in(value):
    """Return the state of an optimizer in a file of any of the layouts."""
    value = value["optimizer_states"][0] if "optimizer_states" in value else value
    return value.get("optimizer", value)


def behind(value):
    state = optimizer_in(value)["state"]
    for one in state.values():
        one["step"] = one["step"] * 0 + 99


def half_a_parameter(value):
    state = optimizer_in(value)["state"]
    del state[next(iter(state))]["exp_avg"]


def other_shape(value):
    state = optimizer_in(value)["state"]
    for one in state.values():
        one["exp_avg"] = torch.zeros(7, 11)


def schedule_behind(value):
    held = value.get("lr_schedulers", [value.get("lr_scheduler", value)])[0]
    assert "last_epoch" in held or {}["none"]
    held["last_epoch"], held["_last_lr"] = 4, [0.125 for _ in held["_last_lr"]]


class Bomb:
    """What leaves a file behind in whoever unpickles it."""

    def __reduce__(self):
        return os.system, (': > "$DAMAGE_BOMB"',)


def bombed(role: str) -> Callable[[Scene], None]:
    def spoil(scene: Scene) -> None:
        if scene.file(role).suffix not in (".pt", ".bin", ".pkl", ".ckpt", ".pth"):
            raise Inapplicable
        torch.save({"state": Bomb()}, scene.file(role))

    return spoil


def json_with(role: str, **fields: object) -> Callable[[Scene], None]:
    def spoil(scene: Scene) -> None:
        path = scene.file(role)
        if path.suffix != ".json" or path.name != "trainer_state.json":
            raise Inapplicable
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return spoil


def lost_rank(scene: Scene) -> None:
    if scene.sample.is_ours:
        raise Inapplicable  # its manifest names the ranks
    path = scene.file(RANDOM)
    if not path.stem[-1].isdigit():
        path = path.rename(path.with_name("rng_state_0.pth"))
    path.with_name(path.name.replace("_0", "_2")).write_bytes(path.read_bytes())


def renamed(scene: Scene) -> Path:
    match = STEP_NAME.fullmatch(scene.path.name)
    if match is None or scene.sample.name in ("accelerate", "DCP"):
        raise Inapplicable  # these names count no steps
    return scene.path.rename(scene.path.with_name(f"{match[1]}{match[2]}4711"))


def linked_out(scene: Scene) -> None:
    path = scene.file(WEIGHTS)
    if path == scene.path:
        raise Inapplicable
    outside = scene.folder.parent / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


def doubled_name(scene: Scene) -> None:
    path = scene.file(WEIGHTS)
    if path.suffix != ".safetensors":
        raise Inapplicable
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    head = data[8 : 8 + length].decode().rstrip()
    name = next(one for one in json.loads(head) if one != "__metadata__")
    again = json.dumps({name: json.loads(head)[name]})[1:-1]
    new = f"{head[:-1]},{again}}}".encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + data[8 + length :])


def stray_slice(scene: Scene) -> None:
    path = scene.file(WEIGHTS)
    if path.suffix != ".distcp":
        raise Inapplicable
    path.with_name("__7_0.distcp").write_bytes(path.read_bytes())


def unfinished(scene: Scene) -> None:
    if scene.sample.name != "Trainer":
        raise Inapplicable
    (scene.folder / "checkpoint-is-incomplete.txt").touch()


def points_nowhere(scene: Scene) -> None:
    if not scene.file(INDEX).name.startswith("latest"):
        raise Inapplicable
    scene.file(INDEX).write_text("global_step4711")


PAGE = b"<html><body>503 Service Unavailable</body></html>"
KINDS = [
    *(Kind(f"{role}: missing", missing(role))
      for role in (WEIGHTS, OPTIMIZER, SCHEDULE, RANDOM, STATE, INDEX)),
    *(Kind(f"{role}: empty", on(role, lambda _: b""))
      for role in (WEIGHTS, OPTIMIZER, SCHEDULE, RANDOM, STATE, INDEX)),
    *(Kind(f"{role}: cut in half", on(role, lambda data: data[: len(data) // 2]))
      for role in (WEIGHTS, OPTIMIZER, SCHEDULE, RANDOM, STATE, INDEX)),
    Kind("weights: last byte cut", on(WEIGHTS, lambda data: data[:-1])),
    Kind("weights: bytes behind its end", on(WEIGHTS, lambda data: data + b"\0" * 16)),
    Kind("weights: zeros of the same length", on(WEIGHTS, lambda data: bytes(len(data)))),
    Kind("weights: the page of an error", on(WEIGHTS, lambda _: PAGE)),
    Kind("weights: bit flip in the header", on(WEIGHTS, in_pickle)),
    Kind("weights: bit flip in the directory", on(WEIGHTS, at_end)),
    Kind("weights: bit flip in a number", number_at(WEIGHTS, "model", None)),
    Kind("weights: a NaN was saved", number_at(WEIGHTS, "model", NAN)),
    Kind("weights: an infinite was saved", number_at(WEIGHTS, "model", INFINITE)),
    Kind("weights: a name twice in the header", doubled_name),
    Kind("weights: a link that leads out", linked_out),
    Kind("weights: swapped with the optimizer", swapped),
    Kind("weights: a slice of a larger world", stray_slice),
    Kind("optimizer: bit flip in the header", on(OPTIMIZER, in_pickle)),
    Kind("optimizer: bit flip in a number", number_at(OPTIMIZER, "optimizer", None)),
    Kind("optimizer: a NaN was saved", number_at(OPTIMIZER, "optimizer", NAN)),
    Kind("optimizer: of another step", rewritten(OPTIMIZER, behind)),
    Kind("optimizer: of another step, in one file", rewritten(WEIGHTS, behind)),
    Kind("optimizer: of another model", rewritten(OPTIMIZER, other_shape)),
    Kind("optimizer: of another model, in one file", rewritten(WEIGHTS, other_shape)),
    Kind("optimizer: half a parameter lost", rewritten(OPTIMIZER, half_a_parameter)),
    Kind("optimizer: half a parameter lost, in one file", rewritten(WEIGHTS, half_a_parameter)),
    Kind("optimizer: a pickle that runs code", bombed(OPTIMIZER)),
    Kind("schedule: of another step", rewritten(SCHEDULE, schedule_behind)),
    Kind("schedule: bit flip in the header", on(SCHEDULE, in_pickle)),
    Kind("random state: bit flip in a number", number_at(RANDOM, "other", None)),
    Kind("random state: of a world with a rank lost", lost_rank),
    Kind("random state: a pickle that runs code", bombed(RANDOM)),
    Kind("state: bit flip", on(STATE, in_pickle)),
    Kind("state: of another step", json_with(STATE, global_step=4)),
    Kind("state: a key of a newer version", json_with(STATE, brand_new=1)),
    Kind("state: best checkpoint moved", json_with(STATE, best_model_checkpoint="gone/4")),
    Kind("index: bit flip", on(INDEX, in_pickle)),
    Kind("index: names what is not there", points_nowhere),
    *(Kind(f"{role}: missing", missing(role)) for role in (PARITY, SECOND, RECORD, LEDGER)),
    *(Kind(f"{role}: bit flip", on(role, in_pickle)) for role in (PARITY, SECOND, RECORD, LEDGER)),
    Kind("folder: named for another step", renamed),
    Kind("folder: its save never ended", unfinished),
]  # fmt: skip
