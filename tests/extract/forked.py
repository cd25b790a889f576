"""What tests share that run extractions in processes and kill them: the fork server's other end, and caches compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import tiny_target as tiny

from dflash_cache.common.sample import Sample
from dflash_cache.train.reader import CacheReader
from dflash_cache.train.verify import verify

ROWS = [tiny.chat(f"question {number}", "answer " * (number % 9 + 1)) for number in range(60)]
ROWS[10:10] = ["{broken", "", ROWS[3], tiny.chat("long", "x" * 300)]
REJECT_EVERY = 9


class Server:
    """Gives jobs to the fork server."""

    def __init__(self, *arguments: Path) -> None:
        command = [sys.executable, str(Path(__file__).with_name("fork_server.py")), *map(str, arguments)]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # it forks, and threads do not survive that
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, text=True, env=one_thread)
        assert self.answer() == "ready"

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the fork server has ended"
        return json.loads(line)

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def start(self, **job: Any) -> list[int]:
        self.send(json.dumps(job))
        return self.answer()["pids"]

    def codes(self) -> list[int]:
        self.send("")
        return self.answer()["codes"]

    def do(self, **job: Any) -> list[int]:
        self.start(**job)
        return self.codes()


def extraction(model: Path, data: Path, cache: Path, pause: float = 0.0, part_tokens: int = 400, **job: Any) -> dict[str, Any]:
    given = {"model": str(model), "data": [str(data)], "cache": str(cache), "engine": "transformers", "max_length": 256}
    sizes = {"part_tokens": part_tokens, "chunk_tokens": 32, "layers": [1, 3]}
    return {"do": "extract", "fields": given | sizes, "pause": pause, "reject_every": REJECT_EVERY, **job}


def samples_by_key(cache: Path) -> dict[bytes, Sample]:
    reader = CacheReader(cache)
    samples = [reader.read_sample(number) for number in range(reader.num_samples)]
    assert len({sample.key for sample in samples}) == len(samples)
    return {sample.key: sample for sample in samples}


def assert_same_cache(cache: Path, reference: Path) -> None:
    ours, theirs = samples_by_key(cache), samples_by_key(reference)
    assert ours.keys() == theirs.keys()
    for key, sample in ours.items():
        for field in fields(Sample):
            assert np.array_equal(getattr(sample, field.name), getattr(theirs[key], field.name)), field.name
    assert (cache / "rejects.jsonl").read_bytes() == (reference / "rejects.jsonl").read_bytes()
    assert verify(cache, teacher=False).problems == []
    assert sorted(path.name for path in cache.iterdir()) == ["cache.json", "extract.log.jsonl", "partial", "parts", "rejects.jsonl", "target"]
    assert list((cache / "partial").iterdir()) == []
