"""The examples run as they stand."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_stand_alone_reader_reads_a_cache_with_zarr_alone():
    script = ROOT / "examples/read_cache.py"
    imported = {alias.name for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"itertools", "json", "sys", "torch", "zarr"}
    done = subprocess.run([sys.executable, script, ROOT / "tests/golden/cache-v1"], capture_output=True, text=True, check=True)
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["(5,)", "(17,)", "(9,)", "(12,)"]


def test_the_demo_says_what_it_does():
    done = subprocess.run([sys.executable, ROOT / "examples/demo/demo.py", "--help"], capture_output=True, text=True, check=True)
    assert "vLLM serves it" in done.stdout
