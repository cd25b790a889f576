"""Launch: which process of how many this is, as torchrun tells it by environment variables. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..common.errors import InputError


@dataclass(frozen=True)
class Launch:
    """One process of `size`."""

    rank: int = 0
    """0..size-1, over all machines."""
    size: int = 1
    """Processes."""
    local_rank: int = 0
    """Number on this machine; the number of its GPU."""

    @property
    def first(self) -> bool:
        """The one that writes, prints and logs."""
        return self.rank == 0


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """From RANK, WORLD_SIZE and LOCAL_RANK; one process where they are not set. Raises InputError when they make no sense."""
    given = os.environ if environment is None else environment
    texts = {name: given.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))}
    try:
        rank, size, local_rank = (int(text) for text in texts.values())
    except ValueError:
        rank = size = local_rank = -1
    if not (0 <= rank < size and local_rank >= 0):
        found = ", ".join(f"{name}={text}" for name, text in texts.items())
        raise InputError("the environment of the processes makes no sense", place="torchrun", found=found, fix="start with torchrun, or unset these")
    return Launch(rank, size, local_rank)
