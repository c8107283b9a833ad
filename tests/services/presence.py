"""A service that tests need: without it they are skipped, or have failed where it must be there.

A skip is how a suite vanishes without anybody noticing. So CI names what its machine can have in
``TEST_SERVICES``, separated by commas; of those nothing is skipped.
"""

from __future__ import annotations

import os

import pytest

VARIABLE = "TEST_SERVICES"
SERVICES = ("browser", "ceph", "ceph20", "kubectl", "kustomize", "netns", "slurm")


def require(service: str, problem: str) -> None:
    """Go on if there is no problem; else skip, or fail if the service must be there.

    Args:
        service: one of ``SERVICES``.
        problem: why it is not to be had here; empty if it is.
    """
    must_be_there = [one for one in os.environ.get(VARIABLE, "").split(",") if one]
    unknown = sorted({service, *must_be_there} - set(SERVICES))
    if unknown:
        pytest.fail(f"{VARIABLE} knows no {', '.join(unknown)}; there are {', '.join(SERVICES)}")
    if problem and service in must_be_there:
        pytest.fail(f"no {service}, and {VARIABLE} says that it is here: {problem}")
    if problem:
        pytest.skip(f"no {service}: {problem}")
