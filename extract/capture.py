"""Which model classes of the installed vLLM give hidden states, read from its source without importing it.

vLLM itself checks the loaded model, after its weights. Importing the class to ask it takes ten seconds and may start CUDA, so
here its bases are followed from file to file, to the interface `SupportsEagle3` or to their end. In: an architecture's name.
Out: yes, no, or not known (a class that vLLM does not list, or bases that cannot be followed), which is left to vLLM.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import lru_cache
from pathlib import Path

INTERFACE, ATTRIBUTE = "SupportsEagle3", "supports_eagle3"
"""A class has the interface by inheritance, or by this attribute of its own."""
MODELS = "vllm.model_executor.models"
OUTSIDE = ("torch", "abc", "typing", "typing_extensions", "collections", "enum", "dataclasses")
"""Packages whose classes do not have the interface."""


def vllm_folder() -> Path | None:
    """Where the installed vLLM's source lies; None when there is none."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def gives_hidden_states(architecture: str, vllm: Path) -> bool | None:
    """Does vLLM's class for `architecture` (as in config.json) have the interface? None when that cannot be told."""
    place = _registered(vllm).get(architecture)
    if place is None:
        return None
    module, name = place
    return _has_interface(vllm, module if module.startswith("vllm.") else f"{MODELS}.{module}", name, ())


@lru_cache
def _registered(vllm: Path) -> dict[str, tuple[str, str]]:
    """(module, class) by architecture, as vLLM's registry lists them."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(_parse(vllm, f"{MODELS}.registry") or ast.Module([], [])):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple) and len(value.elts) == 2:
                    module, name = value.elts
                    if isinstance(module, ast.Constant) and isinstance(name, ast.Constant):
                        found.setdefault(str(key.value), (str(module.value), str(name.value)))
    return found


def _has_interface(vllm: Path, module: str, name: str, seen: tuple[tuple[str, str], ...]) -> bool | None:
    if name == INTERFACE:
        return True
    if module.split(".")[0] in OUTSIDE:
        return False
    tree = _parse(vllm, module)
    if tree is None or (module, name) in seen:
        return None
    path = (*seen, (module, name))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            if any(_assigns(statement, ATTRIBUTE) for statement in node.body):
                return True
            answers = [_base_has_interface(vllm, module, tree, base, path) for base in node.bases]
            return True if True in answers else None if None in answers else False
    origin = _imported_from(vllm, module, tree, name)
    return None if origin is None else _has_interface(vllm, *origin, path)


def _base_has_interface(vllm: Path, module: str, tree: ast.Module, base: ast.expr, seen: tuple[tuple[str, str], ...]) -> bool | None:
    while isinstance(base, ast.Subscript):  # Generic[T]
        base = base.value
    if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name):  # nn.Module
        origin = _imported_from(vllm, module, tree, base.value.id)
        return False if origin is not None and origin[0].split(".")[0] in OUTSIDE else None
    if not isinstance(base, ast.Name):
        return None
    return False if base.id == "object" else _has_interface(vllm, module, base.id, seen)


def _imported_from(vllm: Path, module: str, tree: ast.Module, name: str) -> tuple[str, str] | None:
    """(module, name there) of what `name` means in `module`, by its imports."""
    package = module if _file(vllm, module).name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if (alias.asname or alias.name.split(".")[0]) != name:
                    continue
                if isinstance(node, ast.Import):
                    return alias.name, ""
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                return ".".join([*above, *([node.module] if node.module else [])]), alias.name
    return None


def _assigns(statement: ast.stmt, name: str) -> bool:
    targets = [statement.target] if isinstance(statement, ast.AnnAssign) else statement.targets if isinstance(statement, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _file(vllm: Path, module: str) -> Path:
    path = vllm.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@lru_cache(maxsize=64)
def _parse(vllm: Path, module: str) -> ast.Module | None:
    if module.split(".")[0] != "vllm":
        return None
    try:
        return ast.parse(_file(vllm, module).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
