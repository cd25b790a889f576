from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import templates
import tiny_target as tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_cache.extract.conversation import Conversation
from dflash_cache.extract.rejects import RowRejected
from dflash_cache.extract.spans import Span, Tokens, locate_turns, mark, narrow, tagged_turns
from dflash_cache.extract.template import ChatTemplate
from dflash_cache.extract.tokens import CROSSING, ConversationTokenizer, Tokenized, special_token_ids

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


def locate(template: str, messages: list[dict[str, Any]], turns: list[int] | None = None) -> list[str]:
    """The text of each turn."""
    chat = ChatTemplate(tiny.build_tokenizer(template))
    render = chat.for_row(None, {})
    text = render(messages)
    wanted = turns or [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return [text[span.start : span.end] for span in locate_turns(text, messages, wanted, render, chat.generation_prompt({}) or "")]


def says(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


# --- every token of every conversation, against the templates' plain twins

FRAGMENTS = st.sampled_from(
    [
        "<|im_start|>assistant\n",
        "<|im_end|>",
        "\n",
        " ",
        "\n\n",
        "  ",
        "<think>",
        "</think>",
        "<tool_response>",
        "[/INST]",
        "</s>",
        "<|eot|>",
        "yo",
        "ä🙂",
    ]
)
TEXT = st.lists(st.one_of(FRAGMENTS, st.text(max_size=6)), max_size=5).map("".join)
SAID = TEXT.filter(bool)
THOUGHT = st.one_of(st.none(), TEXT.map(lambda text: text.replace("</think>", "")).filter(lambda text: text.strip("\n")))


@st.composite
def conversations(draw: st.DrawFn, *, plain: bool = False) -> list[dict[str, Any]]:
    messages = [] if plain or draw(st.booleans()) else [says("system", draw(TEXT))]
    for _ in range(draw(st.integers(1, 4))):
        messages += [says("user", draw(SAID)), says("assistant", draw(SAID))]
        if not plain and (thought := draw(THOUGHT)):
            messages[-1]["reasoning_content"] = thought
        if not plain and draw(st.integers(0, 3)) == 0:
            messages[-1]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {"x": draw(TEXT)}}}] * draw(st.integers(1, 2))
            messages += [says("tool", draw(TEXT)), says("assistant", draw(SAID))]
    return messages + ([says("user", draw(SAID))] if draw(st.booleans()) else [])


def check(name: str, tokenizer: Any, messages: list[dict[str, Any]]) -> None:
    """A token is learned from if and only if the twin says so of all its characters."""
    pieces = templates.TWINS[name][1](messages)
    text = "".join(piece for piece, _ in pieces)
    mine = np.repeat([learned for _, learned in pieces], [len(piece) for piece, _ in pieces])
    assert text == tokenizer.apply_chat_template(messages, tokenize=False), "the twin differs from its template"
    (found,) = ConversationTokenizer(tokenizer, special_token_ids(tokenizer), 100_000).documents(Conversation(messages))
    assert isinstance(found, Tokenized)
    assert found.input_ids.tolist() == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    for place, (start, end) in enumerate(places):
        if start < end:
            assert found.loss_mask[place] == mine[start:end].all(), (place, text[start:end], text)
    mixed = any(start < end and mine[start:end].any() and not mine[start:end].all() for start, end in places)
    assert mixed == (CROSSING in found.notes)


CHATML_LIKE = ("tagged", "tagged_wide", "no_thought", "opens_thought", "no_prompt", "system_default")
PAIRS = [  # "bytes" has no tokens for the others' markers, and the BOS of "spaces" is not the one of "trims"
    *(("bytes", name) for name in CHATML_LIKE),
    *(("pieces", name) for name in (*CHATML_LIKE, "trims", "instruct")),
    *(("spaces", name) for name in (*CHATML_LIKE, "instruct")),
]
TOKENIZERS = {"bytes": tiny.build_tokenizer(), "pieces": templates.pieces_tokenizer(), "spaces": templates.spaces_tokenizer()}


