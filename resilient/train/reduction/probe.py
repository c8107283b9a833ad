"""Whether all hosts of a run, of this life and of the one that saved, compute the same bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ConfigError
from resilient.strategies.canonical.probing import arithmetic_of
from resilient.train.reporting import ArithmeticDiffers
from resilient.world.agreement import agree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient.train.arguments import TrainingArguments
    from resilient.train.session import Session

_HINT = (
    "train on hosts of one kind, with the same versions and threads_per_rank; or go on with bits "
    "that depend on which host computes what: on_arithmetic_mismatch='continue'"
)


@dataclass(slots=True)
class Arithmetic:
    """What a run was begun with; a part of every checkpoint.

    Attributes:
        seed: of the random numbers of micro-batches; a checkpoint's wins over a new argument.
        digest: of the arithmetic of the hosts that saved; empty: none has.
        machine: what they were, for people to read.
    """

    seed: int
    digest: str = ""
    machine: str = ""

    def state_dict(self) -> dict[str, Any]:
        """Return everything; the same on every rank."""
        return {"seed": self.seed, "digest": self.digest, "machine": self.machine}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take it back."""
        self.seed = int(state_dict["seed"])
        self.digest = str(state_dict["digest"])
        self.machine = str(state_dict["machine"])

    def require_same(self, session: Session, topic: str) -> None:
        """Compare this host's arithmetic with that of the other ranks and of the last life.

        Collective, over the board and not the collective backend.

        Raises:
            ConfigError: it differs, and the arguments do not say to go on.
        """
        mine, machine = arithmetic_of(session.device, _dtype(session.args)), _machine(session)
        require_same(session, topic, mine, f"the same arithmetic ({machine} on rank 0)")
        if self.digest and self.digest != mine:
            told(
                session,
                f"this life computes other bits ({machine}) than the one that saved "
                f"({self.machine})",
            )
        self.digest, self.machine = mine, machine


def require_same(session: Session, topic: str, digest: str, what: str) -> None:
    """Compare a digest with that of the other ranks. Collective, over the board.

    Args:
        session: of this rank.
        topic: names the agreement; used once.
        digest: of what this rank has computed.
        what: of which it is; what ranks ought to have in common.

    Raises:
        ConfigError: they differ, and the arguments do not say to go on.
    """
    if session.world.size == 1:
        return
    comms = session.comms(f"canonical/{topic}")
    groups = agree(comms, "digest", digest, _by_digest, session.args.ddp_timeout)
    if len(groups) > 1:
        shown = " and ".join(f"ranks {ranks}" for ranks in groups)
        told(session, f"{shown} do not compute {what}")


def told(session: Session, problem: str) -> None:
    """Refuse to go on, or tell why the bits are not what they should be.

    Raises:
        ConfigError: the arguments do not say to go on.
    """
    if session.args.on_arithmetic_mismatch == "stop":
        raise ConfigError(f"reduction='canonical' cannot promise its bits: {problem}", hint=_HINT)
    if session.world.is_coordinator:
        session.emit(ArithmeticDiffers(problem))


def _by_digest(shown: Sequence[str]) -> list[list[int]]:
    """Return the ranks that showed the same, in groups."""
    return [
        [rank for rank, other in enumerate(shown) if other == one] for one in dict.fromkeys(shown)
    ]


def _dtype(args: TrainingArguments) -> torch.dtype:
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def _machine(session: Session) -> str:
    if session.device.type == "cuda":
        kind = torch.cuda.get_device_name(session.device)
    else:
        kind = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {kind}, {torch.get_num_threads()} threads"
