"""Read a feature cache into torch tensors with zarr alone: nothing of this project is imported.

python examples/read_cache.py CACHE
"""

import itertools
import json
import sys
from pathlib import Path

import torch
import zarr


def states(group: zarr.Group, name: str, rows: slice) -> torch.Tensor:
    """bfloat16 tensor of some rows of `hidden_states` or `verifier_last_hidden_states` (lossless caches)."""
    exponent = torch.from_numpy(group[f"{name}/exponent"][rows]).short()
    mantissa = torch.from_numpy(group[f"{name}/sign_mantissa"][rows]).short()
    return ((exponent << 7) | (mantissa & 0x7F) | ((mantissa & 0x80) << 8)).view(torch.bfloat16)


cache = Path(sys.argv[1])
settings = json.loads((cache / "cache.json").read_text())["settings"]
assert settings["features"]["mantissa_bits"] == 7, "3-bit features are packed; see FORMAT.md"
for part in sorted((cache / "parts").iterdir()):
    group = zarr.open_group(part, mode="r")
    offsets = group["sample_offsets"][:]
    for start, stop in itertools.pairwise(offsets):
        rows = slice(int(start), int(stop))
        ids = torch.from_numpy(group["input_ids"][rows])
        features, verifier = states(group, "hidden_states", rows), states(group, "verifier_last_hidden_states", rows)
        print(part.name, tuple(ids.shape), tuple(features.shape), f"rms {features.float().square().mean().sqrt():.3f}", tuple(verifier.shape))
