"""What a person is shown is what is learned: the text whole, the supervised tokens marked."""

from __future__ import annotations

from pathlib import Path

import tiny_target as tiny

from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.preview import preview, stored_sample
from dflash_cache.extract.run import run
from dflash_cache.train.inspect_cache import sample_tokens


def config(target: Path, data: Path, cache: Path, **fields: object) -> ExtractConfig:
    return ExtractConfig(model=str(target), data=(str(data),), cache=cache, engine="transformers", **fields)


def test_supervised_text_is_marked_and_rejects_are_shown_with_their_reason(tiny_llama, tmp_path):
    data = tiny.write_jsonl(tmp_path / "d.jsonl", [tiny.chat("grüße", "schön 🙂", "b", "c"), {"x": 1}, tiny.chat("never", "shown")])
    found = preview(config(tiny_llama, data, tmp_path / "cache"), 2)
    supervised = [segment.text for segment in found.samples[0].segments if segment.supervised]
    assert supervised == ["schön 🙂<|im_end|>", "c<|im_end|>"]
    assert "".join(segment.text for segment in found.samples[0].segments).startswith("<|im_start|>user\ngrüße<|im_end|>")
    text = found.to_text()
    assert "⟦schön 🙂<|im_end|>⟧" in text
    assert "row 1: rejected: " in text
    assert "never" not in text
    assert found.to_dict()["samples"][0]["segments"][1] == {"text": "schön 🙂<|im_end|>", "tokens": 12, "supervised": True}
    assert not (tmp_path / "cache").exists()


def test_a_stored_sample_is_shown_with_the_tokenizer_of_the_cache(tiny_llama, tmp_path):
    data = tiny.write_jsonl(tmp_path / "d.jsonl", [tiny.chat("hi", "yo")])
    run(config(tiny_llama, data, tmp_path / "cache"))
    shown = stored_sample(tmp_path / "cache", *sample_tokens(tmp_path / "cache", 0))
    assert "⟦yo<|im_end|>⟧" in shown.to_text()
    assert shown.samples[0].row == 0


def test_a_generated_last_token_is_shown_too(tiny_llama, tmp_path):
    data = tiny.write_jsonl(tmp_path / "d.jsonl", [tiny.chat("hi")])
    run(config(tiny_llama, data, tmp_path / "cache", generate=True, max_new_tokens=5))
    source, row, ids, mask, following = sample_tokens(tmp_path / "cache", 0)
    shown = stored_sample(tmp_path / "cache", source, row, ids, mask, following)
    assert following >= 0
    assert sum(segment.tokens for segment in shown.samples[0].segments) == len(ids) + 1
