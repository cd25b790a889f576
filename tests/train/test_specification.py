"""The drafter and its loss stated once more, slowly and plainly, in float64; what training computes must be this.

Nothing is batched here: documents are never packed, each block is drafted alone, each slot attends to a list of keys that is
written down one by one, and gradients are plain autograd's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from rows import CPU32, Document, TinyHead, make_batch, states_of, tiny_drafter

from dflash_cache.train.anchors import pad_anchors
from dflash_cache.train.config import LossConfig
from dflash_cache.train.draft_head import DraftHead, draft_head, offsets
from dflash_cache.train.drafter import Drafter
from dflash_cache.train.drafter_spec import DrafterSpec
from dflash_cache.train.loss import Head
from dflash_cache.train.masks import dense_mask, queries
from dflash_cache.train.step import StepSeeds, labels_of, row_loss

V, H = 17, 8
SIZES = {"vocab": V}
CPU64 = replace(CPU32, dtype=torch.float64)
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3}
DOCUMENTS = [
    Document(10, seed=1, supervised=[0, 0, 0, 1, 1, 1, 1, 1, 1, 1]),  # ends supervised, so its last row has no label
    Document(1, seed=2, supervised=[1]),
    Document(9, seed=3, supervised=[1] * 9, next_token=5),  # starts and ends supervised, one label beyond its last row
    Document(1, seed=4, supervised=[1], next_token=6),
    Document(8, seed=5, supervised=[0, 1, 1, 0, 1, 1, 1, 0]),  # a gap
    Document(4, seed=6, supervised=[0, 0, 0, 1]),  # nothing to draft
]


@dataclass(frozen=True)
class Drafted:
    """One drafted slot of one block, as the definition has it."""

    document: int
    anchor: int
    """Position in its document."""
    slot: int
    """0..B-1."""
    logits: torch.Tensor
    """[V]"""
    teacher: torch.Tensor
    """[V]: what the target says of the token that this slot proposes."""
    text: int
    """The token that the text has there."""


class TestHead(TinyHead):
    """Of 17 tokens, with a scale and a bound, in float64."""

    __test__ = False

    def __init__(self) -> None:
        super().__init__(dtype=torch.float64)
        self.embedding_VH = 0.05 * self.embedding_VH[:V]  # small, so that what a slot sees decides what it drafts
        rows = 2 * self.head.weight_VH[:V]
        rows[3:] *= 0.2  # three tokens win nearly always, so that drafter and teacher agree often and streaks are long
        self.head = Head(rows, scale=0.7, softcap=5.0)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def rotate(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Pairs (i, i + E/2) turn by position / theta^(2i/E); angles in float32, as serving engines keep them."""
    half = len(x) // 2
    angle = float(position) * (1.0 / theta ** (torch.arange(0, len(x), 2).float() / len(x)))
    first, second = x[:half], x[half:]
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()))


def visible(spec: DrafterSpec, kind: str, anchor: int, slot: int) -> tuple[list[int], list[int]]:
    """Context positions, and slots of its own block, that a slot sees in a layer."""
    context, own = list(range(anchor)), list(range(spec.block_size))
    if kind == "sliding_attention":
        context = [row for row in context if row > anchor + slot - spec.sliding_window]
        own = [other for other in own if other <= slot and other > slot - spec.sliding_window]
    return context, own


