"""What 3 mantissa bits cost in acceptance: the same drafter trained from a lossless cache and from its rounded copy.

    python benchmarks/lossy.py --cache demo/cache --held-out demo/held-out
    python benchmarks/lossy.py --cache demo/cache --held-out demo/held-out --steps 500 --seeds 0 1 2

The rounded copy holds the same samples in the same parts; seeds, rows and anchors are the same. Both drafters are evaluated on
the lossless held-out cache, which is what a serving engine feeds them, and the rounded one also on a rounded copy of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dflash_cache.common import layout, spec
from dflash_cache.extract.writer import CacheWriter, open_cache
from dflash_cache.train.reader import CacheReader


def rounded_copy(source: Path, to: Path) -> Path:
    """The cache `source` with 3 mantissa bits in its features."""
    reader = CacheReader(source)
    settings = reader.spec.settings
    features = settings.features.model_copy(update={"mantissa_bits": 3})
    wanted = spec.CacheSpec(settings=settings.model_copy(update={"features": features}), limits=reader.spec.limits, provenance=reader.spec.provenance)
    open_cache(to, wanted)
    writer = CacheWriter(to, wanted)
    for number in range(reader.num_samples):
        writer.add(reader.read_sample(number))
    writer.close()
    shutil.copytree(source / layout.TARGET, to / layout.TARGET)
    return to


def dflash(*arguments: object) -> dict[str, Any]:
    """One verb, its JSON document."""
    done = subprocess.run([sys.executable, "-m", "dflash_cache", *map(str, arguments), "--json"], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Print one line for each drafter and evaluation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="lossless cache to train on")
    parser.add_argument("--held-out", type=Path, required=True, help="lossless cache to evaluate on")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the first weights and the anchors (default: 0)")
    options = parser.parse_args()
    settings = {
        "data.row_tokens": 1024,
        "model.block_size": 8,
        "model.num_layers": 2,
        "loss.anchors_per_row": 96,
        "optim.lr": 1e-3,
        "optim.steps": options.steps,
    }
    sets = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        caches = {"lossless": options.cache, "3 mantissa bits": rounded_copy(options.cache, folder / "rounded")}
        held_out = {"lossless": options.held_out, "3 mantissa bits": rounded_copy(options.held_out, folder / "rounded-held-out")}
        for title, cache in caches.items():
            found = dflash("inspect", cache)
            print(f"{title:16} {found['bytes_per_token']:9,.0f} bytes a token, {found['ratio']:.3f} of raw")
        print(f"\n{'trained on':16} {'evaluated on':16} {'seed':>4} {'tau served-like':>16} {'tau all anchors':>16}  accuracy by slot")
        for seed in options.seeds:
            for title, cache in caches.items():
                run = folder / f"run-{seed}-{title.split()[0]}"
                dflash("train", "--cache", cache, "--out", run, *sets, "--set", f"run.seed={seed}", "--set", f"data.seed={seed}")
                for on in ["lossless"] if title == "lossless" else held_out:
                    result = dflash("eval", "--cache", held_out[on], "--drafter", run)
                    slots = " ".join(f"{rate:.3f}" for rate in result["quality"]["accuracy_per_slot"])
                    print(f"{title:16} {on:16} {seed:4} {result['tau_walk']:16.3f} {result['quality']['tau']:16.3f}  {slots}", flush=True)


if __name__ == "__main__":
    main()
