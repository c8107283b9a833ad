"""A training with canonical reduction, at any number of ranks, and a host of such trainings.

As a script it is one rank, for ``resilient train``. Imported, ``Gangs`` forks ranks of it, which
costs hundredths of a second where a new Python takes seconds; what is killed are real processes.

The model draws random numbers (dropout), uses a parameter in some micro-batches only, ties
weights, and has parameters of several blocks. Samples are augmented at random.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from hashlib import blake2b
from pathlib import Path

import torch
from torch import nn

from resilient import Trainer, TrainerCallback, TrainingArguments
from resilient.distributed.launch_env import LaunchEnv, World, write_launch
from resilient.errors import Preempted
from tests.helpers.endings import ending
from tests.services.ports import held_port

STEPS = 12
SAMPLES = 100
# Survivors of a rank that was killed say so; a storm of that is no news.
QUIET = "storm" in sys.argv


class Samples(torch.utils.data.Dataset):
    """Tokens, with noise from two of the global streams."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randint(0, 50, (SAMPLES, 7), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index):
        x = self.x[index].clone()
        x[int(torch.randint(0, 7, ()))] = random.randrange(50)
        return {"x": x, "labels": self.x[index].roll(1)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 300)
        self.up = nn.Linear(300, 130)
        self.rare = nn.Linear(130, 130)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(130, 300)
        self.norm = nn.LayerNorm(300)
        self.register_buffer("scale", torch.tensor(0.1))

    def forward(self, x, labels=None):
        hidden = self.drop(torch.relu(self.up(self.embed(x))))
        if int(x.sum()) % 3 == 0:
            hidden = hidden + self.rare(hidden)
        # The weights of the head are those of the embedding.
        logits = self.norm(self.down(hidden)) @ self.embed.weight.T * self.scale
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Beat(TrainerCallback):
    """Says how far this rank is, and waits a little, so that signals find a step to hit."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._path = folder / "beats"
        self._seconds = seconds

    def on_step_end(self, args, state, control, /, **_):
        if state.is_world_process_zero:
            with self._path.open("a") as file:
                file.write(f"{state.global_step}\n")
        time.sleep(self._seconds)


def trainer_for(folder: Path, pause: float = 0.0, **options) -> Trainer:
    torch.manual_seed(0)
    told = {
        "reduction": "canonical",
        "global_train_batch_size": 24,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 3,
        "disable_tqdm": True,
        "use_cpu": True,
        "log_level": "error",
    }
    arguments = TrainingArguments(output_dir=str(folder), **{**told, **options})
    return Trainer(
        Net(), arguments, train_dataset=Samples(), callbacks=[Beat(folder, pause)] if pause else []
    )


class Gangs:
    """Starts ranks as forks of this process."""

    def __init__(self, folder: Path, **options) -> None:
        self.folder, self.options = folder, options
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, size: int, pause: float = 0.0) -> list[int]:
        """Return the processes, by rank."""
        with held_port() as held:
            port = held.getsockname()[1]
            return [self._fork(rank, size, port, pause) for rank in range(size)]

    def _fork(self, rank: int, size: int, port: int, pause: float) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            os.environ.update(write_launch(LaunchEnv(World(rank, size, rank), "127.0.0.1", port)))
            trainer_for(self.folder, pause, **self.options).train()
            code = 0
        except Preempted as stopped:
            code = stopped.exit_code
        finally:
            if code == 1 and not QUIET:
                traceback.print_exc()
            os._exit(code)

    def run(self, size: int) -> None:
        """Train to the end, and insist on it."""
        ends = [os.waitpid(pid, 0)[1] for pid in self.start(size)]
        assert ends == [0] * size, f"{size} ranks ended with {ends}"

    def beats(self) -> list[int]:
        path = self.folder / "beats"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def strike(self, size: int, beats: int, kind: str, draw: random.Random) -> str:
        """Train until so many more steps were made, then strike; return what became of it.

        Args:
            size: ranks.
            beats: steps to wait for.
            kind: ``all`` and ``one`` are killed, ``term`` is told to stop.
            draw: when, to the millisecond.
        """
        before, ranks = len(self.beats()), self.start(size, pause=0.01)
        while len(self.beats()) < before + beats and all(map(_lives, ranks)):
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        was_over = not all(map(_lives, ranks))
        struck = ranks if kind == "all" else [draw.choice(ranks)]
        for pid in struck:
            os.kill(pid, signal.SIGTERM if kind == "term" else signal.SIGKILL)
        deadline = time.monotonic() + (20.0 if kind == "term" else 0.3)
        while any(map(_lives, ranks)) and time.monotonic() < deadline:
            time.sleep(0.005)
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        ends = [os.waitpid(pid, 0)[1] for pid in ranks]
        return "over" if was_over else f"{kind} of {size}: {sorted(set(ends))}"


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


COMPARED = ("model", "optimizer", "scheduler", "trainer_state", "data", "meters")


def end_of(folder: Path) -> dict[str, object]:
    """Return weights, the optimizer's state, the loss history and all else that is trained."""
    return {name: one for name, one in ending(folder).items() if name in COMPARED}


