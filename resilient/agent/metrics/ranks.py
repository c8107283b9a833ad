"""The signs of this host's ranks, as figures."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from resilient.agent.metrics import names
from resilient.world.pulse import pulse_path, read_signs

if TYPE_CHECKING:
    from resilient.agent.metrics.board import Board

RANKS_MAX = 256
_WINDOW_SECONDS = 60.0


class RankFigures:
    """Looks at the pulses now and then; one thread.

    Args:
        board: where the figures go.

    Attributes:
        notes: the agent's folder with the pulses; empty while nobody knows it.
    """

    def __init__(self, board: Board) -> None:
        self.notes = ""
        self._board = board
        self._life = 0.0
        self._done: dict[int, int] = {}
        self._recent: deque[tuple[float, int]] = deque()

    def look(self, monotonic_seconds: float, unix_seconds: float) -> None:
        """Note what the ranks show.

        Args:
            monotonic_seconds: now, on the clock of the pulses.
            unix_seconds: now.
        """
        size = self._board.value(names.LOCAL_WORLD_SIZE)
        if not self.notes or size is None:
            return
        self._forget_others()
        found = {}
        for local in range(min(int(size), RANKS_MAX)):
            signs = read_signs(pulse_path(self.notes, local))
            if signs is None or signs.step < 0:
                continue
            found[local] = signs.step
            if self._done.get(local) != signs.step:
                # It entered what it does now when the step was done, or a little later.
                ago_seconds = max(0.0, monotonic_seconds - signs.since_seconds)
                self._board.put(names.RANK_STEP_TIME, unix_seconds - ago_seconds, str(local))
            self._board.put(names.RANK_STEP, signs.step, str(local))
        self._done = found
        if found and len(found) == min(int(size), RANKS_MAX):
            self._note_step(min(found.values()), monotonic_seconds)

    def _forget_others(self) -> None:
        """Forget the ranks of the life before: there may be fewer now."""
        life = self._board.value(names.LIVES) or 0.0
        if life != self._life:
            self._life = life
            self._done.clear()
            self._recent.clear()
            for metric in (names.RANK_STEP, names.RANK_STEP_TIME, names.STEP_RATE):
                self._board.drop(metric)

    def _note_step(self, step: int, now_seconds: float) -> None:
        board, recent = self._board, self._recent
        board.put(names.STEP, step)
        if recent and step < recent[-1][1]:
            recent.clear()
        recent.append((now_seconds, step))
        while now_seconds - recent[0][0] > _WINDOW_SECONDS:
            recent.popleft()
        first_seconds, first_step = recent[0]
        if now_seconds > first_seconds:
            board.put(names.STEP_RATE, (step - first_step) / (now_seconds - first_seconds))


def weigh(board: Board) -> None:
    """Note what would be lost now; ranks may be gone by then, and a keeper save what they left."""
    step, durable = board.value(names.STEP), board.value(names.CHECKPOINT_STEP)
    if durable is None and board.value(names.GENERATION) is not None:
        durable = 0.0  # it says what it does, and has not saved yet
    if step is not None and durable is not None:
        board.put(names.STEPS_AT_RISK, max(0.0, step - durable))
