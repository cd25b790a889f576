"""The package list, the version and the README's tree are true."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_package_list_names_every_folder_with_code():
    folders = {p.parent.relative_to(ROOT) for top in ("common", "extract", "train") for p in (ROOT / top).rglob("*.py")}
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == {"dflash_cache", *(f"dflash_cache.{'.'.join(f.parts)}" for f in folders)}


def test_no_test_folder_is_a_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_the_readme_tree_names_every_source_file_and_nothing_else():
    tree = re.search(r"<!-- tree -->\n```\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert tree, "README.md has no tree"
    named, folder = set(), ""
    for line in tree[1].splitlines():
        if match := re.match(r"(\w+)/ ", line + " "):
            folder = match[1]
        elif match := re.match(r"  (\w+\.py) ", line + " "):
            named.add(f"{folder}/{match[1]}")
    there = {p.relative_to(ROOT).as_posix() for top in ("common", "extract", "train") for p in (ROOT / top).rglob("*.py") if p.name != "__init__.py"}
    assert named == there


def test_importing_the_package_does_nothing():
    code = "import sys, dflash_cache, dflash_cache.cli; heavy = {'torch', 'vllm', 'transformers', 'zarr', 'datasets', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", code], check=True)
