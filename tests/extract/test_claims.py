"""What is asked of the target, and which tokens of a history count as the target's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_target as tiny
from templates import TRIMS, pieces_tokenizer

from dflash_cache.extract.claims import Answer, answer_text, claim
from dflash_cache.extract.conversation import Conversation, make_conversation
from dflash_cache.extract.rejects import RowRejected
from dflash_cache.extract.script import Script, most_rows, rounds_of, turn_keys
from dflash_cache.extract.tokens import ConversationTokenizer

U = {"role": "user", "content": "u"}
A = {"role": "assistant", "content": "a"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
TOOL = {"role": "tool", "content": "42"}
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("messages", "pending", "wanted"),
    [
        ([U], (), [[U]]),
        ([SYSTEM, U, A], (), [[SYSTEM, U]]),
        ([U, A, U, A], (), [[U], [U]]),
        ([U, A, U], (), [[U], [U]]),
        ([U, U, A, A, U], (), [[U, U], [U]]),
        ([A, U, A, U], (), [[A, U], [U]]),
        ([U, CALL, TOOL, A, U], (), [[U, CALL, TOOL], [U]]),
        ([U, CALL], (), [[U]]),
        ([U], ([U], [SYSTEM, U]), [[U], [U], [SYSTEM, U]]),
    ],
)
def test_every_question_is_asked_once_and_only_calls_of_tools_and_greetings_stay(messages: Any, pending: Any, wanted: Any):
    assert rounds_of(make_conversation(messages, pending=pending)) == wanted


@pytest.mark.parametrize("messages", [[SYSTEM, U, SYSTEM], [SYSTEM, U, SYSTEM, A], [U, A, SYSTEM]])
def test_a_conversation_that_ends_in_no_question_is_rejected(messages: Any):
    with pytest.raises(RowRejected, match="there is no user turn to answer"):
        rounds_of(make_conversation(messages))


def test_keys_depend_on_all_that_is_asked_and_on_no_answer_of_the_data():
    def keys(*texts: str, **more: Any) -> tuple[bytes, ...]:
        conversation = make_conversation(tiny.chat(*texts)["messages"], **more)
        return turn_keys(conversation, rounds_of(conversation), np.arange(3))

    assert keys("a", "x", "b", "y", "c") == keys("a", "other", "b", "answers", "c")
    assert keys("a", "x", "b", "y", "c")[:2] == keys("a", "x", "b")
    assert keys("a", "x", "b")[0] == keys("a", "x", "d")[0]
    assert len({keys("a", "x", "b")[1], keys("a", "x", "d")[1], keys("a", "x", "b", template_args={"k": 1})[1]}) == 3


def test_a_script_comes_back_from_its_json_as_it_was():
    script = Script(([SYSTEM, U], [U]), (b"0" * 16, b"1" * 16), (b"1" * 16,), 9, [{"type": "function", "function": {"name": "f"}}], {"x": 1})
    assert Script.from_json(script.to_json()) == script
    assert script.conversation(["yo"]).messages == [SYSTEM, U, {"role": "assistant", "content": "yo"}, U]
    assert script.answer_places(1) == [2]


@pytest.mark.parametrize(
    ("given", "turns", "samples", "rows"),
    [(10, 1, 1, 10 + 4 - 1), (10, 3, 1, 10 + 12 - 1), (10, 3, 3, 13 + 17 + 21), (90, 3, 3, 93 + 97 + 99)],
)
def test_the_most_rows_of_all_turns_and_of_each(given: int, turns: int, samples: int, rows: int):
    assert most_rows(given, turns, samples, 4, 100) == rows


def claimed(tokenizer: Any, written: list[str], **template_args: Any) -> tuple[str, int]:
    """(what is claimed of the last prompt, how many answers) when the target wrote exactly these texts."""
    converter = ConversationTokenizer(tokenizer, (), 4096)
    rounds = [[{"role": "user", "content": f"question {number}"}] for number in range(len(written) + 1)]
    script = Script(tuple(rounds), (), (), 0, None, template_args)
    answers: list[Answer] = []
    for text in written:
        asked = converter.question(script.conversation([answer.text for answer in answers])).input_ids
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        answers.append(Answer(asked, ids, answer_text(tokenizer, asked, ids[:-1])))
    conversation = script.conversation([answer.text for answer in answers])
    question = converter.question(conversation)
    render = converter.template.for_row(None, template_args)
    prompt = converter.template.generation_prompt(template_args) or ""
    where = script.answer_places(len(answers))
    mask, count = claim(question.text, question.input_ids, question.tokens, conversation.messages, answers, where, render, prompt)
    return tokenizer.decode(question.input_ids[mask == 1]), count


def test_answers_that_stand_as_they_were_written_are_claimed_with_the_token_that_ended_them():
    assert claimed(tiny.build_tokenizer(), ["one<|im_end|>", " two <|im_end|>"]) == ("one<|im_end|> two <|im_end|>", 2)


def test_a_token_that_ended_an_answer_otherwise_than_the_template_does_is_not_claimed():
    assert claimed(tiny.build_tokenizer(), ["one<pad>", "two<|im_end|>"]) == ("onetwo<|im_end|>", 2)


def test_a_trimmed_answer_is_not_claimed_and_the_others_are():
    tokenizer = pieces_tokenizer(TRIMS)
    assert claimed(tokenizer, ["one<|eot|>", "two  <|eot|>", "three<|eot|>"]) == ("one<|eot|>three<|eot|>", 2)


def test_an_answer_without_its_thought_is_not_claimed():
    assert claimed(tiny.build_tokenizer(tiny.CHATML_STRIPS), ["<t>x</t>one<|im_end|>", "two<|im_end|>"]) == ("two<|im_end|>", 1)


def test_an_answer_behind_a_prompt_that_history_does_not_keep_is_found_by_its_span():
    assert claimed(tiny.build_tokenizer(tiny.CHATML_OPENS), ["one<|im_end|>", "two<|im_end|>"]) == ("one<|im_end|>two<|im_end|>", 2)


def test_tokens_that_come_back_otherwise_are_not_claimed():
    tokenizer = pieces_tokenizer(tiny.CHATML)
    whole = tokenizer("hello<|im_end|>", add_special_tokens=False)["input_ids"]
    split = [*(tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "hello"), whole[-1]]
    assert len(split) > len(whole)
    render = ConversationTokenizer(tokenizer, (), 4096)
    asked = render.question(Conversation([U])).input_ids
    ids = np.array(split, np.int32)
    answer = Answer(asked, ids, answer_text(tokenizer, asked, ids[:-1]))
    assert answer.text == "hello"
    messages = [U, {"role": "assistant", "content": "hello"}, U]
    question = render.question(Conversation(messages))
    mask, count = claim(question.text, question.input_ids, question.tokens, messages, [answer], [1], render.template.for_row(None, {}), "")
    assert (int(mask.sum()), count) == (0, 0)


def test_an_answers_text_is_what_a_server_decodes_behind_the_prompt():
    tokenizer = tiny.build_tokenizer()
    prompt, ids = (np.array(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("<|im_start|>assistant\n", " a<|im_start|> b , c"))
    assert answer_text(tokenizer, prompt, ids) == " a b , c"
