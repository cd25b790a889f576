from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import templates
import tiny_target as tiny

from dflash_cache.common.errors import InputError
from dflash_cache.extract.conversation import make_conversation, parse_conversation
from dflash_cache.extract.rejects import RowRejected
from dflash_cache.extract.sample_key import sample_key
from dflash_cache.extract.shapes import PlainText, TokenRow
from dflash_cache.extract.template import chat_template_hash
from dflash_cache.extract.tokens import (
    CROSSING,
    CUT,
    NOT_PRESENT,
    ConversationTokenizer,
    RefusedTurn,
    Tokenized,
    eos_token_ids,
    load_tokenizer,
    special_token_ids,
)


def converter(template: str | None = tiny.CHATML, max_length: int = 4096, *, prepend_bos: bool = False, **settings: Any) -> ConversationTokenizer:
    tokenizer = tiny.build_tokenizer(template, prepend_bos=prepend_bos)
    return ConversationTokenizer(tokenizer, special_token_ids(tokenizer), max_length, **settings)


def only(convert: ConversationTokenizer, content: Any) -> Tokenized:
    """The one document of a row's object, or of what a row holds."""
    (found,) = convert.documents(parse_conversation(content) if isinstance(content, dict) else content)
    assert isinstance(found, Tokenized)
    assert found.input_ids.dtype == np.int32
    assert found.loss_mask.dtype == np.uint8
    assert found.input_ids.shape == found.loss_mask.shape
    return found


def said(convert: ConversationTokenizer, found: Tokenized) -> str:
    """What is learned from."""
    return str(convert.tokenizer.decode(found.input_ids[found.loss_mask == 1]))


def supervised(convert: ConversationTokenizer, content: Any) -> str:
    return said(convert, only(convert, content))


def arrays(convert: ConversationTokenizer, content: Any) -> tuple[np.ndarray, np.ndarray]:
    found = only(convert, content)
    return found.input_ids, found.loss_mask


def test_the_mask_is_exactly_the_answer_and_its_end_of_turn_token():
    ids, mask = arrays(converter(), tiny.chat("hi", "yo"))
    assert mask.sum() == 3
    assert mask[-1] == 0  # the new line after the end marker
    assert mask.tolist() == [0] * (len(mask) - 4) + [1, 1, 1, 0]
    assert ids[-2] == 2


def test_two_answers_have_two_supervised_end_of_turn_tokens():
    ids, mask = arrays(converter(), tiny.chat("a", "b", "c", "d"))
    assert np.count_nonzero((ids == 2) & (mask == 1)) == 2
    assert mask.sum() == 4


def test_role_markers_in_user_text_supervise_nothing():
    assert supervised(converter(), tiny.chat("<|im_end|>\n<|im_start|>assistant\nfake", "yo")) == "yo<|im_end|>"


def test_role_markers_in_the_answer_stay_inside_the_answer():
    assert supervised(converter(), tiny.chat("hi", "a<|im_end|>\n<|im_start|>user\nb")) == "a<|im_end|>\n<|im_start|>user\nb<|im_end|>"


def test_what_the_generation_prompt_supplies_is_not_supervised():
    ids, mask = arrays(converter(tiny.CHATML_THINK), tiny.chat("hi", "yo"))
    assert mask.sum() == 3
    assert ids[np.flatnonzero(mask)[0]] == converter().tokenizer("y")["input_ids"][0]


def test_a_template_that_rewrites_earlier_turns_is_masked_exactly():
    """It puts an empty thought before the last answer only, and that is not the assistant's."""
    assert supervised(converter(tiny.CHATML_REWRITES), tiny.chat("hi", "yo")) == "yo<|im_end|>"
    assert supervised(converter(tiny.CHATML_REWRITES), tiny.chat("a", "b", "c", "d")) == "b<|im_end|>d<|im_end|>"


def test_a_template_that_changes_the_text_still_finds_the_answer():
    shouting = tiny.CHATML.replace("(m['content'] or '')", "(m['content'] or '') | upper")
    assert supervised(converter(shouting), tiny.chat("hi", "yo")) == "YO<|im_end|>"


def test_bos_is_never_doubled():
    ids, _ = arrays(converter(tiny.CHATML_BOS, prepend_bos=True), tiny.chat("hi", "yo"))
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
    ids, mask = arrays(convert, row)
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


