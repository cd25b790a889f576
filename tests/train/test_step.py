"""One row: a loss by hand, packing, splitting, padding, noise, labels, and what is computed only once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rows import CPU32, Document, TinyHead, make_batch, tiny_drafter

from dflash_cache.train import step
from dflash_cache.train.anchors import draw_anchors
from dflash_cache.train.batch import Batch
from dflash_cache.train.config import LossConfig
from dflash_cache.train.device import Compute
from dflash_cache.train.drafter import Drafter
from dflash_cache.train.loss import LossSums
from dflash_cache.train.metrics import quality
from dflash_cache.train.step import RowLoss, StepSeeds, row_inputs, row_loss
from dflash_cache.train.teacher import TeacherCache

ALL = LossConfig()  # so few tokens: every valid anchor is drawn


def loss_of(
    drafter: Drafter,
    batch: Batch,
    config: LossConfig = ALL,
    head: TinyHead | None = None,
    cache: TeacherCache | None = None,
    compute: Compute = CPU32,
) -> RowLoss:
    return row_loss(drafter, drafter.spec, head or TinyHead(), batch, config, compute, StepSeeds.at(0, 0, 0, 0, compute.device), cache)


CPU64 = replace(CPU32, dtype=torch.float64)


def gradients(drafter: Drafter, batches: list[Batch], config: LossConfig = ALL, compute: Compute = CPU32) -> tuple[list[torch.Tensor], LossSums]:
    """Of the mean over all rows, as the trainer makes it."""
    drafter.to(compute.dtype).zero_grad()
    sums = LossSums.none(drafter.spec.num_drafted)
    for batch in batches:
        row = loss_of(drafter, batch, config, head=TinyHead(dtype=compute.dtype), compute=compute)
        if row.loss is not None:
            row.loss.backward()
        sums = sums + row.sums
    return [p.grad / float(sums.weight_sum) for p in drafter.parameters()], sums


def test_the_loss_of_a_ten_token_document_by_hand():
    """Supervised from token 3, block 4, gamma 4. Anchors 3..8; slot k of anchor a has its label at a+k, while a+k <= 9.

    The drafter's last norm is set to zero, so that all its logits are 0 and every slot costs log 32. Slots: anchors 3 to 6
    have three each, anchor 7 two, anchor 8 one. With e = exp(-1/4): weights 6 * 1 + 5 * e + 4 * e^2.
    """
    drafter = tiny_drafter()
    drafter.norm.weight.data.zero_()
    batch = make_batch([Document(10, supervised=[0, 0, 0, 1, 1, 1, 1, 1, 1, 1])])
    sums = loss_of(drafter, batch).sums
    e = 0.7788007830714049
    weights = 6 + 5 * e + 4 * e * e
    assert float(sums.weight_sum) == pytest.approx(weights, rel=1e-6)
    assert float(sums.loss_sum) == pytest.approx(weights * 3.4657359, rel=1e-6)
    assert sums.mean == pytest.approx(3.4657359, rel=1e-6)
    assert sums.counts.count_S.tolist() == [6, 5, 4]
    assert (int(sums.counts.blocks), int(sums.counts.full_blocks)) == (6, 4)


def test_labels_are_the_argmax_of_the_row_before_the_slot():
    """A head and states made so that row r's teacher token is r + 4: the loss must ask slot k of anchor a for a + k - 1 + 4."""
    head = TinyHead()
    rows = torch.arange(10)
    head.teacher_tokens = lambda states: states[:, 0].long() + 4  # type: ignore[method-assign]
    verifier = torch.zeros(10, 8)
    verifier[:, 0] = rows
    asked: list[torch.Tensor] = []
    original = step.chunked_loss

    def watch(*args, **kwargs):
        asked.append(kwargs["label_M"])
        return original(*args, **kwargs)

    step.chunked_loss = watch
    try:
        loss_of(tiny_drafter(), make_batch([Document(10, supervised=[0] * 6 + [1] * 4, verifier=verifier.bfloat16())]), head=head)
    finally:
        step.chunked_loss = original
    # anchors 6, 7, 8; teacher rows 6 7 8 | 7 8 | 8
    assert asked[0].tolist() == [10, 11, 12, 11, 12, 12]


