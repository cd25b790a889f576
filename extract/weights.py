"""The weights of a model folder, as far as they can be known without reading them: which tensor lies where, under which name.

In: a folder of safetensors files. Out: names, shapes, one content hash. The only tensors that are read are an embedding and a head, to
see whether they are the same.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from ..common.errors import InputError
from ..common.fingerprint import sha256_files

INDEX_FILE = "model.safetensors.index.json"
HASHED_PIECES, HASHED_PIECE_BYTES = 16, 4096
"""So many evenly spaced pieces of each weights file go into the content hash: fine-tunes of one model share everything else."""
COMPARED_ROWS = 4096
"""Rows of two matrices that are in memory at once while they are compared."""
OTHER_HEAD = "embed_out"
"""The name that the checkpoints of GPT-NeoX have for what its class calls lm_head."""


def list_weights(folder: Path, place: str) -> dict[str, Path]:
    """Every tensor's file. Raises InputError when weights are missing or only there as pickles."""
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = _read_index(index)
        missing = sorted({file for file in weight_map.values() if not (folder / file).is_file()})
        if missing:
            raise InputError("weights files that the index names are missing", place=place, found=", ".join(missing[:3]), fix="fetch the model again")
        return {name: folder / file for name, file in weight_map.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = any(folder.glob("*.bin"))
        raise InputError(
            "the weights are only there as pickles" if pickled else "the model folder has no weights",
            place=place,
            found=folder,
            expected="*.safetensors",
            fix="save the model again with save_pretrained(safe_serialization=True)" if pickled else "fetch the model again, or name another folder",
        )
    return {name: file for file in files for name in read_header(file)[0] if name != "__metadata__"}


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        if all(isinstance(file, str) and Path(file).name == file for file in weight_map.values()):
            return dict(weight_map)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise InputError(
        "is no index of weights", place=str(index), expected='"weight_map" with a file of this folder for each tensor', fix="fetch it again"
    )


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """(header, where the data begins) of a safetensors file."""
    with open(file, "rb") as handle:
        try:
            (size,) = struct.unpack("<Q", handle.read(8))
            if size > file.stat().st_size:
                raise ValueError("the header is longer than the file")
            return dict(json.loads(handle.read(size))), 8 + size
        except (struct.error, ValueError) as error:
            raise InputError(f"is no whole safetensors file: {error}", place=str(file), fix="fetch the model again") from None


def tensor_shape(file: Path, key: str) -> list[int]:
    """Shape of one tensor. Raises InputError when the file does not have it."""
    header = read_header(file)[0]
    if key not in header:
        raise InputError("lacks a tensor that the index says it has", place=str(file), expected=key, fix="fetch the model again")
    return list(header[key]["shape"])


def content_hash(folder: Path, weight_files: dict[str, Path]) -> str:
    """sha256 over config.json, the index, and each weights file's header, size and some pieces of its data."""
    state = hashlib.sha256(sha256_files([folder / "config.json", folder / INDEX_FILE]).encode())
    for file in sorted(set(weight_files.values())):
        header, start = read_header(file)
        size = file.stat().st_size
        state.update(f"{file.name}\0{size}\0{json.dumps(header, sort_keys=True)}".encode())
        with open(file, "rb") as handle:
            for piece in range(HASHED_PIECES):
                handle.seek(start + (size - start) * piece // HASHED_PIECES)
                state.update(handle.read(HASHED_PIECE_BYTES))
    return state.hexdigest()


def find_key(weight_files: dict[str, Path], path: str, parameter: str, place: str, prefix: str | None = None) -> str:
    """The name, in the weights, of a module's parameter: wrappers put prefixes before, or inside, the module's path.

    prefix: what stands before a path of the same model whose name is known. Raises InputError when there is no such tensor.
    """
    wanted = f"{path}.{parameter}"
    if prefix is not None and f"{prefix}{wanted}" in weight_files:
        return f"{prefix}{wanted}"
    short = wanted.removeprefix("model.").removeprefix("transformer.").removeprefix("language_model.")
    candidates = [name for name in weight_files if name in (short, wanted) or name.endswith((f".{wanted}", f".{short}"))]
    outside = [name for name in candidates if not any(part.isdigit() for part in name.split("."))]
    language = [name for name in outside if "vis" not in name and "audio" not in name]
    if not language:
        raise InputError(
            f"the weights have no {wanted}", place=place, expected=f"a tensor named ...{short}", fix="fetch the model again, or use another model"
        )
    return min(language, key=len)


def find_head(weight_files: dict[str, Path], head_path: str, place: str) -> str | None:
    """The name, in the weights, of the output head; None when none is stored. Raises InputError for a head that is quantised or has a bias."""
    outside = [name for name in weight_files if not any(part.isdigit() for part in name.split("."))]
    owned = [name for path in (head_path, OTHER_HEAD) for name in outside if name.startswith(f"{path}.") or f".{path}." in name]
    if not owned:
        return None
    whole = [name for name in owned if name.endswith(".weight")]
    others = sorted(name.rpartition(".")[2] for name in owned if not name.endswith(".weight"))
    if "bias" in others:
        raise InputError("has an output head with a bias, which is not supported", place=place, found=", ".join(sorted(owned)))
    if others or not whole:
        raise InputError(
            "the embedding, head and final norm must not be quantised",
            place=place,
            found=", ".join(sorted(owned)),
            expected=f"a tensor named ...{head_path}.weight alone",
            fix="use a checkpoint that leaves them as they are",
        )
    return min(whole, key=len)


def same_tensor(weight_files: dict[str, Path], one: str, two: str) -> bool:
    """Are two matrices equal, bit for bit? Reads them piece by piece."""
    from safetensors import safe_open

    with safe_open(weight_files[one], framework="pt") as first, safe_open(weight_files[two], framework="pt") as second:
        a, b = first.get_slice(one), second.get_slice(two)
        if a.get_shape() != b.get_shape() or a.get_dtype() != b.get_dtype():
            return False
        rows = range(0, a.get_shape()[0], COMPARED_ROWS)
        return all(a[row : row + COMPARED_ROWS].equal(b[row : row + COMPARED_ROWS]) for row in rows)