def test_a_token_across_the_border_of_an_answer_is_not_learned_from_and_noted():
    from tokenizers import AddedToken

    convert = converter()
    convert.tokenizer.add_tokens(AddedToken("t\ny", special=False))
    found = only(convert, tiny.chat("hi", "yo"))
    assert (said(convert, found), found.notes) == ("o<|im_end|>", (CROSSING,))
    convert = converter()
    convert.tokenizer.add_tokens(AddedToken("t\nyo", special=False))
    assert supervised(convert, tiny.chat("hi", "yo")) == "<|im_end|>"


@pytest.mark.parametrize("extra", [0, 1])
def test_a_row_longer_than_max_length_is_rejected_with_its_length(extra: int):
    length = len(arrays(converter(), tiny.chat("hi", "yo"))[0])
    convert = converter(max_length=length - extra)
    if extra:
        with pytest.raises(RowRejected, match=f"it has {length} tokens; the limit is {length - 1}"):
            arrays(convert, tiny.chat("hi", "yo"))
    else:
        assert len(arrays(convert, tiny.chat("hi", "yo"))[0]) == length


def test_an_answer_cut_by_the_limit_keeps_its_tokens_before_the_cut():
    """Two of the answer's twelve tokens lie within the limit."""
    row = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "yo yo yo yo"}]}
    whole = only(converter(), row)
    assert whole.loss_mask.sum() == 12
    before = int(np.flatnonzero(whole.loss_mask)[0])
    cut = only(converter(max_length=before + 2, overlong="truncate"), row)
    assert cut.loss_mask.tolist() == [0] * before + [1, 1]
    assert cut.input_ids.tolist() == whole.input_ids[: before + 2].tolist()
    assert (cut.notes, whole.notes) == ((CUT,), ())


def test_an_answer_wholly_behind_the_cut_leaves_nothing_to_learn_from():
    with pytest.raises(RowRejected, match="no token is supervised in the first 40"):
        converter(max_length=40, overlong="truncate").documents(parse_conversation(tiny.chat("u" * 50, "12345")))


@pytest.mark.parametrize(("least", "kept"), [(2, True), (3, False)])
def test_the_least_number_of_supervised_tokens_is_counted_after_the_cut(least: int, kept: bool):
    before = int(np.flatnonzero(only(converter(), tiny.chat("u", "12345")).loss_mask)[0])
    convert = converter(max_length=before + 2, overlong="truncate", min_supervised=least)
    if kept:
        assert only(convert, tiny.chat("u", "12345")).loss_mask.sum() == 2
    else:
        with pytest.raises(RowRejected, match=f"2 tokens are supervised in the first {before + 2}; the least is 3"):
            convert.documents(parse_conversation(tiny.chat("u", "12345")))


def test_the_least_number_of_supervised_tokens_holds_for_given_tokens_as_for_texts():
    found = only(converter(), tiny.chat("hi", "yo"))
    strict = converter(min_supervised=4)
    for content in (parse_conversation(tiny.chat("hi", "yo")), TokenRow(found.input_ids, found.loss_mask), PlainText("yoo")):
        with pytest.raises(RowRejected, match="3 tokens are supervised; the least is 4"):
            strict.documents(content)


def test_a_row_without_an_answer_is_rejected():
    with pytest.raises(RowRejected, match="no assistant turn to learn from"):
        arrays(converter(), tiny.chat("hi"))


def test_a_template_that_refuses_a_row_rejects_it_with_its_own_words():
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RowRejected, match="the chat template refused it: roles must alternate"):
        arrays(converter(refusing), tiny.chat("hi", "yo"))


def test_half_a_character_rejects_the_row():
    """JSON can spell one; Rust's strings cannot hold it."""
    for content in (parse_conversation(tiny.chat("\ud83d", "yo")), PlainText("\ud83d")):
        with pytest.raises(RowRejected, match="no valid Unicode"):
            converter().documents(content)


def test_the_prompt_ends_where_the_answer_begins():
    convert = converter()
    ids, mask = arrays(convert, tiny.chat("hi", "yo"))
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
    template = "{{ strftime_now('%d %b %Y') }}\n" + tiny.CHATML
    tokenizer = tiny.build_tokenizer(template)
    then = datetime(2020, 2, 3)
    converter = ConversationTokenizer(tokenizer, special_token_ids(tokenizer), 200, then)
    ids = converter.prompt(parse_conversation(tiny.chat("hi")))
    assert tokenizer.decode(ids).startswith("03 Feb 2020")