def test_data_labels_are_the_text_and_need_no_verifier_states():
    batch = make_batch([Document(10, ids=range(10, 20))])
    row = loss_of(tiny_drafter(), replace(batch, verifier=None), LossConfig(label="data"))
    assert row.loss is not None
    assert float(row.loss) > 0


@pytest.mark.parametrize("label", ["teacher", "data", "soft"])
@pytest.mark.parametrize("changes", [{}, {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3}])
def test_a_document_alone_and_packed_gives_the_same_loss_and_gradients(label: str, changes: dict):
    """Every label and attention runs forward and backward here."""
    documents = [Document(10, seed=1), Document(13, seed=2, next_token=9), Document(7, seed=3)]
    drafter, config = tiny_drafter(**changes), LossConfig(label=label)
    packed, packed_sums = gradients(drafter, [make_batch(documents, 40)], config)
    alone, alone_sums = gradients(drafter, [make_batch([d]) for d in documents], config)
    assert packed_sums.mean == pytest.approx(alone_sums.mean, rel=1e-6)
    assert packed_sums.counts.count_S.tolist() == alone_sums.counts.count_S.tolist()
    for one, other in zip(packed, alone):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)


def test_the_update_does_not_depend_on_how_documents_are_split_into_rows():
    """Documents with 1, 1, 4 and 4 anchors: in rows [1, 1 | 4, 4] and [1, 4 | 1, 4], and in one row."""
    sizes = {1: [0] * 8 + [1, 1], 4: [0] * 5 + [1] * 5}
    documents = [Document(10, seed=i, supervised=sizes[count]) for i, count in enumerate((1, 1, 4, 4))]
    splits = [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]], [[0], [1], [2], [3]]]
    results = [gradients(tiny_drafter(), [make_batch([documents[i] for i in row]) for row in split])[0] for split in splits]
    for other in results[1:]:
        for one, two in zip(results[0], other):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-5)


def test_padding_blocks_change_neither_loss_nor_gradients(monkeypatch: pytest.MonkeyPatch):
    batch = make_batch([Document(12)], 16)
    plain, sums = gradients(tiny_drafter(), [batch], compute=CPU64)
    monkeypatch.setattr(step, "pad_multiple", lambda *_: 14)  # 9 real blocks and 5 of padding
    padded, padded_sums = gradients(tiny_drafter(), [batch], compute=CPU64)
    assert padded_sums.mean == pytest.approx(sums.mean, rel=1e-12)
    assert padded_sums.counts.count_S.tolist() == sums.counts.count_S.tolist()
    for one, two in zip(plain, padded):
        torch.testing.assert_close(one, two, atol=1e-10, rtol=1e-8)


def test_a_row_without_anchors_adds_nothing():
    row = loss_of(tiny_drafter(), make_batch([Document(20, supervised=[0] * 19 + [1])]))
    assert row.loss is None
    assert float(row.sums.weight_sum) == 0


def test_overlapping_blocks_do_not_leak_into_each_other():
    """Changing the features of row 12 leaves the losses of blocks at 10 and 12 as they are, bit for bit."""
    supervised = [0] * 10 + [1, 1, 0, 1, 1] + [0] * 5

    def losses(row: int | None) -> float:
        batch = make_batch([Document(20, supervised=supervised)])
        if row is not None:
            batch.features[row] += 1
        return float(loss_of(tiny_drafter(), batch).sums.loss_sum)

    base = losses(None)  # anchors 10 and 13
    assert losses(13) == losses(19) == base
    assert losses(12) != base
    assert losses(9) != base


