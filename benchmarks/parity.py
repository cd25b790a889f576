"""vLLM's states against transformers', on tiny random targets of several classes made here: nothing is downloaded.

    python benchmarks/parity.py
    python benchmarks/parity.py --kinds llama,granite --documents 16

Extracts the same documents with both engines, all layers of each target. Prints, as a Markdown table, the relative error of each layer with
the verifier state last; the same between transformers in bfloat16 and in float32, which is what rounding alone does; the documents of
which both engines predict the same next token; and the lower teacher fidelity of the two caches. A class that vLLM cannot run here is
listed with vLLM's reason.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests/extract"), str(Path(__file__).parent)]

import numpy as np  # noqa: E402
from gpu_check import compare  # noqa: E402
from tiny_target import KINDS, NUM_LAYERS, build_target, write_jsonl  # noqa: E402

from dflash_cache.common.errors import DflashError  # noqa: E402
from dflash_cache.extract.config import ExtractConfig  # noqa: E402
from dflash_cache.extract.engine_transformers import hooked  # noqa: E402
from dflash_cache.extract.run import run  # noqa: E402
from dflash_cache.train.fidelity import TeacherCheck  # noqa: E402

DEFAULT_KINDS = "llama,qwen2,qwen3,granite,qwen3_moe,gpt_oss,gemma4,qwen3_next"
TIED = ("gemma4",)


def percent(errors: list[float]) -> str:
    """Each of them, one decimal."""
    return " ".join(f"{100 * error:.1f}" for error in errors)


def rounding(target: Path, documents: list[list[int]]) -> list[float]:
    """Relative error of each block's output between transformers in bfloat16 and in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    rounded, exact = (AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval() for dtype in (torch.bfloat16, torch.float32))
    errors = []
    for ids in documents:
        states = []
        for model in (rounded, exact):
            with torch.inference_mode(), hooked(model.model.layers, range(NUM_LAYERS)) as outputs:
                model(torch.tensor([ids]), use_cache=False)
            states.append([outputs[layer].float() for layer in range(NUM_LAYERS)])
        errors.append([float((a - b).norm() / b.norm()) for a, b in zip(*states, strict=True)])
    return np.mean(errors, 0).tolist()


def row(kind: str, folder: Path, documents: int) -> str:
    """One line of the table."""
    rng = random.Random(0)
    target = build_target(folder / "target", kind, tied=kind in TIED)
    rows = [{"input_ids": [rng.randrange(4, 300) for _ in range(rng.randint(10, 300))]} for _ in range(documents)]
    data = write_jsonl(folder / "data.jsonl", [one | {"loss_mask": [1] * len(one["input_ids"])} for one in rows])
    fidelity = []
    for engine in ("transformers", "vllm"):
        given: dict[str, Any] = {"model": str(target), "layers": tuple(range(NUM_LAYERS - 1)), "data": (str(data),), "max_length": 400}
        summary = run(ExtractConfig(**given, cache=folder / engine, engine=engine), TeacherCheck)
        fidelity.append(summary.fidelity_agreement or 0.0)
    ids = [one["input_ids"] for one in rows]
    errors, same, compared = compare(folder / "vllm", folder / "transformers")
    return f"| {kind} | {percent(errors)} | {percent(rounding(target, ids))} | {round(same * compared)} of {compared} | {min(fidelity):.0%} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=DEFAULT_KINDS, help=f"of {','.join(KINDS)} (default: %(default)s)")
    parser.add_argument("--documents", type=int, default=48, help="(default: %(default)s)")
    options = parser.parse_args()
    lines = []
    for kind in options.kinds.split(","):
        with tempfile.TemporaryDirectory() as name:
            try:
                lines.append(row(kind, Path(name), options.documents))
            except DflashError as error:
                lines.append(f"| {kind} | not run: {' '.join(str(error).split())[:200]} | | | |")
        print(lines[-1], file=sys.stderr, flush=True)
    print("| class | vLLM against transformers, % | transformers: bfloat16 against float32, % | the same next token | fidelity |")
    print("| --- | --- | --- | --- | --- |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