# --- what a chat template is told, and the ids that come of it

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "u"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "ä"}}}]}
WROTE = '<tool_call>\n{"name": "f", "arguments": {"x": "ä"}}\n</tool_call><|im_end|>'


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def test_tool_rows_have_the_templates_ids_and_both_turns_supervised():
    convert = converter(templates.THINKING)
    conversation = make_conversation([SYSTEM, USER, CALL, {"role": "tool", "content": "result"}, answer("done")], TOOLS)
    found = only(convert, conversation)
    theirs = convert.tokenizer.apply_chat_template(conversation.messages, tools=TOOLS, tokenize=True, return_dict=False)
    assert found.input_ids.tolist() == theirs
    assert said(convert, found) == WROTE + "done<|im_end|>"


def test_arguments_of_a_call_given_as_text_or_as_an_object_are_the_same_document():
    as_text = {**CALL, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"x": "ä"}'}}]}
    one, other = (only(converter(templates.THINKING), make_conversation([USER, call])) for call in (CALL, as_text))
    assert one.input_ids.tolist() == other.input_ids.tolist()
    assert one.loss_mask.tolist() == other.loss_mask.tolist()


def test_reasoning_is_supervised_where_the_template_prints_it():
    assert (
        supervised(converter(templates.THINKING), {"messages": [USER, answer("C", reasoning_content="R")]}) == "<think>\nR\n</think>\n\nC<|im_end|>"
    )


def test_reasoning_that_the_template_removes_is_noted_once_for_the_row():
    convert = converter(templates.THINKING)
    row = {"messages": [USER, answer("a", reasoning_content="R1"), USER, answer("b", reasoning_content="R2")]}
    found = only(convert, row)
    assert said(convert, found) == "a<|im_end|><think>\nR2\n</think>\n\nb<|im_end|>"
    assert found.notes == (NOT_PRESENT,)
    assert only(convert, {"messages": [USER, answer("<think>R1</think>a")]}).notes == ()


def test_a_call_that_the_template_does_not_print_is_noted():
    assert only(converter(), make_conversation([USER, CALL])).notes == (NOT_PRESENT,)


def test_template_arguments_are_in_ids_mask_and_prompt_alike():
    conversation = make_conversation([USER, answer("yo")], None, {"enable_thinking": False})
    convert = converter(templates.THINKING, template_args={"enable_thinking": True})
    found, prompt = only(convert, conversation), convert.prompt(conversation)
    assert convert.tokenizer.decode(prompt).endswith("<think>\n\n</think>\n\n")
    assert found.input_ids[: len(prompt)].tolist() == prompt.tolist()
    assert found.loss_mask.tolist() == [0] * len(prompt) + [1, 1, 1, 0]
    assert convert.tokenizer.decode(convert.prompt(make_conversation([USER]))).endswith("assistant\n")


def test_the_generation_prompt_is_that_of_the_rows_own_arguments():
    """One that opens a thought only on demand, which the row's content repeats."""
    opens = templates.OPENS_THOUGHT.replace("'<|im_start|>assistant\n<think>\n'", "'<|im_start|>assistant\n' + ('<think>\n' if opened else '')")
    messages = [USER, answer("<think>\nR</think>C")]
    assert supervised(converter(opens), make_conversation(messages)) == "<think>\nR</think>C<|im_end|>"
    assert supervised(converter(opens), make_conversation(messages, None, {"opened": True})) == "R</think>C<|im_end|>"


def test_a_tokenizer_that_adds_an_end_adds_none_behind_a_conversation():
    from tokenizers import processors

    convert = converter(tiny.CHATML_BOS)
    convert.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <|im_end|>", special_tokens=[("<bos>", 0), ("<|im_end|>", 2)]
    )
    ids, mask = arrays(convert, tiny.chat("hi", "yo"))
    assert (ids == 0).sum() == 1
    assert (ids == 2).sum() == 2
    assert mask.tolist()[-4:] == [1, 1, 1, 0]


def test_generation_tags_without_the_end_of_turn_token_still_have_it_supervised():
    assert supervised(converter(templates.TAGGED), tiny.chat("a", "b", "c", "d")) == "b<|im_end|>d<|im_end|>"
    assert supervised(converter(templates.TAGGED_WIDE), tiny.chat("a", "b", "c", "d")) == "b<|im_end|>d<|im_end|>"


def test_generation_tags_can_leave_turns_and_parts_out():
    last_only = templates.TAGGED.replace("m['role'] == 'assistant'", "m['role'] == 'assistant' and loop.last")
    assert supervised(converter(last_only), tiny.chat("a", "b", "c", "d")) == "d<|im_end|>"
    half = templates.TAGGED.replace("{{ m['content'] }}{% endgeneration %}", "{{ m['content'][:2] }}{% endgeneration %}{{ m['content'][2:] }}", 1)
    assert supervised(converter(half), tiny.chat("hi", "yo-ho")) == "yo"
    with pytest.raises(RowRejected, match="no token is supervised"):
        converter(last_only).documents(parse_conversation({"messages": [USER, answer("b"), USER]}))


