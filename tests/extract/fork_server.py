"""A process that has imported everything once and forks a child for each job, so that a job starts at once and can be killed.

python fork_server.py MODEL DATA. Reads one JSON job a line and answers {"pids": [...]} as soon as the children run; to the
next line, which is empty, it answers {"codes": [...]} when all have ended (negative: the signal). Jobs:
{"do": "extract", "fields": {ExtractConfig fields}, "pause": seconds, "reject_every": n, "die_at": n or null}
    die_at: the child kills itself just before its n-th rename to a place outside of partial/
{"do": "ranks", "fields": ..., "ranks": n}    n extractions at once, each with its rank
{"do": "write", "cache": path, "writers": n, "samples": n, "length": tokens}
    samples of `builders.make_sample`, dealt to n CacheWriters at once
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import builders
import torch  # noqa: F401 - so that the children need not
from fake_engine import FakeEngine
from safetensors.torch import save_file  # noqa: F401

from dflash_cache.extract import run as run_module
from dflash_cache.extract import workers
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.writer import CacheWriter


def extract(job: dict[str, Any]) -> None:
    FakeEngine.pause_seconds, FakeEngine.reject_every = job.get("pause", 0.0), job.get("reject_every", 0)
    run_module.start_engine = FakeEngine
    workers.START_METHOD = "fork"
    os.fsync = lambda handle: None  # a kill leaves the page cache as it is; only a power cut needs these, and they take most of the time
    if job.get("die_at") is not None:
        die_before_rename(job["die_at"])
    run_module.run(ExtractConfig(**job["fields"]))


def write(job: dict[str, Any], writer_id: int) -> None:
    spec = builders.make_spec()
    writer = CacheWriter(Path(job["cache"]), spec, writer_id)
    for number in range(writer_id, job["samples"], job["writers"]):
        writer.add(builders.make_sample(number, job["length"], spec))
    writer.close()


def die_before_rename(number: int) -> None:
    left = number
    real = {name: getattr(os, name) for name in ("rename", "replace")}

    def deadly(name: str) -> Callable[..., None]:
        def call(source: Any, destination: Any) -> None:
            nonlocal left
            if "/partial/" not in str(destination):
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
            real[name](source, destination)

        return call

    for name in real:
        setattr(os, name, deadly(name))


def fork(work: Callable[[], None]) -> int:
    if pid := os.fork():
        return pid
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    model, data = sys.argv[1:]
    run_module.make_plan(ExtractConfig(model=model, data=(data,), cache=Path("unused"), engine="transformers"))
    print(json.dumps("ready"), flush=True)
    while line := sys.stdin.readline():
        job = json.loads(line)
        if job["do"] == "extract":
            pids = [fork(lambda job=job: extract(job))]
        elif job["do"] == "ranks":
            share = [{**job, "fields": {**job["fields"], "rank": rank, "world_size": job["ranks"]}} for rank in range(job["ranks"])]
            pids = [fork(lambda job=job: extract(job)) for job in share]
        else:
            pids = [fork(lambda job=job, number=number: write(job, number)) for number in range(job["writers"])]
        print(json.dumps({"pids": pids}), flush=True)
        sys.stdin.readline()  # until then the children are not waited for, so that their ids stay theirs
        print(json.dumps({"codes": [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]}), flush=True)


if __name__ == "__main__":
    main()
