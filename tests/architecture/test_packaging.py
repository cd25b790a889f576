"""The package list, the version and the README's tree are true. `python tests/architecture/test_packaging.py` rewrites the tree."""

from __future__ import annotations

import ast
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


def idea_of(path: Path) -> str:
    """What a file's first sentence says that it is, without the name before the colon."""
    doc = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    sentence = re.split(r"[.?](?= [A-Z`]|$)", doc, maxsplit=1)[0]
    name, colon, rest = sentence.partition(": ")
    text = rest if colon and len(name.split()) <= 4 else sentence
    return text[:1].lower() + text[1:] if re.match(r"[A-Z][a-z']* ", text) else text


def rewrite_tree() -> None:
    """Write the files of the three folders into the README's tree, each with its idea."""
    readme = ROOT / "README.md"
    lines: list[str] = []
    for line in re.search(r"<!-- tree -->\n```\n(.*?)```", readme.read_text(), re.S)[1].splitlines():  # type: ignore[index]
        if line.startswith("  "):
            continue
        lines.append(line)
        if match := re.match(r"(common|extract|train)/ ", line):
            files = sorted(path for path in (ROOT / match[1]).glob("*.py") if path.name != "__init__.py")
            lines += [f"  {path.name:22} {idea_of(path)}" for path in files]
    tree = "<!-- tree -->\n```\n" + "\n".join(lines) + "\n```"
    readme.write_text(re.sub(r"<!-- tree -->\n```\n.*?```", lambda _: tree, readme.read_text(), flags=re.S))


if __name__ == "__main__":
    rewrite_tree()