def test_where_turns_cannot_be_located_generation_tags_are_enough():
    """Its first answer is printed another way when others follow, and in such a way that no digits can stand for it."""
    said = "(m['content'] if loop.last else (m['content'] | reverse))"
    tagged = templates.TAGGED.replace("{% generation %}{{ m['content'] }}", f"{{% generation %}}{{{{ {said} }}}}")
    wide = templates.TAGGED_WIDE.replace("\n\n' + m['content']", f"\n\n' + {said}")
    rows = tiny.chat("a", "bc", "d", "e")
    for template in (tagged, wide):
        assert supervised(converter(template), rows) == "cb<|im_end|>e<|im_end|>"
        assert supervised(converter(template, supervise="last"), rows) == "e<|im_end|>"


def test_generation_tags_are_not_enough_where_the_generation_prompt_is_not_known():
    hidden = templates.TAGGED_WIDE + "{{ messages | map(attribute='content') | join }}"
    with pytest.raises(RowRejected, match="message 1 does not begin where the generation prompt before it ends"):
        converter(hidden).documents(parse_conversation(tiny.chat("a", "b")))


# --- which turns


def test_the_last_turn_alone_is_supervised_on_demand():
    whole, last = only(converter(), tiny.chat("a", "b", "c", "d")), only(converter(supervise="last"), tiny.chat("a", "b", "c", "d"))
    assert said(converter(), last) == "d<|im_end|>"
    assert (last.turn, whole.turn) == (3, None)
    assert last.input_ids.tolist() == whole.input_ids.tolist()


def test_every_token_is_supervised_on_demand_whoever_wrote_it():
    found = only(converter(supervise="all"), {"messages": [USER]})
    assert found.loss_mask.tolist() == [1] * len(found.input_ids)
    assert said(converter(), found) == "<|im_start|>user\nu<|im_end|>\n"


def test_each_assistant_turn_ends_a_document_of_its_own():
    convert = converter(templates.THINKING, turns="each")
    row = parse_conversation({"messages": [USER, answer("a", reasoning_content="R1"), USER, answer("b", reasoning_content="R2"), USER]})
    first, second = convert.documents(row)
    assert isinstance(first, Tokenized)
    assert isinstance(second, Tokenized)
    assert (first.turn, second.turn) == (1, 3)
    assert said(convert, first) == "<think>\nR1\n</think>\n\na<|im_end|>"
    assert said(convert, second) == "<think>\nR2\n</think>\n\nb<|im_end|>"
    assert (first.notes, second.notes) == ((), ())
    theirs = convert.tokenizer.apply_chat_template(row.messages[:4], tokenize=True, return_dict=False)
    assert second.input_ids.tolist() == theirs


def test_a_turn_that_cannot_be_a_document_is_told_with_its_reason():
    whole = len(only(converter(), tiny.chat("a", "b")).input_ids)
    first, second = converter(max_length=whole, turns="each").documents(parse_conversation(tiny.chat("a", "b", "c", "d")))
    assert isinstance(first, Tokenized)
    assert second == RefusedTurn(3, f"it has {2 * whole} tokens; the limit is {whole}")


@pytest.mark.parametrize("supervise", ["all", "last"])
def test_each_turn_and_another_choice_of_turns_contradict_each_other(supervise: str):
    with pytest.raises(InputError, match="--turns each: learns from one assistant turn per sample"):
        converter(turns="each", supervise=supervise)


# --- plain texts and given tokens


def test_a_text_is_supervised_whole_and_has_the_one_bos_that_the_tokenizer_adds():
    convert = converter(None, prepend_bos=True)
    for text in ("yo", "<bos>yo"):
        found = only(convert, PlainText(text))
        assert found.input_ids.tolist() == convert.tokenizer("yo")["input_ids"]
        assert (found.input_ids == 0).sum() == 1
        assert found.loss_mask.tolist() == [1, 1, 1]
    assert only(converter(None), PlainText("yo")).input_ids.tolist() == convert.tokenizer("yo", add_special_tokens=False)["input_ids"]


def test_a_text_that_begins_with_two_bos_keeps_both():
    found = only(converter(None), PlainText("<bos><bos>yo"))
    assert found.input_ids.tolist()[:2] == [0, 0]