def with_template(kind: str, name: str) -> Any:
    tokenizer = TOKENIZERS[kind]
    tokenizer.chat_template = templates.TWINS[name][0]
    return tokenizer


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=conversations())
def test_every_token_of_a_thinking_template_is_supervised_if_the_assistant_wrote_all_of_it(kind: str, messages: list[dict[str, Any]]):
    check("thinking", with_template(kind, "thinking"), messages)


@pytest.mark.parametrize(("kind", "name"), PAIRS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=conversations(plain=True))
def test_every_token_is_supervised_if_the_assistant_wrote_all_of_it(kind: str, name: str, messages: list[dict[str, Any]]):
    check(name, with_template(kind, name), messages)


@pytest.mark.parametrize("name", ["thinking", "system_default"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=conversations())
def test_turns_located_together_are_where_each_is_located_alone(name: str, messages: list[dict[str, Any]]):
    chat = ChatTemplate(with_template("bytes", name))
    render, prompt = chat.for_row(None, {}), chat.generation_prompt({}) or ""
    text = render(messages)
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    alone = [span for turn in turns for span in locate_turns(text, messages, [turn], render, prompt)]
    assert locate_turns(text, messages, turns, render, prompt) == alone


# --- one rule at a time


def test_an_earlier_thought_that_the_template_removes_is_not_looked_for():
    messages = [USER, says("assistant", "a", reasoning_content="R1"), USER, says("assistant", "b", reasoning_content="R2")]
    assert locate(templates.THINKING, messages) == ["a", "<think>\nR2\n</think>\n\nb"]


def test_an_empty_thought_of_the_template_is_not_the_assistants():
    assert locate(templates.THINKING, [USER, ANSWER]) == ["yo"]
    assert locate(templates.NO_THOUGHT, [USER, ANSWER, USER, ANSWER]) == ["yo", "yo"]


def test_a_thought_in_the_content_is_found_with_its_tags():
    assert locate(templates.THINKING, [USER, says("assistant", "<think>\nR\n</think>\n\nC")]) == ["<think>\nR\n</think>\n\nC"]


def test_what_the_generation_prompt_opens_is_not_the_assistants_though_the_row_has_it():
    assert locate(templates.OPENS_THOUGHT, [USER, says("assistant", "<think>\nR</think>C"), USER, ANSWER]) == ["R</think>C", "yo"]


def test_tool_calls_belong_to_the_turn_and_tool_results_do_not():
    call = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    messages = [
        USER,
        says("assistant", "", tool_calls=call),
        says("tool", "42"),
        says("assistant", "see", tool_calls=call),
        says("tool", "43"),
        ANSWER,
    ]
    written = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert locate(templates.THINKING, messages) == [written, "see\n" + written, "yo"]


def test_the_space_before_an_answer_is_the_targets_where_nothing_prompts_it():
    assert locate(templates.INSTRUCT, [USER, says("assistant", "  yo "), USER, ANSWER]) == [" yo", " yo"]


def test_white_space_between_the_generation_prompt_and_the_answer_is_the_targets():
    short = tiny.CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant'")
    assert locate(short, [USER, ANSWER, USER, ANSWER]) == ["\nyo", "\nyo"]


def test_turns_out_of_order_are_rejected():
    with pytest.raises(RowRejected, match="message 3 does not stand where the template puts assistant turns"):
        locate(tiny.CHATML.replace("in messages", "in messages[::-1]"), [USER, says("assistant", "a"), USER, says("assistant", "b")])


def test_an_assistant_may_begin():
    assert locate(tiny.CHATML, [ANSWER, USER, ANSWER]) == ["yo", "yo"]
    assert locate(templates.THINKING, [ANSWER, USER, ANSWER]) == ["yo", "yo"]


def test_several_assistant_turns_in_a_row_are_apart():
    assert locate(tiny.CHATML, [USER, says("assistant", "a"), says("assistant", "b")]) == ["a", "b"]


def test_a_template_that_escapes_still_shows_where_the_answer_stands():
    assert locate(tiny.CHATML.replace("(m['content'] or '')", "(m['content'] | tojson)"), [USER, says("assistant", 'a"b')]) == ['a\\"b']


def test_the_digits_that_stand_for_an_answer_are_never_those_of_the_text():
    digits = "735201984406173928850391"
    assert locate(tiny.CHATML, [says("user", digits + "000000"), says("assistant", digits + "000001")]) == [digits + "000001"]


CALLERS_ONLY = (
    "{% for m in messages %}{% if m['role'] == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_where_a_turn_cannot_be_replaced_what_comes_before_and_after_it_tells():
    messages = [USER, says("assistant", "a", tool_calls=[{"function": {"name": "f"}}]), says("tool", "r"), ANSWER]
    assert locate(CALLERS_ONLY, messages) == ["af<|im_end|>", "yo"]
    chat = ChatTemplate(tiny.build_tokenizer(CALLERS_ONLY))
    render = chat.for_row(None, {})
    spans = locate_turns(render(messages), messages, [1, 3], render, chat.generation_prompt({}) or "")
    assert [span.closed for span in spans] == [True, False]


def test_an_end_that_depends_on_what_was_written_is_found_by_what_comes_after():
    ends = tiny.CHATML.replace("'<|im_end|>\n'", "('<|im_end|>\n' if not m.tool_calls else '<|call|>')")
    call = says("assistant", "a", tool_calls=[{"function": {"name": "f"}}])
    assert locate(ends, [USER, call]) == ["a<|call|>"]
    assert locate(ends, [USER, call, says("tool", "r"), call, says("tool", "r"), ANSWER]) == ["a<|call|>", "a<|call|>", "yo"]


class Counting:
    """How often it rendered."""

    def __init__(self, render: Any) -> None:
        self.render, self.times = render, 0

    def __call__(self, messages: list[dict[str, Any]], *, answer: bool = False) -> str:
        self.times += 1
        return str(self.render(messages, answer=answer))


@pytest.mark.parametrize(("steps", "times"), [(0, 1), (3, 4), (30, 4)])
def test_many_tool_calls_take_no_more_renderings_than_few(steps: int, times: int):
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    messages = [USER, *[says("assistant", "", tool_calls=calls), says("tool", "r")] * steps, ANSWER]
    chat = ChatTemplate(tiny.build_tokenizer(templates.THINKING))
    render = Counting(chat.for_row(None, {}))
    text = render(messages)
    render.times = 0
    spans = locate_turns(text, messages, [*range(1, len(messages), 2)], render, chat.generation_prompt({}) or "")
    assert len({text[span.start : span.end] for span in spans[:-1]}) == min(steps, 1)
    assert render.times == times


def test_a_turn_that_cannot_be_told_apart_is_rejected_with_the_way_out():
    hidden = tiny.CHATML + "{{ messages | map(attribute='content') | join }}"
    with pytest.raises(RowRejected, match=r"message 1 does not begin where the generation prompt before it ends.*take one assistant turn per sample"):
        locate(hidden, [USER, ANSWER, USER])
    ends_otherwise = CALLERS_ONLY.replace("'<|im_end|>\n'", "'<|im_end|>' if loop.last or not m.tool_calls else '.'")
    messages = [USER, says("assistant", "a", tool_calls=[{"function": {"name": "f"}}]), says("tool", "r"), ANSWER]
    with pytest.raises(RowRejected, match=r"the template rewrites message 1 when others follow.*take one assistant turn per sample"):
        locate(ends_otherwise, messages)


def test_reasoning_against_the_template_arguments_is_rejected():
    chat = ChatTemplate(tiny.build_tokenizer(templates.THINKING))
    render = chat.for_row(None, {"enable_thinking": False})
    messages = [USER, says("assistant", "yo", reasoning_content="R")]
    with pytest.raises(RowRejected, match="does not begin where the generation prompt before it ends"):
        locate_turns(render(messages), messages, [1], render, chat.generation_prompt({"enable_thinking": False}))


def test_tags_narrow_a_turn_and_never_widen_it():
    assert narrow([Span(1, 10, 20)], [(5, 25)]) == [Span(1, 10, 20)]
    assert narrow([Span(1, 10, 20)], [(12, 15), (18, 20)]) == [Span(1, 12, 15, closed=True), Span(1, 18, 20)]
    assert narrow([Span(1, 10, 20), Span(3, 30, 30)], [(0, 9), (20, 31)]) == [Span(3, 30, 30)]


def test_tags_alone_give_the_turns_without_the_generation_prompt():
    text = "[Q]A: one\n[Q]A: two\n"
    assert tagged_turns(text, [(3, 10), (13, 20)], [1, 3], [3], "A: ") == [Span(3, 16, 19, closed=None)]
    with pytest.raises(RowRejected, match="around 1 texts, and there are 2 assistant turns"):
        tagged_turns(text, [(3, 10)], [1, 3], [3], "A: ")


class Places:
    """An encoding with tokens at these places."""

    def __init__(self, *places: tuple[int, int]) -> None:
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def token_to_chars(self, place: int) -> tuple[int, int]:
        return self.places[place]


def marked(text: str, places: list[tuple[int, int]], spans: list[Span], end_ids: set[int]) -> tuple[list[int], int]:
    """Token ids are their numbers."""
    mask, crossing = mark(spans, np.arange(len(places)), Tokens(Places(*places), text), end_ids)
    return mask.tolist(), crossing


def test_the_end_of_turn_token_behind_a_span_is_marked_with_the_white_space_before_it():
    places = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert marked("qa .\n", places, [Span(1, 1, 2)], {3}) == ([0, 1, 1, 1, 0], 0)
    assert marked("qa .\n", places, [Span(1, 1, 2)], {4}) == ([0, 1, 0, 0, 0], 0)
    assert marked("qa .\n", places, [Span(1, 1, 4, closed=True)], {3, 4}) == ([0, 1, 1, 1, 0], 0)


def test_an_empty_turn_has_only_its_end():
    assert marked("q.\n", [(0, 1), (1, 2), (2, 3)], [Span(1, 1, 1)], {1}) == ([0, 1, 0], 0)


def test_a_token_across_a_border_is_not_marked_but_counted():
    assert marked("qqaab", [(0, 1), (1, 3), (3, 4), (4, 5)], [Span(1, 2, 4)], set()) == ([0, 0, 1, 0], 1)
    assert marked("qaabb", [(0, 1), (1, 2), (2, 4), (4, 5)], [Span(1, 1, 3)], set()) == ([0, 1, 0, 0], 1)
    assert marked("qaaa.", [(0, 1), (1, 2), (2, 5)], [Span(1, 1, 4)], {2}) == ([0, 1, 0], 1)


def test_white_space_left_out_of_a_tokens_place_is_still_its_own():
    """As with byte-level tokenizers that trim: the space before the answer is the user's, and in the answer's first token."""
    assert marked("q aa", [(0, 1), (2, 3), (3, 4)], [Span(1, 2, 4)], set()) == ([0, 0, 1], 1)


def test_a_tokens_place_that_is_cut_short_is_not_given_to_the_next_token():
    """As with tokenizers that are loaded with another one's post-processor."""
    assert marked("qyo.", [(0, 1), (1, 2), (3, 4)], [Span(1, 1, 3)], {2}) == ([0, 1, 1], 0)


def test_the_parts_of_one_character_are_marked_together():
    assert marked("q🙂b", [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)], [Span(1, 1, 2)], set()) == ([0, 1, 1, 1, 0], 0)


def test_a_token_without_characters_belongs_to_what_follows_it():
    assert marked("qab", [(0, 1), (1, 1), (1, 2), (2, 2), (2, 3)], [Span(1, 1, 2)], set()) == ([0, 1, 1, 0, 0], 0)
