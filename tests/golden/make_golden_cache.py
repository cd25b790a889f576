"""How tests/golden/cache-v1 was made (once; a new format version gets a folder of its own).

python tests/golden/make_golden_cache.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import builders  # noqa: E402

from dflash_cache.extract.writer import CacheWriter, open_cache  # noqa: E402


def main() -> None:
    spec = builders.make_spec(part_tokens=32)
    cache = HERE / "cache-v1"
    open_cache(cache, spec)
    samples = [builders.make_sample(i, length, spec, next_token=5) for i, length in enumerate((5, 17, 9, 12))]
    writer = CacheWriter(cache, spec)
    for sample in samples:
        writer.add(sample)
    writer.close()
    expected = {
        "lengths": [len(s) for s in samples],
        "input_ids": [s.input_ids.tolist() for s in samples],
        "hidden_sums": [s.hidden_states.astype(np.int64).sum(axis=(0, 2)).tolist() for s in samples],
        "verifier_sums": [int(s.verifier_last_hidden_states.astype(np.int64).sum()) for s in samples],
    }
    (HERE / "cache-v1.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main()
