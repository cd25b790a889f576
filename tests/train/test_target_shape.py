"""What a drafter inherits from a target's config.json, in every form in which it is written."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_cache.common.errors import InputError
from dflash_cache.common.spec import CacheSpec, EngineSpec, FeatureSpec, Settings, TargetSpec, TextSpec
from dflash_cache.train.config import ModelConfig
from dflash_cache.train.drafter_spec import resolve
from dflash_cache.train.target_shape import rope_theta, target_shape

FLAT: dict[str, Any] = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "rope_theta": 1e6,
}


def cache_spec(layer_ids: tuple[int, ...] = (1, 2, 4)) -> CacheSpec:
    target = TargetSpec(
        content_hash="0",
        architecture="X",
        num_layers=6,
        hidden_size=8,
        vocab_size=32,
        final_norm="torch.nn:RMSNorm",
        tied_embeddings=True,
        logit_softcap=30.0,
    )
    text = TextSpec(tokenizer_hash="1", chat_template_hash="2", max_length=64)
    features, engine = FeatureSpec(layer_ids=layer_ids, verifier_layer=5), EngineSpec(name="fake", version="0")
    return CacheSpec(settings=Settings(target=target, features=features, text=text, engine=engine))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        {"rope_theta": {"full_attention": 1e6, "sliding_attention": 1e4}},
    ],
)
def test_the_rotary_base_is_that_of_full_attention_and_nested_wins_over_flat(rope: dict[str, Any]):
    assert rope_theta(rope) == 1e6


def test_sizes_under_text_config_are_found():
    config = {"model_type": "vl", "vision_config": {"hidden_size": 99, "num_attention_heads": 9}, "text_config": FLAT}
    assert target_shape(config) == target_shape(FLAT)


def test_head_size_is_derived_and_key_heads_default_to_query_heads():
    shape = target_shape({"hidden_size": 8, "num_attention_heads": 2})
    assert (shape.head_dim, shape.num_key_value_heads) == (4, 2)


def test_the_drafter_takes_the_targets_shape_all_stored_layers_and_its_head():
    spec = resolve(ModelConfig(), cache_spec(), target_shape(FLAT), mask_token_id=3)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.intermediate_size) == (2, 1, 6, 16)
    assert (spec.rope_theta, spec.max_position_embeddings, spec.target_layer_ids, spec.num_target_layers) == (1e6, 64, (1, 2, 4), 6)
    assert (spec.logit_softcap, spec.vocab_size, spec.layer_types) == (30.0, 32, ("full_attention",) * 5)


def test_partial_rotary_and_multi_axis_positions_are_not_inherited():
    rope = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 1]}
    config = {**FLAT, "partial_rotary_factor": 0.25, "rope_parameters": rope}
    spec = resolve(ModelConfig(), cache_spec(), target_shape(config), mask_token_id=3)
    assert spec.rope_theta == 1e7
    assert not [name for name in type(spec).model_fields if "partial" in name or "mrope" in name]


def test_every_size_that_cannot_be_read_is_named():
    per_layer = {**FLAT, "num_key_value_heads": [1, 2], "num_attention_heads": [2, 2], "head_dim": None, "rope_theta": None}
    names = r"(?s)num_attention_heads, num_key_value_heads, head_dim, rope_theta.*--set model\.num_attention_heads"
    with pytest.raises(InputError, match=names) as caught:
        resolve(ModelConfig(), cache_spec(), target_shape(per_layer), mask_token_id=3)
    assert caught.value.exit_code == 2


def test_configured_sizes_win():
    model = ModelConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=2, rope_theta=5.0, target_layer_ids=(4, 1))
    spec = resolve(model, cache_spec(), target_shape(FLAT), mask_token_id=3)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, spec.rope_theta, spec.target_layer_ids) == (4, 2, 2, 5.0, (1, 4))


def test_a_layer_that_the_cache_lacks_is_refused():
    with pytest.raises(InputError, match="not all in the cache"):
        resolve(ModelConfig(target_layer_ids=(1, 3)), cache_spec(), target_shape(FLAT), mask_token_id=3)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(InputError, match="cannot share"):
        resolve(ModelConfig(num_attention_heads=3, num_key_value_heads=2), cache_spec(), target_shape(FLAT), mask_token_id=3)


def test_the_parameter_count_is_that_of_the_built_drafter():
    from dflash_cache.train.drafter import Drafter

    spec = resolve(ModelConfig(num_layers=2), cache_spec(), target_shape(FLAT), mask_token_id=3)
    assert sum(p.numel() for p in Drafter(spec).parameters()) == spec.num_parameters
