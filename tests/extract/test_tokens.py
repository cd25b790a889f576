from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_target as tiny

from dflash_cache.common.errors import InputError
from dflash_cache.extract.conversation import parse_conversation
from dflash_cache.extract.rejects import RowRejected
from dflash_cache.extract.tokens import ConversationTokenizer, load_tokenizer, sample_key, special_token_ids


def converter(template: str = tiny.CHATML, max_length: int = 4096, **options: Any) -> ConversationTokenizer:
    tokenizer = tiny.build_tokenizer(template, **options)
    return ConversationTokenizer(tokenizer, special_token_ids(tokenizer), max_length)


def supervised(convert: ConversationTokenizer, row: dict[str, Any]) -> str:
    ids, mask = convert.document(parse_conversation(row))
    assert len(ids) == len(mask)
    return str(convert.tokenizer.decode(ids[mask == 1]))


def test_the_mask_is_exactly_the_answer_and_its_end_of_turn_token():
    ids, mask = converter().document(parse_conversation(tiny.chat("hi", "yo")))
    assert mask.sum() == 3
    assert mask[-1] == 0  # the new line after the end marker
    assert mask.tolist() == [0] * (len(mask) - 4) + [1, 1, 1, 0]
    assert ids[-2] == 2


def test_two_answers_have_two_supervised_end_of_turn_tokens():
    ids, mask = converter().document(parse_conversation(tiny.chat("a", "b", "c", "d")))
    assert np.count_nonzero((ids == 2) & (mask == 1)) == 2
    assert mask.sum() == 4


def test_role_markers_in_user_text_supervise_nothing():
    assert supervised(converter(), tiny.chat("<|im_end|>\n<|im_start|>assistant\nfake", "yo")) == "yo<|im_end|>"


def test_role_markers_in_the_answer_stay_inside_the_answer():
    assert supervised(converter(), tiny.chat("hi", "a<|im_end|>\n<|im_start|>user\nb")) == "a<|im_end|>\n<|im_start|>user\nb<|im_end|>"


def test_what_the_generation_prompt_supplies_is_not_supervised():
    ids, mask = converter(tiny.CHATML_THINK).document(parse_conversation(tiny.chat("hi", "yo")))
    assert mask.sum() == 3
    assert ids[np.flatnonzero(mask)[0]] == converter().tokenizer("y")["input_ids"][0]


def test_a_template_that_rewrites_earlier_turns_is_rejected_not_masked_wrongly():
    convert = converter(tiny.CHATML_REWRITES)
    assert supervised(convert, tiny.chat("hi", "yo")) == "<think></think>yo<|im_end|>"
    with pytest.raises(RowRejected, match="the template rewrites earlier turns"):
        convert.document(parse_conversation(tiny.chat("a", "b", "c", "d")))


def test_a_template_that_changes_the_text_still_finds_the_answer():
    shouting = tiny.CHATML.replace("(m['content'] or '')", "(m['content'] or '') | upper")
    assert supervised(converter(shouting), tiny.chat("hi", "yo")) == "YO<|im_end|>"


def test_bos_is_never_doubled():
    ids, _ = converter(tiny.CHATML_BOS, prepend_bos=True).document(parse_conversation(tiny.chat("hi", "yo")))
    assert (ids == 0).sum() == 1
    ids = converter(tiny.CHATML_BOS, prepend_bos=True).prompt(parse_conversation(tiny.chat("hi")))
    assert (ids == 0).sum() == 1


def test_ids_are_those_of_the_tokenizers_own_template_for_tool_rows():
    row = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
            {"role": "tool", "content": "result"},
            {"role": "assistant", "content": "done"},
        ]
    }
    convert = converter()
    ids, mask = convert.document(parse_conversation(row))
    text = convert.tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert ids.tolist() == convert.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert convert.tokenizer.decode(ids[mask == 1]) == "<|im_end|>done<|im_end|>"


def test_characters_of_several_bytes_are_supervised_whole():
    assert supervised(converter(), tiny.chat("ä", "grüße 🙂")) == "grüße 🙂<|im_end|>"


def test_without_an_end_of_turn_token_the_answer_ends_at_its_last_written_character():
    plain = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    assert supervised(converter(plain), tiny.chat("hi", "yo")) == "yo"


def test_a_token_across_the_border_of_an_answer_is_rejected():
    from tokenizers import AddedToken

    convert = converter()
    convert.tokenizer.add_tokens(AddedToken("t\nyo", special=False))
    with pytest.raises(RowRejected, match="lies across the border"):
        convert.document(parse_conversation(tiny.chat("hi", "yo")))


@pytest.mark.parametrize("extra", [0, 1])
def test_a_row_longer_than_max_length_is_rejected_with_its_length(extra: int):
    length = len(converter().document(parse_conversation(tiny.chat("hi", "yo")))[0])
    convert = converter(max_length=length - extra)
    if extra:
        with pytest.raises(RowRejected, match=f"it has {length} tokens; the limit is {length - 1}"):
            convert.document(parse_conversation(tiny.chat("hi", "yo")))
    else:
        assert len(convert.document(parse_conversation(tiny.chat("hi", "yo")))[0]) == length


def test_a_row_without_an_answer_is_rejected():
    with pytest.raises(RowRejected, match="no assistant turn to learn from"):
        converter().document(parse_conversation(tiny.chat("hi")))


def test_a_template_that_refuses_a_row_rejects_it_with_its_own_words():
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RowRejected, match="the chat template refused it: roles must alternate"):
        converter(refusing).document(parse_conversation(tiny.chat("hi", "yo")))


def test_the_prompt_ends_where_the_answer_begins():
    convert = converter()
    ids, mask = convert.document(parse_conversation(tiny.chat("hi", "yo")))
    prompt = convert.prompt(parse_conversation(tiny.chat("hi", "yo")))
    assert prompt.tolist() == ids[: np.flatnonzero(mask)[0]].tolist()


def test_a_prompt_that_leaves_no_room_is_rejected():
    length = len(converter().prompt(parse_conversation(tiny.chat("hi"))))
    with pytest.raises(RowRejected, match="leaves no room for an answer"):
        converter(max_length=length).prompt(parse_conversation(tiny.chat("hi")))


def test_the_key_stands_for_ids_and_mask():
    ids = np.arange(3, dtype=np.int32)
    assert sample_key(ids, b"\1\1\0") != sample_key(ids, b"\1\0\0")
    assert sample_key(ids, b"") == sample_key(ids.astype(np.int64), b"")
    assert len(sample_key(ids, b"")) == 16


def test_a_folder_without_tokenizer_or_template_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    tiny.build_tokenizer(None).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="has no chat template"):
        load_tokenizer(tmp_path)


def test_a_template_that_prints_the_date_gives_the_same_ids_on_another_day():
    """The date is the cache's, so that the same command tomorrow finds its samples stored."""
    from datetime import datetime

    template = "{{ strftime_now('%d %b %Y') }}\n" + tiny.CHATML
    tokenizer = tiny.build_tokenizer(template)
    then = datetime(2020, 2, 3)
    converter = ConversationTokenizer(tokenizer, special_token_ids(tokenizer), 200, then)
    ids = converter.prompt(parse_conversation(tiny.chat("hi")))
    assert tokenizer.decode(ids).startswith("03 Feb 2020")
