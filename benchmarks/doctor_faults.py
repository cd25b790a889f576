"""What the doctor says of every planted fault: `python benchmarks/doctor_faults.py` prints the table of docs/serving.md.

A tiny drafter is trained to draft nearly everything right; each fault of `tests/train/plants.py` is planted into a copy of its exported
folder, or played by an engine that reads the folder otherwise.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

for folder in ("tests", "tests/train"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

import torch  # noqa: E402
from periodic import trained  # noqa: E402
from plants import FAULTY, PLANTS, SILENT, WINDOWED, engine  # noqa: E402

from dflash_cache.train.diagnosis import Diagnosis  # noqa: E402
from dflash_cache.train.doctor import diagnose  # noqa: E402
from dflash_cache.train.export import export  # noqa: E402


def row(where: str, fault: str, found: Diagnosis) -> str:
    """One line of the table: the lengths of the two ways that part, and the causes."""
    first, second = (found.ways[-2], found.ways[-1])
    parting = found.partings[-1]
    alike = "" if parting.agreement is None else f"{parting.agreement:.0%}"
    said = "; ".join(cause.change for cause in parting.causes) or "; ".join(f"{name} (no effect here)" for name in found.differences)
    return f"| {where} | {fault} | {first.tau:.2f} → {second.tau:.2f} | {alike} | {said or 'agree'} |"


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        full = trained(Path(name) / "full")
        windowed = trained(Path(name) / "windowed", layer_types=("sliding_attention",), sliding_window=7)
        print("| where | fault | tau | tokens alike | diagnosis |\n| --- | --- | --- | --- | --- |")
        sets = [(full, "folder", {"none": (lambda folder: None, ""), **PLANTS, **SILENT}), (windowed, "folder, window 7", WINDOWED)]
        for made, where, faults in sets:
            for number, (fault, (plant, _)) in enumerate(faults.items()):
                drafter = made / f"drafter-{number}"
                export(made / "run", drafter)
                plant(drafter)
                print(row(where, fault, diagnose(made / "held-out", drafter, made / "run", device="cpu")), flush=True)
        sound = full / "drafter-0"
        for fault, (changed, _) in FAULTY.items():
            print(row("engine", fault, diagnose(full / "held-out", sound, full / "run", engine(full, sound, **changed), device="cpu")), flush=True)


if __name__ == "__main__":
    main()
