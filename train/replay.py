"""Replays: the same documents of a cache drafted by the trainer and by the plain forward, one serving walk each.

In: a cache's documents and a drafter in either form. Out: for each document, which tokens were drafted at which anchors, and the
steps and accepted tokens of a walk, as `metrics.walk` counts them. Knows nothing of engines or of what may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from .anchors import candidate_rows, pad_anchors
from .batch import Batch
from .conventions import Conventions
from .device import Compute
from .draft_head import draft_head
from .drafter import Drafter
from .plain_forward import PlainDrafter
from .reader import CacheReader
from .step import draft, labels_of, row_inputs
from .target_head import TargetHead
from .teacher import teacher_tokens

NO_LAYER = -1
"""Stands in `layer_ids` for a layer whose states are replaced by zeros."""
DraftAt = Callable[[int], list[int]]
"""The tokens drafted at an anchor, a row of the document."""


@dataclass(frozen=True)
class Document:
    """A document of the cache, with all layers that are stored."""

    number: int
    """Its sample."""
    batch: Batch
    """Itself alone; its features are of all stored layers."""
    teacher_T: list[int]
    """The target's most likely token after each supervised row, or less than 0."""
    anchors: list[int]
    """Every valid one, ascending."""
    prompt_tokens: int
    """Tokens before the first supervised one."""
    answer: list[int]
    """The first run of supervised tokens."""

    def of_answer(self, tokens: int) -> Document:
        """Only the first answer's first `tokens` tokens are supervised, and it is they that a draft must equal.

        That is what a served answer is: what comes after is another turn, and the target's word is the text that it wrote.
        """
        end = self.prompt_tokens + min(tokens, len(self.answer))  # one behind the last row where the last token is the sample's next_token
        following_T = torch.arange(len(self.batch.loss_mask_T)) < end - 1
        batch = replace(self.batch, loss_mask_T=self.batch.loss_mask_T & following_T, next_supervised_T=self.batch.next_supervised_T & following_T)
        anchors = [row for row in self.anchors if row < end - 1]
        return replace(self, batch=batch, teacher_T=self.batch.next_ids_T.tolist(), anchors=anchors)

    def expected(self, row: int, count: int) -> list[int]:
        """What the target says of the `count` tokens after an anchor; ends where the supervision does."""
        following_T = self.batch.next_supervised_T
        found: list[int] = []
        while len(found) < count and row + len(found) < len(self.teacher_T) and following_T[row + len(found)]:
            found.append(self.teacher_T[row + len(found)])
        return found


@dataclass(frozen=True)
class Walked:
    """A document walked."""

    drafts: dict[int, list[int]]
    """Anchor to its drafted tokens, for the anchors of the walk."""
    accepted: int
    """Of all steps."""

    @property
    def steps(self) -> int:
        """Drafts."""
        return len(self.drafts)


def read_document(reader: CacheReader, number: int, head: TargetHead) -> Document:
    """Sample `number` of a cache."""
    sample = reader.read_sample(number)
    ids = torch.from_numpy(sample.input_ids.astype(np.int64))
    following = torch.cat((ids[1:], torch.tensor([sample.next_token])))
    mask = torch.from_numpy(sample.loss_mask.astype(bool))
    batch = Batch(
        input_ids_T=ids,
        document_T=torch.zeros(len(ids), dtype=torch.int32),
        position_T=torch.arange(len(ids), dtype=torch.int32),
        loss_mask_T=mask,
        next_ids_T=following,
        next_supervised_T=torch.cat((mask[1:], torch.tensor([sample.next_token >= 0]))),
        features=torch.from_numpy(sample.hidden_states).view(torch.bfloat16),
        verifier=torch.from_numpy(sample.verifier_last_hidden_states).view(torch.bfloat16),
        sample_ids=((0, number),),
        sources=(sample.source,),
    )
    anchors = candidate_rows(batch.document_T, batch.loss_mask_T, batch.next_supervised_T).tolist()
    supervised = mask.nonzero().squeeze(1).tolist()
    first = supervised[0] if supervised else len(ids)
    end = first + int(mask[first:].long().cumprod(0).sum())
    answer = ids[first:end].tolist() + ([sample.next_token] if end == len(ids) and sample.next_token >= 0 else [])
    return Document(number, batch, teacher_tokens(batch, batch.next_supervised_T, head).tolist(), anchors, first, answer)


def walk_document(document: Document, draft_at: DraftAt) -> Walked:
    """Draft at the first anchor, accept the leading right tokens, let the target add one, go on from there."""
    drafts: dict[int, list[int]] = {}
    accepted = upcoming = 0
    for row in document.anchors:
        if row < upcoming:
            continue
        drafts[row] = draft_at(row)
        streak = leading(drafts[row], document.expected(row, len(drafts[row])))
        accepted += streak
        upcoming = row + streak + 1
    return Walked(drafts, accepted)


def leading(drafted: list[int], expected: list[int]) -> int:
    """Drafted tokens that are right before the first that is not."""
    for place, (one, other) in enumerate(zip(drafted, expected)):
        if one != other:
            return place
    return min(len(drafted), len(expected))


def trainer_drafts(drafter: Drafter, head: TargetHead, slots: tuple[int, ...], document: Document, compute: Compute) -> DraftAt:
    """What the trainer's own step drafts, with its anchors, masks and attention. slots: of the drafter's layers in the cache."""
    batch, spec = replace(document.batch, features=document.batch.features[:, list(slots)]), drafter.spec
    inputs, kept = row_inputs(batch, compute), draft_head(head.head, drafter.d2t)

    def draft_at(row: int) -> list[int]:
        anchors = pad_anchors(torch.tensor([row]), 1)
        with torch.no_grad():
            hidden_BH = draft(drafter, spec, head, inputs, anchors.to(compute.device), compute)
            tokens = kept.to_tokens(kept.head.logits(hidden_BH[spec.first_slot :]).max(-1).indices).tolist()
        carries = int(labels_of(batch, anchors, spec).carries_AS.sum())
        assert carries == len(document.expected(row, spec.num_drafted)), "the trainer's labels end elsewhere"
        return tokens

    return draft_at


def plain_drafts(plain: PlainDrafter, head: TargetHead, stored: tuple[int, ...], document: Document, how: Conventions | None = None) -> DraftAt:
    """What the plain forward drafts under `how` (default: as the folder says). stored: layer ids of the cache."""
    how = how or plain.conventions
    layers = [_layer(document.batch.features, stored, layer) for layer in how.layer_ids]
    if how.normed_last:
        layers[-1] = head.normed(layers[-1]).to(layers[-1])
    device = plain.tensors["fc.weight"].device
    own_embedding, own_head = plain.tensors.get("embed_tokens.weight"), plain.tensors.get("lm_head.weight")
    embed = head.embed if own_embedding is None else own_embedding.__getitem__
    head_VH = head.head.weight_VH
    if own_head is not None and "d2t" not in plain.tensors:
        head_VH = own_head
    with torch.no_grad():
        context = plain.context(torch.stack(layers, dim=1).to(device), how)
    ids = document.batch.input_ids_T.tolist()

    def draft_at(row: int) -> list[int]:
        with torch.no_grad():
            return plain.tokens(plain.block_over(context, ids[row], row, embed, how), head_VH, how)

    return draft_at


def _layer(features_TLH: torch.Tensor, stored: tuple[int, ...], layer: int) -> torch.Tensor:
    return torch.zeros_like(features_TLH[:, 0]) if layer == NO_LAYER else features_TLH[:, stored.index(layer)]
