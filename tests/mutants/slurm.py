"""Defects of jobs of SLURM: who is requeued, who must not be, and what stands in the script."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TESTS = "tests/cli/test_slurm.py"
JOB = "cli/resilient_cli/slurm/script.py"
SCRIPT = "cli/resilient_cli/slurm/script.py"

MUTANTS = [
    Mutant(
        "a task of an array requeues all of them",
        "cli/resilient_cli/slurm/batch_template.sh",
        'scontrol requeue "$job" || {',
        'scontrol requeue "$SLURM_JOB_ID" || {',
        f"{TESTS} -k transcripts",
    ),
    Mutant(
        "a bug of the script is requeued for ever",
        SCRIPT,
        '"permanent_codes": "|".join(str(one) for one in PERMANENT)',
        '"permanent_codes": "|".join(str(one) for one in PERMANENT[:1])',
        f"{TESTS} -k each_code",
    ),
    Mutant(
        "the values of secrets stand in the script",
        JOB,
        "if has_value and is_secret(name, value):",
        "if has_value and has_credentials(value):",
        f"{TESTS} -k refused_and_located",
    ),
    Mutant(
        "all tasks of an array write to one repository",
        JOB,
        "if array and not has_task:",
        "if False:",
        f"{TESTS} -k refused_and_located",
    ),
    Mutant(
        "SLURM signals when --grace is all that is left",
        "cli/resilient_cli/commands/slurm.py",
        ("lead = math.ceil(grace + preemption_budget.MARGIN_SECONDS)"),
        "lead = math.ceil(grace)",
        f"{TESTS} -k grace",
    ),
]
