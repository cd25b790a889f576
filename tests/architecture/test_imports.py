"""The import rules of the project, executable. Reads source only; imports nothing that it checks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "dflash_cache"
LAYERS = {"common": set(), "extract": {"common"}, "train": {"common"}, "cli": {"common", "extract", "train"}}
DOORS = {  # outside library -> the only files that may import it ("x/*": the whole folder)
    "click": {"cli.py"},
    "vllm": {
        "extract/connector.py",
        "extract/cpu_sampling.py",
        "extract/engine_vllm.py",
        "extract/vllm_setup.py",
        "extract/serve.py",
        "extract/serve_worker.py",
        "extract/draft_replay.py",
    },
    "datasets": {"extract/dataset.py"},
    "pyarrow": {"extract/dataset.py", "extract/sources.py"},
    "torch": {
        "train/*",
        "extract/connector.py",
        "extract/row_copies.py",
        "extract/row_memory.py",
        "extract/cpu_sampling.py",
        "extract/devices.py",
        "extract/engine_vllm.py",
        "extract/engine_transformers.py",
        "extract/target_files.py",
        "extract/target_model.py",
    },
    "transformers": {"train/target_head.py", "extract/*"},
    "wandb": {"train/trackers.py"},
    "trackio": {"train/trackers.py"},
    "mlflow": {"train/trackers.py"},
    "requests": set(),
    "httpx": set(),
    "urllib": set(),
    "aiohttp": set(),
    "pickle": set(),
}
MODEL_HALF = {
    "drafter",
    "target_head",
    "masks",
    "anchors",
    "labels",
    "loss",
    "loss_terms",
    "slot_weights",
    "draft_head",
    "drafter_init",
    "target_layers",
    "teacher",
    "targets_pass",
    "teacher_source",
    "metrics",
    "step",
    "optim",
    "ema",
    "idle",
    "activation",
    "dist",
    "work",
    "trainer",
    "checkpoint",
    "export",
    "export_proof",
    "drafter_folder",
    "evaluate",
    "holdout",
    "log",
    "trackers",
    "run",
}
DATA_HALF = {
    *("reader", "window", "packer", "lanes", "scatter", "page_locked", "split", "batch", "loader", "inspect_cache"),
    *("targets", "teacher_targets", "targets_report"),
}
EDGES = {  # file -> modules of its own folder that it may never import
    **{f"train/{name}.py": MODEL_HALF for name in DATA_HALF},
    "train/drafter.py": {"loss", "loss_terms", "slot_weights", "draft_head", "masks", "anchors", "labels", "loader", "checkpoint", "step", "trainer"},
    "train/masks.py": {"anchors", "loss", "metrics", "schedule", "drafter"},
    "train/anchors.py": {"masks", "loss", "metrics", "schedule", "drafter"},
    "train/loss.py": {"masks", "anchors", "schedule", "drafter"},
    "train/metrics.py": {"masks", "anchors", "schedule", "drafter"},
    "train/checkpoint.py": {"trainer"},
    "train/export.py": {"trainer"},
    "train/evaluate.py": {"trainer", "holdout"},
    "train/holdout.py": {"trainer"},
    "train/dist.py": {"step", "loss", "loader", "work", "trainer", "checkpoint", "run"},
    "train/work.py": {"drafter", "loss", "step", "dist", "trainer", "checkpoint"},
    "train/config.py": (MODEL_HALF | DATA_HALF) - {"config"},
    "extract/connector.py": {"run", "dataset", "engine_vllm", "engine_transformers"},
    "extract/writer.py": {"run", "dataset", "connector", "engine_vllm", "engine_transformers"},
    "extract/config.py": {"run", "dataset", "connector", "writer", "engine_vllm", "engine_transformers", "tokens", "serve"},
}
FILES = [*sorted(p for folder in ("common", "extract", "train") for p in (ROOT / folder).rglob("*.py")), ROOT / "cli.py"]


def imports(path: Path) -> Iterator[tuple[int, tuple[str, ...], bool]]:
    """(line, dotted name as parts, is it relative) of every import at any depth of the file."""
    package = (PACKAGE, *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, tuple(alias.name.split(".")), False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = (*base, *(node.module.split(".") if node.module else ()))
            yield from ((node.lineno, (*stem, alias.name), bool(node.level)) for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_layers(path: Path) -> None:
    rel = path.relative_to(ROOT).as_posix()
    layer = rel.split("/")[0].removesuffix(".py")
    bad = []
    for line, name, relative in imports(path):
        top, rest = name[0], name[1:]
        if top in LAYERS or (top == PACKAGE and not relative):
            bad.append(f"{rel}:{line} imports {'.'.join(name)} absolutely; write a relative import")
        elif top == PACKAGE and rest and rest[0] in LAYERS:
            if rest[0] not in LAYERS[layer] | {layer}:
                bad.append(f"{rel}:{line}: {layer} may not import {rest[0]}")
            elif rest[0] == layer and len(rest) > 1 and rest[1] in EDGES.get(rel, set()):
                bad.append(f"{rel}:{line} may not import {rest[1]}")
        elif top in DOORS and not DOORS[top] & {rel, f"{layer}/*"}:
            bad.append(f"{rel}:{line} imports {top}, which only {sorted(DOORS[top]) or 'nothing'} may")
    assert not bad, "\n" + "\n".join(bad)


def test_every_file_says_what_it_owns() -> None:
    silent = [str(p.relative_to(ROOT)) for p in FILES if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not silent


def test_no_file_is_longer_than_its_wall() -> None:
    """400 lines; 600 for the command line, which is flat: one function a verb, and most lines are the help of a flag."""
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > (600 if p.name == "cli.py" else 400)}
    assert not long


def test_no_file_is_named_after_a_drawer() -> None:
    assert not [p.name for p in FILES if p.stem in {"utils", "util", "helpers", "misc", "base", "common"}]


def test_nothing_unpickles() -> None:
    bad = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"torch.load", "pickle.load", "pickle.loads"}:
                safe = any(k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value is True for k in node.keywords)
                bad += [] if safe else [f"{path.name}:{node.lineno}"]
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                bad.append(f"{path.name}:{node.lineno if hasattr(node, 'lineno') else 0}")
    assert not bad
