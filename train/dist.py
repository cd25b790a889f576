"""Several processes that train one drafter: their group, sums over it, and how weights are shared.

In: a Launch and the mode. Out: Processes, whose sums and agreements are the same on every one of them, and the drafter as a
module whose gradients are means over the processes. Knows nothing of rows, losses or steps; one process is the simplest case.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as group
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..common.errors import InputError, RunFailed
from .config import DistributedConfig
from .device import Compute
from .launch import Launch

Mode = Literal["none", "ddp", "fsdp2"]
R = TypeVar("R")


@dataclass(frozen=True)
class Processes:
    """All processes of a run, seen from one of them. Every method but `first` must be called by all of them alike."""

    rank: int = 0
    size: int = 1
    mode: Mode = "none"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def first(self) -> bool:
        """The one that writes, prints and logs."""
        return self.rank == 0

    def sum(self, record: R) -> R:
        """A dataclass of tensors (dataclasses of tensors within) with each tensor summed over the processes."""
        if self.size == 1:
            return record
        tensors = list(_leaves(record))
        flat = torch.cat([tensor.detach().to(self.device, torch.float64).flatten() for tensor in tensors])  # counts are exact below 2^53
        group.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return _rebuilt(record, iter([part.view(old.shape).to(old.device, old.dtype) for part, old in zip(parts, tensors)]))

    def gather(self, value: R) -> list[R]:
        """The values of all processes, in their order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        group.all_gather_object(values, value)
        return values

    def first_does(self, work: Callable[[], R]) -> R:
        """What `work` returns in the first process, in all. When it raises there, all raise, so that none waits for ever."""
        if self.size == 1:
            return work()
        outcome: list[Any] = [None, None]
        caught: Exception | None = None
        if self.first:
            try:
                outcome[0] = work()
            except Exception as error:
                caught, outcome[1] = error, str(error)
        group.broadcast_object_list(outcome, src=0)
        if caught is not None:
            raise caught
        if outcome[1] is not None:
            raise RunFailed("the first process failed", place=f"process {self.rank}", found=outcome[1].splitlines()[0])
        result: R = outcome[0]
        return result


def device_name(launch: Launch, wanted: str) -> str:
    """The device of this process: `wanted`, or with several processes and CUDA the GPU of its own number."""
    if launch.size == 1 or wanted == "cpu" or not torch.cuda.is_available():
        return wanted
    if wanted not in ("auto", "cuda"):
        fix = "leave run.device out: each process takes the GPU of its number"
        raise InputError("several processes cannot share one GPU", place=f"run.device={wanted}", found=f"{launch.size} processes", fix=fix)
    return f"cuda:{launch.local_rank}"


@contextmanager
def join(launch: Launch, config: DistributedConfig, device: torch.device) -> Iterator[Processes]:
    """Meet the other processes; leave them at the end. Raises InputError when the mode does not fit their number."""
    mode: Mode = "ddp" if config.mode == "auto" else config.mode
    if launch.size == 1:
        yield Processes(device=device)
        return
    if mode == "none":
        fix = "start one process, or leave distributed.mode out"
        raise InputError("several processes would write one run", place="distributed.mode=none", found=f"{launch.size} processes", fix=fix)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group.init_process_group(backend, rank=launch.rank, world_size=launch.size, timeout=datetime.timedelta(seconds=config.timeout_seconds))
    yield Processes(launch.rank, launch.size, mode, device)
    group.destroy_process_group()  # not after an error: it would wait for processes that wait for this one


def shard(drafter: nn.Module, layers: nn.ModuleList, compute: Compute, processes: Processes) -> None:
    """In mode fsdp2, leave each process its share of every weight, in place; gathered layer by layer in the type of the products."""
    if processes.mode != "fsdp2":
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = group.device_mesh.init_device_mesh(compute.device.type, (processes.size,))
    policy = MixedPrecisionPolicy(param_dtype=compute.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in (*layers, drafter):
        fully_shard(layer, mesh=mesh, mp_policy=policy)


def replicate(forward: nn.Module, processes: Processes) -> nn.Module:
    """In mode ddp, `forward` as a module whose backward pass averages gradients over the processes; else itself."""
    if processes.mode != "ddp":
        return forward
    return nn.parallel.DistributedDataParallel(forward)


def sharing(forward: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Around a forward and backward pass. ddp: gradients travel in the `last` pass of a step only."""
    if isinstance(forward, nn.parallel.DistributedDataParallel) and not last:
        return forward.no_sync()
    return nullcontext()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded. All processes must ask alike."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor on the device of `like`, sharded as it is."""
    moved = tensor.to(like.device)
    return distribute_tensor(moved, like.device_mesh, like.placements) if isinstance(like, DTensor) else moved


def gathered(tensors: dict[str, torch.Tensor], processes: Processes) -> dict[str, torch.Tensor]:
    """Whole tensors in the first process, nothing in the others; on the CPU one at a time where there are several processes."""
    found = {}
    for name, tensor in tensors.items():
        whole = plain(tensor.detach())
        if processes.first:
            found[name] = whole.cpu() if processes.size > 1 else whole
    return found


def _leaves(record: Any) -> Iterator[torch.Tensor]:
    for entry in fields(record):
        value = getattr(record, entry.name)
        if is_dataclass(value):
            yield from _leaves(value)
        elif isinstance(value, torch.Tensor):
            yield value


def _rebuilt(record: Any, tensors: Iterator[torch.Tensor]) -> Any:
    changed: dict[str, Any] = {}
    for entry in fields(record):
        value = getattr(record, entry.name)
        if is_dataclass(value):
            changed[entry.name] = _rebuilt(value, tensors)
        elif isinstance(value, torch.Tensor):
            changed[entry.name] = next(tensors)
    return replace(record, **changed)