def test_noise_touches_the_input_of_fc_only_and_is_bounded():
    batch, generator = make_batch([Document(10)]), torch.Generator().manual_seed(0)
    plain, noisy = row_inputs(batch, CPU32).features_TF, row_inputs(batch, CPU32, 0.25, generator).features_TF
    assert not torch.equal(plain, noisy)
    assert float((plain - noisy).abs().max()) <= 0.25
    head, seen = TinyHead(), []
    original = head.teacher_tokens
    head.teacher_tokens = lambda states: (seen.append(states.clone()), original(states))[1]  # type: ignore[method-assign]
    quiet = loss_of(tiny_drafter(), batch, head=head)
    loud = loss_of(tiny_drafter(), batch, LossConfig(feature_noise=0.25), head=head)
    assert torch.equal(seen[0], seen[1])
    assert float(quiet.loss) != float(loud.loss)
    again = loss_of(tiny_drafter(), batch, LossConfig(feature_noise=0.25))
    assert float(again.loss) == float(loud.loss)


def test_gaussian_noise_has_its_standard_deviation_and_no_bound():
    batch, generator = make_batch([Document(400)]), torch.Generator().manual_seed(0)
    noise = row_inputs(batch, CPU32, 0.25, generator, "gaussian").features_TF - row_inputs(batch, CPU32).features_TF
    assert float(noise.std()) == pytest.approx(0.25, rel=0.02)
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(noise.abs().max()) > 0.75


@pytest.mark.parametrize("kind", ["uniform", "gaussian"])
@pytest.mark.parametrize("label", ["teacher", "soft"])
def test_what_the_teacher_says_is_the_same_with_noise(label: str, kind: str):
    head, seen = TinyHead(), []
    original = head.teacher_logits
    head.teacher_logits = lambda states: (seen.append(states.clone()), original(states))[1]  # type: ignore[method-assign]
    batch = make_batch([Document(10)])
    before = batch.verifier.clone()
    for noise in (0.0, 0.5):
        loss_of(tiny_drafter(), batch, LossConfig(label=label, feature_noise=noise, feature_noise_kind=kind), head=head)
    half = len(seen) // 2
    assert half > 0
    assert all(torch.equal(quiet, loud) for quiet, loud in zip(seen[:half], seen[half:]))
    assert torch.equal(batch.verifier, before)


@pytest.mark.parametrize(("from_anchor", "drafted"), [(False, 3), (True, 4)])
def test_a_block_of_4_drafts_3_tokens_or_4_from_the_anchor(from_anchor: bool, drafted: int):
    """Document of 10, anchors 2..8: seven first slots; a perfect drafter's streak is the number of drafted slots."""
    drafter = tiny_drafter(sample_from_anchor=from_anchor)
    counts = loss_of(drafter, make_batch([Document(10)])).sums.counts
    assert counts.count_S.tolist() == [7, 6, 5, 4][:drafted]
    perfect = quality(replace(counts, full_streak_sum=counts.full_blocks * drafted))
    assert perfect.tau_full == drafted + 1


def test_drafting_from_the_anchor_asks_slot_k_for_the_token_after_its_own(monkeypatch: pytest.MonkeyPatch):
    """Text 10..19, anchor 6 and 7 and 8: slots 0.. are asked for 17 18 19 | 18 19 | 19, and each from its own slot's output."""
    asked, original = [], step.chunked_loss

    def watch(hidden_MH: torch.Tensor, *args, **kwargs):
        asked.append((len(hidden_MH), kwargs["label_M"].tolist()))
        return original(hidden_MH, *args, **kwargs)

    monkeypatch.setattr(step, "chunked_loss", watch)
    batch = make_batch([Document(10, ids=range(10, 20), supervised=[0] * 6 + [1] * 4)])
    loss_of(tiny_drafter(sample_from_anchor=True), batch, LossConfig(label="data"))
    assert asked == [(6, [17, 18, 19, 18, 19, 19])]


