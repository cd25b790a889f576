"""TensorFiles: the safetensors of a model's folder, one file or many behind an index. Headers first; a tensor is read when asked for.

In: a folder. Out: every tensor's name, type, shape and, on demand, its values. Unpickles nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..common.errors import InputError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Of an element, by the header's name of its type; those left out are of one byte."""
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "I32": "int32", "BOOL": "bool"}


@dataclass(frozen=True)
class TensorFacts:
    """What a header says of a tensor."""

    name: str
    dtype: str
    """bfloat16, float32, int64, ...; the header's own word where torch has none."""
    shape: tuple[int, ...]
    bytes: int


class TensorFiles:
    """The tensors below `folder`. Raises InputError naming the file that is missing or cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = self._places()

    @property
    def names(self) -> Collection[str]:
        """Of every tensor, as the index or the one header says."""
        return self._file_of.keys()

    @cached_property
    def facts(self) -> dict[str, TensorFacts]:
        """Every tensor, by name, in alphabetical order."""
        found: dict[str, TensorFacts] = {}
        for path in sorted(set(self._file_of.values())):
            try:
                with safe_open(path, framework="pt") as file:
                    for name in sorted(file.keys()):
                        part = file.get_slice(name)
                        shape, kind = tuple(part.get_shape()), str(part.get_dtype())
                        found[name] = TensorFacts(name, DTYPE_NAMES.get(kind, kind), shape, prod(shape) * BYTES.get(kind, 1))
            except (OSError, SafetensorError) as error:
                raise InputError(f"cannot be read: {error}", place=str(path)) from None
        return dict(sorted(found.items()))

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU."""
        path = self._file_of[name]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise InputError(f"cannot be read: {error}", place=f"{path}: {name}") from None

    def _places(self) -> dict[str, Path]:
        index, single = self.folder / INDEX, self.folder / SINGLE
        try:
            if index.is_file():
                return {name: self._inside(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
            place = index if index.is_file() else single
            raise InputError(f"cannot be read: {error}", place=str(place), expected=f"{SINGLE}, or {INDEX} and its files") from None

    def _inside(self, file: str) -> Path:
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"the index names a file outside of the folder: {file}")
        return self.folder / file
