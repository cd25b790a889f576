"""Evaluation during training: drafts from every anchor of held-out samples, with a copy of the weights of that moment.

In: held-out rows, the target's head, weights. Out: tau and accuracy per slot, over all and by source. The drafter in training
is not touched; rows are shared among the processes and the counts added up, so that the numbers do not depend on how many.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .config import HeldOutConfig
from .device import Compute
from .dist import Processes, plain
from .drafter import Drafter
from .drafter_spec import DrafterSpec
from .evaluate import draft_row
from .metrics import BlockCounts, Walk, quality
from .tally import Tally
from .target_head import TargetHead
from .work import Rows


@dataclass(frozen=True)
class Drafted:
    """What was drafted for some documents. Add with +."""

    counts: BlockCounts
    walk: Walk
    documents: int

    def __add__(self, other: Drafted) -> Drafted:
        return Drafted(self.counts + other.counts, self.walk + other.walk, self.documents + other.documents)

    def to_dict(self) -> dict[str, Any]:
        """tau: every anchor counts, as in training. tau_walk: as served."""
        return {**quality(self.counts).to_dict(), "tau_walk": self.walk.tau, "documents": self.documents}


class HeldOut:
    """Evaluates weights on the rows of epoch 0 of `rows`. All processes must ask alike."""

    def __init__(self, rows: Rows, head: TargetHead, compute: Compute, config: HeldOutConfig, processes: Processes) -> None:
        self.rows, self.head, self.compute, self.config, self.processes = rows, head, compute, config, processes

    def __call__(self, spec: DrafterSpec, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Numbers of the drafter with `weights`, its whole state under its own names; `by_source` when there are several.

        finite: are all weights? If not, no number means anything.
        """
        started = time.monotonic()
        with torch.device("meta"):
            drafter = Drafter(spec)
        drafter.load_state_dict({name: plain(tensor.detach()) for name, tensor in weights.items()}, strict=True, assign=True)
        by_source: dict[str, Drafted] = {}
        with torch.no_grad():
            for found in self.processes.gather(self._draft(drafter.eval())):
                for source, drafted in found.items():
                    by_source[source] = by_source[source] + drafted if source in by_source else drafted
        whole = sum(by_source.values(), Drafted(BlockCounts.none(spec.num_drafted), Walk(), 0))
        sources = {source: drafted.to_dict() for source, drafted in sorted(by_source.items())} if len(by_source) > 1 else {}
        finite = all(bool(tensor.isfinite().all()) for tensor in drafter.parameters())
        return {**whole.to_dict(), "finite": finite, "by_source": sources, "seconds": round(time.monotonic() - started, 3)}

    def _draft(self, drafter: Drafter) -> dict[str, Drafted]:
        """This process's share of the rows, by source."""
        mine = range(self.processes.rank, self.rows.rows_per_epoch(0), self.processes.size)
        tally = Tally(drafter.spec)
        for batch in self.rows.epoch(0, rows=mine):
            tally.add(batch, [True] * len(batch.sources), *draft_row(drafter, self.head, batch, self.compute, self.config.chunk_blocks))
        return {source: Drafted(group.counts, group.walk, group.documents) for source, group in tally.by_source.items()}
