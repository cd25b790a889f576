"""Metadata that lies, sealed with right digests, is refused before anything that it asks for is allocated."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_cache.common.fingerprint import canonical, digest_bytes, fingerprint


def rewrite_manifest(part: Path, **changes: Any) -> None:
    document = json.loads((part / "zarr.json").read_text())
    body = document["attributes"]["dflash"]
    body |= changes
    body.pop("digest")
    body["digest"] = digest_bytes(canonical(body))
    (part / "zarr.json").write_bytes(canonical(document))


def rewrite_cache_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((path / "cache.json").read_text())
    change(document)
    document["fingerprint"] = fingerprint(document["settings"])
    document.pop("digest")
    document["digest"] = digest_bytes(canonical(document))
    (path / "cache.json").write_text(json.dumps(document))
    for part in sorted((path / "parts").iterdir()):
        rewrite_manifest(part, fingerprint=document["fingerprint"])


def lie(path: Path, name: str) -> None:
    part = path / "parts/00000000-0000"
    files = json.loads((part / "zarr.json").read_text())["attributes"]["dflash"]["files"]
    huge = {"size": 10**12, "xxh3_128": "0" * 32}
    {
        "tokens": lambda: rewrite_manifest(part, tokens=10**12),
        "one token less": lambda: rewrite_manifest(part, tokens=63),
        "samples": lambda: rewrite_manifest(part, samples=10**12),
        "chunk_tokens": lambda: rewrite_manifest(part, chunk_tokens=1 << 20),
        "a chunk less": lambda: rewrite_manifest(part, tokens=48),
        "a huge file": lambda: rewrite_manifest(part, files=files | {"input_ids/c/0": huge}),
        "a file outside": lambda: rewrite_manifest(part, files=files | {"../../../outside": huge}),
        "an absolute file": lambda: rewrite_manifest(part, files=files | {"/etc/hostname": huge}),
        "a million files": lambda: rewrite_manifest(part, files=files | {f"f{n}": huge for n in range(100_000)}),
        "hidden_size": lambda: rewrite_cache_json(path, lambda d: d["settings"]["target"].update(hidden_size=1 << 20)),
        "layers": lambda: rewrite_cache_json(
            path, lambda d: (d["settings"]["target"].update(num_layers=1024), d["settings"]["features"].update(layer_ids=list(range(1024))))
        ),
        "mantissa_bits": lambda: rewrite_cache_json(path, lambda d: d["settings"]["features"].update(mantissa_bits=3)),
        "limits": lambda: rewrite_cache_json(
            path, lambda d: (d["limits"].update(chunk_tokens=1 << 20), d["settings"]["target"].update(hidden_size=4096))
        ),
        "nested cache.json": lambda: (path / "cache.json").write_text("[" * 1_000_000),
        "nested manifest": lambda: (part / "zarr.json").write_text('{"attributes":' * 100_000),
        "endless cache.json": lambda: os.truncate(path / "cache.json", 1 << 40),
        "endless manifest": lambda: os.truncate(part / "zarr.json", 1 << 40),
        "a long number": lambda: (part / "zarr.json").write_text('{"attributes": {"dflash": {"tokens": ' + "9" * 100_000 + "}}}"),
    }[name]()


LIES = [
    "tokens", "one token less", "samples", "chunk_tokens", "a chunk less", "a huge file", "a file outside", "an absolute file", "a million files",
    "hidden_size", "layers", "mantissa_bits", "limits", "nested cache.json", "nested manifest", "endless cache.json", "endless manifest", "a long number",
]  # fmt: skip

MEASURE = """
import json, sys, time
from pathlib import Path
from dflash_cache.common.errors import DflashError
from dflash_cache.train.reader import CacheReader
from dflash_cache.train.verify import verify
for line in sys.stdin.read().split():
    started = time.monotonic()
    try:
        CacheReader(Path(line))
        answer = ""
    except DflashError as error:
        answer = type(error).__name__
    try:
        found = not verify(Path(line), teacher=False).ok
    except DflashError:
        found = True
    peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(json.dumps([answer, found, time.monotonic() - started, peak]))
"""


def test_metadata_that_lies_is_refused_in_two_seconds_and_200_megabytes(write_cache, tmp_path):
    path, _, _ = write_cache(lengths=[30, 34, 29, 35])
    for number, name in enumerate(LIES):
        shutil.copytree(path, tmp_path / f"lie{number}")
        lie(tmp_path / f"lie{number}", name)
    asked = "\n".join(str(tmp_path / f"lie{number}") for number in range(len(LIES)))
    done = subprocess.run([sys.executable, "-c", MEASURE], input=asked, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(LIES)
    for name, (answer, found, seconds, kilobytes) in zip(LIES, answers, strict=True):
        assert answer in ("CacheDamaged", "InputError"), name
        assert found, name
        assert seconds < 2, name
        assert kilobytes < 200_000, name
