"""Several processes of one run on the CPU: started as torchrun would, joined by gloo, ended when one fails or time is up."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from builders import make_sample, make_spec, write_target_files

from dflash_cache.extract.writer import CacheWriter, open_cache
from dflash_cache.train.config import TrainConfig

SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"row_tokens": 64},
    "model": {"block_size": 4, "num_layers": 2, "mask_token_id": 0},
    "loss": {"anchors_per_row": 16, "feature_noise": 0.05},
    "optim": {"steps": 6, "lr": 3e-3, "warmup_ratio": 0.3, "accumulate_rows": 2},
    "run": {"device": "cpu", "dtype": "float32", "trackers": (), "log_every": 1, "log_samples": True, "checkpoint_every": 100},
    "distributed": {"timeout_seconds": 20},
}

PRELOADED = [
    *("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "dflash_cache.extract.writer"),
    *(f"dflash_cache.train.{name}" for name in ("run", "trainer", "loader", "holdout", "drafter_init", "target_head")),
]
"""Imported once, in the process from which the others are forked."""


def settings(**sections: dict[str, Any]) -> dict[str, Any]:
    return {name: {**SETTINGS.get(name, {}), **sections.get(name, {})} for name in {*SETTINGS, *sections}}


def write(folder: Path, lengths: Sequence[int], *, poisoned: Sequence[int] = (), unsupervised: Sequence[int] = (), seed: int = 0) -> Path:
    """A cache of samples of these lengths. poisoned: numbers of samples with a state that is not a number."""
    spec = make_spec()
    open_cache(folder, spec)
    write_target_files(folder, spec)
    writer = CacheWriter(folder, spec)
    for number, length in enumerate(lengths):
        sample = make_sample(number, length, spec, seed=seed)
        if number in poisoned:
            states = sample.hidden_states.copy()
            states[0] = 0x7FC0
            sample = replace(sample, hidden_states=states)
        if number in unsupervised:
            sample = replace(sample, loss_mask=np.zeros(length, np.uint8))
        writer.add(sample)
    writer.close()
    return folder


def train(
    config: dict[str, Any], caches: Sequence[Path], out: Path, resume: bool = False, stop_after: int | None = None, **more: Any
) -> dict[str, Any]:
    """A whole run as `dflash train` does it, in this process; `stop_after`: as if it ended after that step."""
    from dflash_cache.train.run import run
    from dflash_cache.train.trainer import Trainer

    whole = Trainer.train
    if stop_after is not None:
        Trainer.train = lambda self: whole(self, stop_after)  # type: ignore[method-assign, misc]
    try:
        return run(TrainConfig.model_validate(config), caches, out, resume=resume, **more).to_dict()
    finally:
        Trainer.train = whole  # type: ignore[method-assign]


def together(size: int, work: Callable[..., Any], *arguments: Any, seconds: float = 60, **more: Any) -> list[Any]:
    """What `work` returns in each of `size` processes. Raises RuntimeError with the first traceback, or when time is up."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = context.Queue()
    processes = [context.Process(target=_one, args=(rank, size, port, results, work, arguments, more), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    until = time.monotonic() + seconds
    try:
        while len(found) < size:
            rank, ok, value = results.get(timeout=max(until - time.monotonic(), 0.01))
            if not ok:
                raise RuntimeError(value)
            found[rank] = value
        for process in processes:
            process.join(timeout=10)
    except queue.Empty:
        raise RuntimeError(f"{size - len(found)} of {size} processes did not end within {seconds} s") from None
    finally:
        for process in processes:
            process.kill()
    return [found[rank] for rank in range(size)]


def _one(rank: int, size: int, port: int, results: Any, work: Callable[..., Any], arguments: tuple[Any, ...], more: dict[str, Any]) -> None:
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1000 * rank)  # global randomness differs and must not matter
    np.random.seed(rank)
    try:
        results.put((rank, True, work(*arguments, **more)))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
