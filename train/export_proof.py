"""ExportProof: does the written folder compute what the checkpoint computes? A few blocks, drafted by both.

In: the written folder, the checkpoint's drafter, and a cache of its run or none. Out: how far apart they are. The folder goes
through the plain forward, which shares no code with the trainer's and reads the config as a serving engine does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..common import layout
from ..common.errors import DflashError
from ..common.layers import layer_slots
from .anchors import pad_anchors
from .conventions import Conventions, served_conventions, trained_conventions
from .device import Compute
from .draft_head import DraftHead, draft_head
from .drafter import Drafter
from .drafter_folder import CONFIG, NOT_TRAINED, cast_floats, fill_drafter, read_config
from .drafter_spec import DrafterSpec
from .masks import query_positions
from .plain_forward import PlainDrafter
from .reader import CacheReader
from .step import attention_masks
from .target_head import TargetHead
from .tensor_files import TensorFiles

BLOCKS = 4
"""Blocks that are drafted twice."""
FIRST_ROWS = 512
"""They start within so many tokens of their document, where it has anchors there."""
RANDOM_ROWS = 64
TOLERANCE = 1e-3
"""Largest relative difference of two float32 forwards of the same weights; a wrong convention gives a hundred times as much."""
HEAD_ROWS = 16_384
"""Rows of the head that are float32 at once."""
PLAIN = Compute(torch.device("cpu"), torch.float32, "dense")


@dataclass(frozen=True)
class ExportProof:
    """What was compared, and how it went."""

    on: str
    """The states that both read: a sample of the run's cache, or random numbers."""
    cache: str | None
    """The cache; None with random states."""
    anchors: int
    """Blocks drafted by both."""
    largest_relative_difference: float
    """Folder, by the plain forward, against the trainer's forward of the same weights: largest over the blocks."""
    rounding_difference: float
    """Folder against the checkpoint, whose weights were not rounded."""
    tokens: int | None
    """Drafted tokens compared between folder and checkpoint; None without the target's head."""
    agreeing_tokens: int | None
    """Of them, the same."""

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)

    def to_text(self) -> str:
        """For people."""
        tokens = f"; {self.agreeing_tokens} of {self.tokens} drafted tokens are the checkpoint's" if self.tokens is not None else ""
        return (
            f"read back and run on {self.on}: {self.anchors} blocks differ by {self.largest_relative_difference:.1e}, "
            f"by {self.rounding_difference:.1e} with the rounding of the weights{tokens}"
        )


@dataclass(frozen=True)
class _Case:
    """One document and the blocks to draft in it."""

    on: str
    features_TKH: torch.Tensor
    row_A: torch.Tensor
    """int64: anchors, ascending; a row is its position."""
    token_A: torch.Tensor
    embed: Callable[[torch.Tensor], torch.Tensor]
    """int64 [n] -> float32 [n, H]."""
    head: DraftHead | None


def prove(folder: Path, drafter: Drafter, reader: CacheReader | None, head: TargetHead | None) -> ExportProof:
    """Draft the same blocks with the folder and with the checkpoint's `drafter`.

    reader, head: of a cache; None: random states. Raises DflashError when the folder computes something else.
    """
    spec = drafter.spec
    case = _cached_case(spec, drafter.d2t, reader, head) if reader is not None and head is not None else None
    case = case or _random_case(spec)
    files = TensorFiles(folder)
    stored = {name: files.read(name) for name in files.facts if name not in NOT_TRAINED}
    plain = PlainDrafter({name: cast_floats(tensor, torch.float32) for name, tensor in stored.items()}, _conventions(folder, spec))
    with torch.inference_mode():
        served_ABH = torch.stack([plain.block(case.features_TKH, int(token), int(row), case.embed) for row, token in zip(case.row_A, case.token_A)])
        same_ABH = _forward(fill_drafter(spec, stored, folder), case)
        own_ABH = _forward(drafter, case)
        difference = _difference(served_ABH, same_ABH)
        if not difference <= TOLERANCE:
            problem = "what was written does not compute what the checkpoint computes; the folder was not published"
            raise DflashError(
                problem, place=str(folder / CONFIG), found=f"a relative difference of {difference:.1e} on {case.on}", expected=f"{TOLERANCE}"
            )
        tokens = agreeing = None
        if case.head is not None:
            ours_n, theirs_n = (_best(case.head, hidden_ABH[:, spec.first_slot :].flatten(0, 1)) for hidden_ABH in (own_ABH, served_ABH))
            tokens, agreeing = len(ours_n), int((ours_n == theirs_n).sum())
    return ExportProof(
        case.on,
        str(reader.path) if reader is not None and case.head is not None else None,
        len(case.row_A),
        difference,
        _difference(served_ABH, own_ABH),
        tokens,
        agreeing,
    )


