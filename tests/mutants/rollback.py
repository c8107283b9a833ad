"""Defects of going back from a broken loss and leaving out the data that led to it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BACK = "tests/unit/train/test_rollback.py"
LEDGER = "tests/unit/train/test_ledger.py"
NUMBERS = "tests/unit/train/test_broken_numbers.py"

MUTANTS = [
    Mutant(
        "the data that broke the loss is met again",
        "resilient/train/rollback.py",
        "    cursor.skip_to(*behind)\n",
        "    run.cursor.skip_to(run.cursor.epoch, run.cursor.samples)\n",
        f"{BACK} -k over_epochs",
    ),
    Mutant(
        "what is left out is in no ledger",
        "resilient/train/rollback.py",
        "    run.ledger.leave_out(run.cursor, REASON, until=behind[:2])\n",
        "",
        f"{BACK} -k stop_that_was_agreed",
    ),
    Mutant(
        "steps that are given up stay in the ledger",
        "resilient/train/ledger.py",
        "        self._entries, self._unread, self._losses = [], [], []\n",
        "",
        f"{BACK} -k stop_that_was_agreed",
    ),
    Mutant(
        "a stretch over the end of an epoch is left out of its last epoch alone",
        "resilient/train/ledger.py",
        "        if start < stop:\n",
        "        if start < stop and epoch == until[0]:\n",
        f"{BACK} -k rest_of_an_epoch",
    ),
    Mutant(
        "a segment ends before what was left out",
        "resilient/train/ledger.py",
        ("            place = LedgerPosition(place.step, entry.epoch, entry.stop)\n"),
        "",
        f"{LEDGER} -k segment_may_end",
    ),
    Mutant(
        "a stop that was agreed on waits for the steps that are made again",
        "resilient/train/rollback.py",
        "    run.turns_ahead += step - state.global_step\n",
        "",
        f"{BACK} -k stop_that_was_agreed",
    ),
    Mutant(
        "the way back is not saved",
        "resilient/train/saver.py",
        "        self.outdate()\n",
        "",
        f"{BACK} -k stop_that_was_agreed",
    ),
    Mutant(
        "a save that failed ends a run that goes on without it",
        "resilient/train/saver.py",
        "            self.wait()\n        except SaveFailed as error:\n"
        "            self._go_on_without(error)\n        self._checkpointer.close()\n",
        "            self.wait()\n        finally:\n            pass\n"
        "        self._checkpointer.close()\n",
        f"{BACK} -k save_that_failed",
    ),
    Mutant(
        "gradients that are no numbers are stepped with",
        "resilient/train/loss_guard.py",
        "        if bad:\n",
        "        if False:\n",
        f"{BACK} -k unless_they_are_expected",
    ),
    Mutant(
        "what recent losses were is forgotten at a resume",
        "resilient/train/loss_guard.py",
        '        self._recent.extend(state_dict["recent"])\n',
        "",
        f"{BACK} -k learned_is_saved",
    ),
    Mutant(
        "numbers that break are told only where training goes back",
        "resilient/train/run.py",
        '        broke = episodes.log(self.saver.step, values["loss"], values["grad_norm"])\n',
        "        broke = ()\n",
        NUMBERS,
    ),
    Mutant(
        "a loss that a log leaves out is never seen",
        "resilient/train/run.py",
        "        broke = episodes.read(self.saver.step, losses)\n",
        "        broke = ()\n",
        NUMBERS,
    ),
    Mutant(
        "numbers are told each time they are looked at",
        "resilient/train/loss_guard.py",
        'return not self.is_broken and (kind != "spike" or self._kind != "spike")',
        "return True",
        NUMBERS,
    ),
    Mutant(
        "a norm that fp16 expects to be infinite breaks",
        "resilient/train/loss_guard.py",
        "        if not self._expects_infinite:\n",
        "        if True:\n",
        NUMBERS,
    ),
    Mutant(
        "rotation takes the last checkpoint before the loss broke",
        "resilient/train/saver.py",
        "(self.checkpoint, self.sound)",
        "(self.checkpoint,)",
        NUMBERS,
    ),
    Mutant(
        "the next life forgets which checkpoint was sound",
        "resilient/train/saver.py",
        'parse_checkpoint(state_dict.get("sound", ""))',
        "None",
        NUMBERS,
    ),
]
