"""DraftHead: what turns a drafter's hidden states into tokens: the target's head, or the rows of it that a pruned drafter keeps.

In: the drafter's `d2t` and the target's head. Out: logits over D draft tokens, and the way from token ids to draft ids and back.
The rows are the target's own, frozen. `d2t` holds offsets, as vLLM and speculators read it: token id = draft id + d2t[draft id].
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .loss import Head

OUTSIDE = -1
"""Draft id of a token that the drafter cannot propose."""


@dataclass(frozen=True)
class DraftHead:
    """The head of a drafter."""

    head: Head
    """Of D rows."""
    kept_D: torch.Tensor | None = None
    """int64 [D]: token id of each row, ascending, on the head's device; None: the whole vocabulary."""

    def to_draft(self, ids: torch.Tensor) -> torch.Tensor:
        """Draft ids of token ids, OUTSIDE where a token is not kept."""
        if self.kept_D is None:
            return ids
        kept_D = self.kept_D.to(ids.device)
        place = torch.searchsorted(kept_D, ids).clamp_max(len(kept_D) - 1)
        return torch.where(kept_D[place] == ids, place, OUTSIDE)

    def to_tokens(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Token ids of draft ids."""
        return draft_ids if self.kept_D is None else self.kept_D.to(draft_ids.device)[draft_ids]

    def kept_logits(self, logits_nV: torch.Tensor) -> torch.Tensor:
        """[n, D]: of logits over the whole vocabulary, those of the kept tokens."""
        return logits_nV if self.kept_D is None else logits_nV[:, self.kept_D]


def draft_head(head: Head, d2t_D: torch.Tensor | None) -> DraftHead:
    """The drafter's head, made of rows of the target's. d2t_D: int64 [D], offsets; None keeps all."""
    if d2t_D is None:
        return DraftHead(head)
    kept_D = (d2t_D + torch.arange(len(d2t_D), device=d2t_D.device)).to(head.weight_VH.device)
    return DraftHead(replace(head, weight_VH=head.weight_VH[kept_D]), kept_D)


def offsets(kept_D: torch.Tensor) -> torch.Tensor:
    """int64 [D]: `d2t` of ascending token ids."""
    return kept_D - torch.arange(len(kept_D))


def is_kept(d2t_D: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """bool [V]: `t2d`, which tokens are kept, as speculators stores it beside `d2t`."""
    kept_V = torch.zeros(vocab_size, dtype=torch.bool)
    kept_V[d2t_D.cpu() + torch.arange(len(d2t_D))] = True
    return kept_V
