"""What is stored says by itself that it is right: layer k the output of block k, row t of token t, the verifier state raw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ruler
import tiny_target as tiny
from stored import Stored, read_all

from dflash_cache.common.spec import load
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.run import run
from dflash_cache.train.fidelity import TeacherCheck

LAYERS = (4, 0, 5, 2)
"""Not ascending, and with the last block, whose output is the verifier state too."""
STEP_TOKENS = 128


def document(length: int, seed: int) -> list[int]:
    """<bos> and then tokens of which none means anything."""
    return [0, *np.random.default_rng(seed).integers(4, ruler.HUGE_TOKEN, length - 1).tolist()]


SHARED = document(64, 1)
DOCUMENTS = [
    document(4, 2),  # as many tokens as layers: a wrong order of axes would fit
    document(6, 3),  # as many tokens as blocks
    document(1, 4),
    SHARED + document(20, 5)[1:],
    SHARED + document(31, 6)[1:],
    document(500, 7),  # several steps of vLLM
    [0, 5, ruler.HUGE_TOKEN, 6],
    *(document(10 + number, 10 + number) for number in range(9)),
]


def extract(target: Path, folder: Path, name: str, **fields: Any) -> tuple[Path, dict[int, Stored]]:
    rows = [{"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in DOCUMENTS]
    data = tiny.write_jsonl(folder / f"{name}.jsonl", rows)
    given = {"model": str(target), "layers": LAYERS, "data": (str(data),), "cache": folder / name, "max_length": 600}
    summary = run(ExtractConfig(**(given | fields)), TeacherCheck)
    assert (summary.samples, summary.fidelity_agreement) == (len(DOCUMENTS), 1.0)
    return folder / name, read_all(folder / name)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ruler.build_ruler(tmp_path_factory.mktemp("ruler"))


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def stored(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Stored]]:
    fields = {"engine_args": {"max_num_batched_tokens": STEP_TOKENS}} if request.param == "vllm" else {}
    return extract(target, tmp_path_factory.mktemp(request.param), "cache", engine=request.param, **fields)


def test_each_layer_is_the_output_of_its_own_block_ascending(stored: Any):
    cache, documents = stored
    assert load(cache).layer_ids == (0, 2, 4, 5)
    for found in documents.values():
        for column, layer in enumerate((0, 2, 4, 5)):
            assert ruler.blocks_read(found.states_TCH[:, column]) == {tuple(range(layer + 1))}


def test_each_row_belongs_to_its_token_in_every_layer(stored: Any):
    for row, found in stored[1].items():
        assert found.ids.tolist() == DOCUMENTS[row]
        for column in range(5):
            assert ruler.tokens_read(found.states_TCH[:, column]) == DOCUMENTS[row]


def test_each_row_saw_the_tokens_before_it_and_no_others(stored: Any):
    """Neither padding nor another document, and the earlier steps of a document that takes several."""
    for found in stored[1].values():
        seen = ruler.seen_read(found.states_TCH[:, 0])
        np.testing.assert_allclose(seen, np.arange(1, len(found.ids) + 1), rtol=0.02)


def test_the_verifier_state_is_the_last_blocks_output_before_the_final_norm(stored: Any):
    for found in stored[1].values():
        assert np.array_equal(found.states_TCH[:, 4], found.states_TCH[:, 3])  # layer 5 is the last block
        assert ruler.blocks_read(found.states_TCH[:, 4]) == {tuple(range(6))}
        assert (found.states_TCH[:, 4, ruler.ONE] == 16.0).all()  # the norm would have made every channel smaller


def test_a_value_that_float16_cannot_hold_is_stored_as_the_nearest_bfloat16(stored: Any):
    assert stored[1][6].states_TCH[2, :, ruler.BIG].tolist() == [ruler.HUGE] * 5


def test_documents_that_begin_alike_both_have_all_their_rows(stored: Any):
    one, two = stored[1][3].states_TCH, stored[1][4].states_TCH
    assert (len(one), len(two)) == (83, 94)
    np.testing.assert_allclose(one[:64], two[:64], rtol=0.01)


def test_recurrent_blocks_count_as_blocks(tmp_path: Path):
    kinds = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    target = ruler.build_ruler(tmp_path / "hybrid", "qwen3_5", layer_types=kinds, num_hidden_layers=4)
    _, documents = extract(target, tmp_path, "cache", engine="transformers", layers=(1, 3, 0))
    for row, found in documents.items():
        for column, layer in enumerate((0, 1, 3, 3)):
            assert ruler.blocks_read(found.states_TCH[:, column]) == {tuple(range(layer + 1))}
            assert ruler.tokens_read(found.states_TCH[:, column]) == DOCUMENTS[row]