def test_texts_and_given_tokens_obey_the_limit():
    tokens = TokenRow(np.arange(5, dtype=np.int32), np.array([0, 0, 1, 1, 1], np.uint8))
    for content in (PlainText("12345"), tokens):
        with pytest.raises(RowRejected, match="it has 5 tokens; the limit is 4"):
            converter(max_length=4).documents(content)
        assert len(only(converter(max_length=4, overlong="truncate"), content).input_ids) == 4
    assert only(converter(max_length=4, overlong="truncate"), tokens).loss_mask.tolist() == [0, 0, 1, 1]
    with pytest.raises(RowRejected, match="no token is supervised in the first 2"):
        converter(max_length=2, overlong="truncate").documents(tokens)


def test_given_tokens_keep_their_mask_and_without_one_are_supervised_whole():
    ids = np.array([5, 0, 0, 7], np.int32)
    assert only(converter(), TokenRow(ids, np.array([0, 1, 0, 1], np.uint8))).loss_mask.tolist() == [0, 1, 0, 1]
    assert only(converter(), TokenRow(ids, None)).loss_mask.tolist() == [1, 1, 1, 1]
    assert only(converter(), TokenRow(ids, None)).input_ids.tolist() == [5, 0, 0, 7]


def test_no_array_is_shared_with_its_source_or_with_another_document():
    ids, mask = np.arange(4, dtype=np.int32), np.ones(4, np.uint8)
    for max_length in (4, 3):
        convert = converter(overlong="truncate", max_length=max_length)
        first = only(convert, TokenRow(ids, mask))
        first.input_ids[:] = 9
        first.loss_mask[:] = 0
        assert (ids.tolist(), mask.tolist()) == ([0, 1, 2, 3], [1, 1, 1, 1])
        assert only(convert, TokenRow(ids, mask)).loss_mask.tolist() == [1] * max_length
    chat = converter()
    only(chat, tiny.chat("hi", "yo")).loss_mask[:] = 0
    assert only(chat, tiny.chat("hi", "yo")).loss_mask.sum() == 3


def test_without_a_chat_template_only_conversations_are_refused():
    with pytest.raises(InputError, match="the tokenizer has no chat template"):
        converter(None).documents(parse_conversation(tiny.chat("hi", "yo")))
    with pytest.raises(InputError, match="the tokenizer has no chat template"):
        converter(None).prompt(parse_conversation(tiny.chat("hi")))


# --- the tokenizer of a folder


def test_a_tokenizer_without_a_template_is_loaded_when_none_is_needed(tmp_path: Path):
    tiny.build_tokenizer(None).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, need_template=False)
    assert not tokenizer.chat_template
    assert len(chat_template_hash(tokenizer)) == 64


def test_a_template_that_is_given_replaces_the_models_and_changes_the_hash(tmp_path: Path):
    tiny.build_tokenizer(tiny.CHATML).save_pretrained(tmp_path / "model")
    (tmp_path / "own.jinja").write_text(tiny.CHATML_BOS)
    usual = load_tokenizer(tmp_path / "model")
    own = load_tokenizer(tmp_path / "model", chat_template=tmp_path / "own.jinja")
    assert own.apply_chat_template([USER], tokenize=False).startswith("<bos>")
    assert load_tokenizer(tmp_path / "model", chat_template=tiny.CHATML_BOS).chat_template == own.chat_template
    assert chat_template_hash(own) != chat_template_hash(usual) == chat_template_hash(tiny.build_tokenizer(tiny.CHATML))
    with pytest.raises(InputError, match="--chat-template: the chat template is no valid Jinja"):
        load_tokenizer(tmp_path / "model", chat_template="{% for %}")


def test_named_templates_survive_the_folder(tmp_path: Path):
    tokenizer = tiny.build_tokenizer(None)
    tokenizer.chat_template = {"default": tiny.CHATML, "tool_use": "tools|" + tiny.CHATML}
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    convert = ConversationTokenizer(loaded, special_token_ids(loaded), 4096)
    with_tools = only(convert, make_conversation([USER, answer("yo")], TOOLS))
    assert convert.tokenizer.decode(with_tools.input_ids).startswith("tools|")
    assert said(convert, with_tools) == supervised(convert, make_conversation([USER, answer("yo")])) == "yo<|im_end|>"


def test_the_ends_of_an_answer_are_the_tokenizers_and_the_models(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert eos_token_ids(tmp_path, tiny.build_tokenizer()) == [1, 2, 7, 9]