def test_changing_a_document_leaves_the_loss_of_the_next_one_as_it_is_bit_for_bit():
    """Its tokens, features and verifier states: all that a packed neighbour holds."""
    losses = set()
    for seed, ids in ((1, range(4, 14)), (9, range(14, 24))):
        first = Document(10, seed=seed, ids=ids, supervised=[1] + [0] * 9)
        losses.add(float(loss_of(tiny_drafter(), make_batch([first, Document(12, seed=2)])).loss))
    assert len(losses) == 1


@pytest.mark.parametrize("length", [17, 18, 19])
def test_documents_of_any_length_train_in_blocks_of_four(length: int):
    row = loss_of(tiny_drafter(), make_batch([Document(length)]))
    assert row.sums.counts.count_S.tolist() == [length - 3, length - 4, length - 5]
    row.loss.backward()
    assert row.loss.isfinite()


def test_the_teacher_runs_once_per_row_and_only_where_asked_and_later_not_at_all():
    head, cache, drafter = TinyHead(), TeacherCache(1 << 20), tiny_drafter()
    batch = make_batch([Document(10, seed=1), Document(12, seed=2, supervised=[0] * 6 + [1] * 6)], 32)
    first = loss_of(drafter, batch, head=head, cache=cache)
    assert head.rows_asked == 7 + 5  # rows 2..8 of the first (anchors 2..8), 6..10 of the second
    second = loss_of(drafter, batch, head=head, cache=cache)
    assert head.rows_asked == 12
    assert float(first.loss) == float(second.loss)


def test_remembering_teacher_tokens_changes_nothing_when_rows_are_packed_differently():
    one, two = Document(10, seed=1), Document(12, seed=2)
    cache, drafter = TeacherCache(1 << 20), tiny_drafter()
    loss_of(drafter, make_batch([one, two], first_sample=0), LossConfig(anchors_per_row=3), cache=cache)
    other = make_batch([two], first_sample=1)
    assert float(loss_of(drafter, other, cache=cache).loss) == float(loss_of(drafter, other).loss)


def test_a_full_teacher_cache_starts_anew():
    cache, drafter, head = TeacherCache(4 * 15), tiny_drafter(), TinyHead()
    for sample in (0, 1, 0):
        loss_of(drafter, make_batch([Document(10, seed=sample)], first_sample=sample), head=head, cache=cache)
    assert head.rows_asked == 3 * 7


def test_anchors_depend_on_seed_step_row_and_rank_and_on_nothing_else():
    batch, config = make_batch([Document(60)]), LossConfig(anchors_per_row=4)

    def at(*parts: int) -> float:
        torch.manual_seed(sum(parts))  # global randomness plays no part
        return float(row_loss(drafter, drafter.spec, TinyHead(), batch, config, CPU32, StepSeeds.at(*parts, CPU32.device)).loss)

    drafter = tiny_drafter()
    assert at(0, 5, 0, 0) == at(0, 5, 0, 0)
    assert len({at(0, 5, 0, 0), at(1, 5, 0, 0), at(0, 6, 0, 0), at(0, 5, 1, 0), at(0, 5, 0, 1)}) == 5


def test_twenty_different_rows_are_at_most_four_shapes_of_whole_tiles():
    """What is compiled for flex attention depends on the number of blocks alone; so many shapes, so many compilations."""
    flex = Compute(torch.device("cuda"), torch.bfloat16, "flex")
    config, spec = LossConfig(anchors_per_row=100), tiny_drafter(block_size=4).spec
    multiple, blocks = step.pad_multiple(config, spec, flex), set()
    for seed in range(20):
        batch = make_batch([Document(10 + 7 * seed, seed=seed)], 160)
        anchors = draw_anchors(
            batch.document_T,
            batch.loss_mask_T,
            batch.next_supervised_T,
            per_document=512,
            per_row=config.anchors_per_row,
            generator=torch.Generator().manual_seed(seed),
            pad_multiple=multiple,
        )
        blocks.add(len(anchors))
    assert 1 < len(blocks) <= step.SHAPE_BUCKETS
    assert all(count * spec.block_size % step.FLEX_TILE == 0 for count in blocks)