def _conventions(folder: Path, spec: DrafterSpec) -> Conventions:
    """As a server reads the config. Raises DflashError where that is not what the drafter was trained with."""
    served, trained = served_conventions(read_config(folder / CONFIG), str(folder / CONFIG)), trained_conventions(spec)
    served = replace(served, logit_scale=trained.logit_scale, logit_softcap=trained.logit_softcap)  # not every engine's drafter has them
    odd = [field.name for field in fields(served) if getattr(served, field.name) != getattr(trained, field.name)]
    if odd:
        found, expected = ("; ".join(f"{name} {getattr(of, name)}" for name in odd) for of in (served, trained))
        raise DflashError(
            "a server would run what was written otherwise than it was trained", place=str(folder / CONFIG), found=found, expected=expected
        )
    return served


def _forward(drafter: Drafter, case: _Case) -> torch.Tensor:
    """The trainer's forward, [A, B, H]."""
    spec, rows = drafter.spec, len(case.features_TKH)
    anchors, document_T, position_T = pad_anchors(case.row_A, 1), torch.zeros(rows, dtype=torch.int32), torch.arange(rows)
    ids_AB = torch.full((len(anchors), spec.block_size), spec.mask_token_id)
    ids_AB[:, 0] = case.token_A
    masks, places_Q = attention_masks(anchors, document_T, spec, PLAIN), query_positions(anchors.row_A, position_T, spec.block_size)
    hidden_QH: torch.Tensor = drafter(case.features_TKH.flatten(1), position_T, case.embed(ids_AB.flatten()), places_Q, masks)
    return hidden_QH.unflatten(0, ids_AB.shape)


def _difference(one_ABH: torch.Tensor, other_ABH: torch.Tensor) -> float:
    """The largest, over blocks, of the largest difference relative to the largest number."""
    scale_A = other_ABH.abs().amax((1, 2)).clamp_min(1e-30)
    return float(((one_ABH - other_ABH).abs().amax((1, 2)) / scale_A).max())


def _best(head: DraftHead, hidden_nH: torch.Tensor) -> torch.Tensor:
    """int64 [n]: the most likely draft ids. Scale and bound of the logits do not change which they are."""
    best_n, value_n = torch.zeros(len(hidden_nH), dtype=torch.int64), torch.full((len(hidden_nH),), -torch.inf)
    for start in range(0, len(head.head.weight_VH), HEAD_ROWS):
        found = (hidden_nH @ head.head.weight_VH[start : start + HEAD_ROWS].float().T).max(-1)
        best_n = torch.where(found.values > value_n, found.indices + start, best_n)
        value_n = torch.maximum(value_n, found.values)
    return best_n


def _cached_case(spec: DrafterSpec, d2t_D: torch.Tensor | None, reader: CacheReader, head: TargetHead) -> _Case | None:
    """Blocks of the first sample that has anchors; early ones, for the plain forward is slow."""
    for sample in range(reader.num_samples):
        ids, mask = reader.tokens(sample, "input_ids"), reader.tokens(sample, "loss_mask").astype(bool)
        rows = np.flatnonzero(mask[:-1] & mask[1:])
        if not len(rows):
            continue
        early = rows[rows < FIRST_ROWS] if rows[0] < FIRST_ROWS else rows[:BLOCKS]
        row_A = torch.from_numpy(np.unique(early[np.linspace(0, len(early) - 1, BLOCKS).round().astype(int)]))
        part, start = int(reader.part_of[sample]), int(reader.starts[sample])
        slots = layer_slots(spec.target_layer_ids, reader.spec.layer_ids, str(reader.path))
        bits = reader.read_states(part, start, start + int(row_A[-1]) + 1, layout.HIDDEN_STATES, slots)
        features_TKH = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float()
        tokens_A = torch.from_numpy(ids.astype(np.int64))[row_A]
        on = f"sample {sample} of the cache"
        return _Case(on, features_TKH, row_A, tokens_A, lambda wanted: head.embed(wanted).float(), draft_head(head.head, d2t_D))
    return None


def _random_case(spec: DrafterSpec) -> _Case:
    generator = torch.Generator().manual_seed(0)
    features_TKH = torch.randn(RANDOM_ROWS, len(spec.target_layer_ids), spec.hidden_size, generator=generator)
    rows_2H = torch.randn(2, spec.hidden_size, generator=generator)
    row_A = torch.linspace(1, RANDOM_ROWS - 1, BLOCKS).long()
    anchor = 0 if spec.mask_token_id else 1

    def embed(ids: torch.Tensor) -> torch.Tensor:
        return rows_2H[(ids == spec.mask_token_id).long()]

    return _Case("random states", features_TKH, row_A, torch.full_like(row_A, anchor), embed, None)
