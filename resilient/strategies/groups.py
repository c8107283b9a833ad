"""Process groups of some of the ranks, which wait as long as that of all of them does.

To a group that is made without saying so torch gives its own default, ten minutes under NCCL and
thirty under gloo, whatever the group of all ranks was told (``ddp_timeout``). How long a group
waits torch tells and lets change by nothing but names that begin with an underscore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from torch.distributed.device_mesh import DeviceMesh


def patience() -> timedelta:
    """Return how long a collective of all ranks may take."""
    everyone: Any = dist.distributed_c10d._get_default_group()  # noqa: SLF001
    options = everyone._get_backend(everyone._device_types[0]).options  # noqa: SLF001
    waits: timedelta = options._timeout  # noqa: SLF001
    return waits


def group_among(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Cut the ranks into groups and return this rank's. Collective.

    Args:
        groups: ranks; each is in one of them.
    """
    grouped: Any = dist.new_subgroups_by_enumeration  # untyped
    group: dist.ProcessGroup = grouped(groups, timeout=patience())[0]
    return group


def made_patient(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of this rank, all groups of which wait as long as that of all ranks."""
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(patience(), group)  # noqa: SLF001
    return mesh
