"""Which GPUs an extraction may use, and which of them each of its processes gets."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..common.errors import InputError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(workers: int) -> list[str]:
    """The names of the GPUs, as CUDA_VISIBLE_DEVICES gives them; none on a CPU. Not asked for one worker, which divides nothing."""
    if workers == 1:
        return []
    named = os.environ.get(VARIABLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def divide_devices(devices: Sequence[str], workers: int, group: int) -> list[str | None]:
    """For each worker its own `group` devices, as CUDA_VISIBLE_DEVICES; None where there is nothing to divide.

    Raises InputError when there are too few.
    """
    if workers == 1 or not devices:
        return [None] * workers
    if len(devices) < workers * group:
        raise InputError(
            "there are not enough GPUs for so many processes",
            place=f"--workers {workers}",
            found=f"{len(devices)} GPUs: {', '.join(devices)}",
            expected=f"{workers * group}: {group} for each process",
            fix=f"use --workers {len(devices) // group}" if len(devices) >= group else f"use --engine-arg tensor_parallel_size={len(devices)}",
        )
    return [",".join(devices[group * number : group * (number + 1)]) for number in range(workers)]
