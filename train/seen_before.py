"""Whether documents that are evaluated were trained on: then the numbers say how well the drafter remembers, not how it will serve.

In: where a drafter was read, and keys of documents. Out: how many of them its run had read. What a run held out by
`data.eval_fraction` counts as not read. Known only for a run's folder or a checkpoint inside it, and while its caches are where
run.json says.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from ..common.errors import DflashError
from ..common.spec import read_json
from .reader import CacheReader
from .record import RUN_JSON
from .split import held_out


def documents_seen(drafter: Path, keys: Collection[bytes]) -> int | None:
    """How many of the documents with these keys the drafter was trained on; None when that cannot be known."""
    folder = drafter.resolve()
    run = next((near for near in (folder, *folder.parents[:2]) if (near / RUN_JSON).is_file()), None)
    if run is None:
        return None
    try:
        record = read_json(run / RUN_JSON)
        fraction = float(record["config"]["data"]["eval_fraction"])
        readers = [CacheReader(Path(path)) for path in record["cache_paths"]]
        trained = {key for reader in readers for key in trained_keys(reader, fraction)}
    except (DflashError, KeyError, TypeError, ValueError):
        return None  # the run's caches have moved, or it is of a version that wrote less; nothing depends on it
    return sum(key in trained for key in set(keys))


def trained_keys(reader: CacheReader, eval_fraction: float) -> set[bytes]:
    """Keys of a cache's samples that are not held out."""
    keys = np.concatenate([reader.column(part, "sample_key") for part in range(len(reader.parts))])
    return {key.tobytes() for key in keys[~held_out(reader, eval_fraction)]}