def draft_block(weights: dict[str, torch.Tensor], spec: DrafterSpec, head: TestHead, token: int, anchor: int, features: torch.Tensor) -> torch.Tensor:
    """Logits [B, V] of the block at `anchor` of one document. features: [T, K, H]."""
    eps, heads, groups, size = spec.rms_norm_eps, spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    context = [rms(weights["fc.weight"] @ features[row].flatten(), weights["hidden_norm.weight"], eps) for row in range(anchor)]
    slots = [head.embedding_VH[token if k == 0 else spec.mask_token_id] for k in range(spec.block_size)]
    for number, kind in enumerate(spec.layer_types):
        w = {name.removeprefix(f"layers.{number}."): tensor for name, tensor in weights.items() if name.startswith(f"layers.{number}.")}
        a = {name: w[f"self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
        normed = [rms(slot, w["input_layernorm.weight"], eps) for slot in slots]
        keys, values = [], []
        for position, x in enumerate([*context, *normed]):  # slot k sits at position anchor + k
            k, v = (a["k_proj"] @ x).view(groups, size), (a["v_proj"] @ x).view(groups, size)
            keys.append([rotate(rms(k[g], a["k_norm"], eps), position, spec.rope_theta) for g in range(groups)])
            values.append(v)
        attended = []
        for k, x in enumerate(normed):
            rows, own = visible(spec, kind, anchor, k)
            seen = rows + [anchor + other for other in own]
            q, out = (a["q_proj"] @ x).view(heads, size), []
            for n in range(heads):
                g = n // (heads // groups)
                query = rotate(rms(q[n], a["q_norm"], eps), anchor + k, spec.rope_theta)
                share = torch.softmax(torch.stack([keys[i][g] for i in seen]) @ query / math.sqrt(size), 0)
                out.append(share @ torch.stack([values[i][g] for i in seen]))
            attended.append(slots[k] + a["o_proj"] @ torch.cat(out))
        slots = []
        for x in attended:
            n = rms(x, w["post_attention_layernorm.weight"], eps)
            gate, up = w["mlp.gate_proj.weight"] @ n, w["mlp.up_proj.weight"] @ n
            slots.append(x + w["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
    return torch.stack([logits_of(head, rms(slot, weights["norm.weight"], eps)) for slot in slots])


def logits_of(head: TestHead, normed: torch.Tensor) -> torch.Tensor:
    scaled = head.head.weight_VH @ normed * head.head.scale
    return head.head.softcap * torch.tanh(scaled / head.head.softcap)


def supervised_at(document: Document, ids: list[int], position: int) -> int | None:
    """The token at a position if it may be learned, the one after the last row included."""
    if position == len(ids):
        return document.next_token if document.next_token >= 0 else None
    mask = list(document.supervised or [0, 0, *[1] * (len(ids) - 2)])
    return ids[position] if position < len(ids) and mask[position] else None


def anchors_of(document: Document, ids: list[int]) -> list[int]:
    return [a for a in range(len(ids)) if supervised_at(document, ids, a) is not None and supervised_at(document, ids, a + 1) is not None]


def draft_all(drafter: Drafter, head: TestHead, documents: list[Document], weights: dict[str, torch.Tensor]) -> list[Drafted]:
    """Every slot that carries loss, of every block, of every document; a block ends at the first position that is not supervised."""
    found, spec = [], drafter.spec
    for number, document in enumerate(documents):
        tokens, features, verifier = states_of(document, **SIZES)
        ids = tokens.tolist()
        for anchor in anchors_of(document, ids):
            logits = draft_block(weights, spec, head, ids[anchor], anchor, features.double())
            ahead = 1 if spec.sample_from_anchor else 0  # then slot k proposes the token after its own position
            for slot in range(1 - ahead, spec.block_size):
                position = anchor + slot + ahead
                text = supervised_at(document, ids, position)
                if text is None:
                    break
                state = verifier[position - 1].double()
                teacher = logits_of(head, state / state.pow(2).mean().sqrt())
                found.append(Drafted(number, anchor, slot, logits[slot], teacher, text))
    return found


def slot_loss(config: LossConfig, logits: torch.Tensor, teacher: torch.Tensor, token: int) -> torch.Tensor:
    p = torch.softmax(logits, 0)
    q = torch.softmax(teacher, 0) if config.label == "soft" else torch.nn.functional.one_hot(torch.tensor(token), len(p)).double()
    overlap = sum(min(a, b, key=float) for a, b in zip(p, q))
    kl = sum(b * (b.log() - a.log()) for a, b in zip(p, q) if b > 0)
    share = math.exp(-config.lk_eta * float(overlap))
    total = torch.zeros((), dtype=torch.float64)
    for name, factor in (config.terms or {"kl" if config.label == "soft" else "ce": 1.0}).items():
        total = (
            total
            + factor
            * {
                "ce": lambda: -p[token].log(),
                "kl": lambda: kl,
                "reverse-kl": lambda: sum(a * (a.log() - b.log()) for a, b in zip(p, q)),
                "tv": lambda: 1 - overlap,
                "lk": lambda: -overlap.log(),
                "lk-hybrid": lambda: share * kl + (1 - share) * (1 - overlap),
            }[name]()
        )
    return total


def weight_of(config: LossConfig, spec: DrafterSpec, block: list[tuple[Drafted, float]], number: int) -> float:
    """block: its supervised slots, each with the drafter's probability of its label."""
    if config.position_weights == "none":
        return 1.0
    if config.position_weights == "exp":
        return math.exp(-(block[number][0].slot - (0 if spec.sample_from_anchor else 1)) / config.gamma)
    smooth = [(1 - config.dpace_alpha) * q + config.dpace_alpha for _, q in block]
    return sum(math.prod(smooth[: m + 1]) for m in range(number, len(block)))  # D-PACE, arXiv 2605.18810


@dataclass(frozen=True)
class Expected:
    loss_sum: float
    weight_sum: float
    right: list[int]
    count: list[int]
    streaks: list[int]
    full: list[bool]
    gradients: dict[str, torch.Tensor]


def specified(drafter: Drafter, head: TestHead, documents: list[Document], config: LossConfig, kept: list[int]) -> Expected:
    spec = drafter.spec
    weights = {name: parameter.detach().double().requires_grad_() for name, parameter in drafter.named_parameters()}
    blocks: dict[tuple[int, int], list[tuple[Drafted, torch.Tensor, int]]] = {}
    for slot in draft_all(drafter, head, documents, weights):
        token = slot.text if config.label == "data" else int(slot.teacher.argmax())
        blocks.setdefault((slot.document, slot.anchor), []).append((slot, slot.logits[kept], token))
    loss, weight_sum, drafted = torch.zeros((), dtype=torch.float64), 0.0, spec.block_size - (0 if spec.sample_from_anchor else 1)
    right, count, streaks, full = [0] * drafted, [0] * drafted, [], []
    for block in blocks.values():
        sure = [(slot, torch.softmax(logits, 0)[kept.index(token)].item() if token in kept else 0.0) for slot, logits, token in block]
        hits = []
        for number, (slot, logits, token) in enumerate(block):
            hits.append(kept[int(logits.argmax())] == token)
            count[number] += 1
            right[number] += hits[-1]
            if token in kept:
                weight = float(torch.tensor(weight_of(config, spec, sure, number), dtype=torch.float32))
                loss = loss + weight * slot_loss(config, logits, slot.teacher[kept], kept.index(token))
                weight_sum += weight
        streaks.append(([*hits, False]).index(False))
        full.append(len(block) == drafted)
    if loss.requires_grad:
        loss.backward()
    return Expected(float(loss), weight_sum, right, count, streaks, full, {name: w.grad for name, w in weights.items()})


def compare(changes: dict, config: LossConfig, documents: list[Document] = DOCUMENTS, kept: list[int] | None = None, padded: int = 0) -> None:
    """Pack the documents, run a training row, and compare everything that it gives with the specification."""
    head, drafter = TestHead(), tiny_drafter(vocab_size=V, spread=0.6, **changes).double()
    if kept is not None:
        drafter.d2t.copy_(offsets(torch.tensor(kept)))
    batch = make_batch(documents, sum(d.length for d in documents) + padded, **SIZES)
    own: DraftHead = draft_head(head.head, drafter.d2t)
    row = row_loss(drafter, drafter.spec, head, batch, config, CPU64, StepSeeds.at(0, 0, 0, 0, CPU64.device), None, own)
    expected = specified(drafter, head, documents, config, kept or list(range(V)))
    counts = row.sums.counts
    assert (counts.right_S.tolist(), counts.count_S.tolist()) == (expected.right, expected.count)
    assert (int(counts.streak_sum), int(counts.blocks)) == (sum(expected.streaks), len(expected.streaks))
    assert int(counts.full_streak_sum) == sum(s for s, f in zip(expected.streaks, expected.full) if f)
    assert int(counts.full_blocks) == sum(expected.full)
    assert float(row.sums.weight_sum) == pytest.approx(expected.weight_sum, rel=1e-6)
    assert float(row.sums.loss_sum) == pytest.approx(expected.loss_sum, rel=1e-6)
    if row.loss is None:
        assert expected.weight_sum == 0
        return
    row.loss.backward()
    for name, parameter in drafter.named_parameters():
        wanted = expected.gradients[name]
        torch.testing.assert_close(
            parameter.grad, wanted, atol=1e-6 * float(wanted.abs().max()) + 1e-12, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("block_size", range(2, 17))
def test_every_block_size_is_as_specified(block_size: int):
    compare({"block_size": block_size}, LossConfig(), padded=block_size % 3)


@pytest.mark.parametrize("window", [1, 2, 3, 6, 40])
def test_sliding_windows_are_as_specified(window: int):
    compare({**SLIDING, "sliding_window": window, "block_size": 5}, LossConfig())


TERMS = [{"ce": 0.5, "tv": 2.0}, {"kl": 1.0}, {"reverse-kl": 1.0}, {"tv": 1.0}, {"lk": 1.0}, {"lk-hybrid": 1.0}, {"ce": 0.3, "kl": 0.7, "lk": 0.2}]


@pytest.mark.parametrize("weights", ["exp", "dpace", "none"])
@pytest.mark.parametrize(("label", "terms"), [("data", None), ("teacher", TERMS[0]), *(("soft", terms) for terms in TERMS)])
def test_labels_terms_and_weights_are_as_specified(label: str, terms: dict[str, float] | None, weights: str):
    config = LossConfig(label=label, terms=terms, position_weights=weights, gamma=2.5, dpace_alpha=0.3)
    compare({**SLIDING, "num_attention_heads": 4, "num_key_value_heads": 2}, config, DOCUMENTS[2:5])


@pytest.mark.parametrize("label", ["teacher", "data", "soft"])
@pytest.mark.parametrize("weights", ["exp", "dpace"])
def test_a_pruned_vocabulary_is_as_specified(label: str, weights: str):
    kept = [0, 3, 4, 5, 8, 9, 11, 14]
    compare({"draft_vocab_size": len(kept)}, LossConfig(label=label, position_weights=weights), DOCUMENTS[:3], kept)


@pytest.mark.parametrize("weights", ["exp", "dpace"])
@pytest.mark.parametrize("changes", [{}, SLIDING])
def test_drafting_from_the_anchor_is_as_specified(changes: dict, weights: str):
    compare({**changes, "sample_from_anchor": True}, LossConfig(position_weights=weights))


def test_a_row_without_a_valid_anchor_is_as_specified():
    compare({}, LossConfig(), [Document(1, seed=1, supervised=[1]), Document(6, seed=2, supervised=[0, 0, 1, 0, 0, 1])])


@pytest.mark.parametrize("block_size", [2, 5, 16])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_masks_and_labels_are_as_specified_row_by_row(block_size: int, window: int | None):
    """The dense mask over the packed row, and the tables of teacher rows and tokens, for every anchor that there is."""
    kind = "full_attention" if window is None else "sliding_attention"
    drafter = tiny_drafter(vocab_size=V, block_size=block_size, layer_types=(kind,) * 2, sliding_window=window)
    batch, spec = make_batch(DOCUMENTS, 40, **SIZES), drafter.spec
    starts = [sum(d.length for d in DOCUMENTS[:number]) for number in range(len(DOCUMENTS))]
    known = [states_of(document, **SIZES)[0].tolist() for document in DOCUMENTS]
    blocks = [(number, anchor) for number, document in enumerate(DOCUMENTS) for anchor in anchors_of(document, known[number])]
    anchors = pad_anchors(torch.tensor([starts[number] + anchor for number, anchor in blocks]), 1)
    mask = dense_mask(queries(anchors.row_A, anchors.keep_A, batch.document_T, block_size), batch.document_T, window)
    labels = labels_of(batch, anchors, spec)
    for block, (number, anchor) in enumerate(blocks):
        for slot in range(block_size):
            rows, own = visible(spec, kind, anchor, slot)
            seen = {starts[number] + row for row in rows} | {40 + block * block_size + other for other in own}
            assert set(mask[block * block_size + slot].nonzero().flatten().tolist()) == seen
        carried = 0
        while carried < block_size - 1 and supervised_at(DOCUMENTS[number], known[number], anchor + carried + 1) is not None:
            carried += 1
        assert labels.carries_AS[block].tolist() == [slot < carried for slot in range(block_size - 1)]
        for slot in range(1, carried + 1):
            assert int(labels.teacher_row_AS[block, slot - 1]) == starts[number] + anchor + slot - 1
            assert int(labels.data_AS[block, slot - 1]) == supervised_at(DOCUMENTS[number], known[number], anchor + slot)