def digest(folder: Path) -> str:
    """Return one digest of how a run ended."""
    hashed = blake2b(digest_size=16)
    _add(hashed, end_of(folder))
    return hashed.hexdigest()


def _add(hashed, value) -> None:
    if isinstance(value, dict):
        for name, one in value.items():
            hashed.update(repr(name).encode())
            _add(hashed, one)
    elif isinstance(value, list | tuple):
        for one in value:
            _add(hashed, one)
    elif isinstance(value, torch.Tensor):
        hashed.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        hashed.update(repr(value).encode())


def sizes(folder: Path, counts: list[int], **options) -> dict[int, str]:
    """Return the digest of a run with each number of ranks."""
    for count in counts:
        Gangs(folder / str(count), **options).run(count)
    return {count: digest(folder / str(count)) for count in counts}


def resized(folder: Path, counts: list[int], **options) -> str:
    """Return the digest of a run that is killed and goes on with another number of ranks."""
    gangs = Gangs(folder, **options)
    for count in counts[:-1]:
        said = gangs.strike(count, 2, "all", random.Random(count))
        assert said != "over", f"the run ended before its {count} ranks were killed"
    gangs.run(counts[-1])
    return digest(folder)


def storm(folder: Path, faults: int, seed: int, **options) -> dict[str, object]:
    """Return the digests of a run that was struck again and again, and of a calm one."""
    draw = random.Random(seed)
    options = {"max_steps": 3 * faults, **options}
    struck, said = Gangs(folder / "struck", **options), []
    while len(said) < faults:
        size, kind = draw.randint(1, 7), draw.choice(["all", "all", "one", "term"])
        said.append(struck.strike(size, draw.randint(0, 4), kind, draw))
        assert said[-1] != "over", f"the run ended after {len(said)} faults"
    struck.run(draw.randint(1, 7))
    Gangs(folder / "calm", **options).run(1)
    return {
        "faults": said,
        "steps": options["max_steps"],
        "struck": digest(folder / "struck"),
        "calm": digest(folder / "calm"),
    }


MODES = {
    "rank": lambda folder, pause, options: trainer_for(folder, float(pause), **options).train(),
    "sizes": lambda folder, counts, options: sizes(
        folder, [int(one) for one in counts.split(",")], **options
    ),
    "resized": lambda folder, counts, options: resized(
        folder, [int(one) for one in counts.split(",")], **options
    ),
    "storm": lambda folder, told, options: storm(
        folder, *(int(one) for one in told.split(",")), **options
    ),
}


def main(mode: str, folder: str, told: str, options: str) -> None:
    """``python canonical_job.py MODE FOLDER TOLD OPTIONS``; options are JSON."""
    found = MODES[mode](Path(folder), told, json.loads(options))
    if mode != "rank":
        print(json.dumps(found))  # noqa: T201
    if mode == "storm" and found["struck"] != found["calm"]:
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
