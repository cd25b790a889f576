from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import templates
import tiny_target as tiny

from dflash_cache.common.errors import InputError
from dflash_cache.extract.rejects import RowRejected
from dflash_cache.extract.template import ChatTemplate, chat_template_hash, check_template, read_template, unused_digits

ASKED: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "yo"}]
ARGUMENTS = "{{ style | default('none') }}|{{ mood | default('none') }}|{{ tools | length if tools else 0 }}|" + tiny.CHATML


def chat(template: str | dict[str, str] | None, **options: Any) -> ChatTemplate:
    tokenizer = tiny.build_tokenizer(None)
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer, **options)


def test_a_rows_arguments_win_over_those_of_all_rows_and_both_are_in_every_rendering():
    render = chat(ARGUMENTS, template_args={"style": "plain", "mood": "calm"}).for_row([{"name": "f"}], {"mood": "glad"})
    assert render(ASKED).startswith("plain|glad|1|")
    assert render(ASKED, answer=True).startswith("plain|glad|1|")
    assert render(ANSWERED, template=ARGUMENTS + "!").startswith("plain|glad|1|")


def test_the_text_is_the_tokenizers_own():
    template = chat(templates.THINKING)
    tools = [{"type": "function", "function": {"name": "f"}}]
    theirs = template.tokenizer.apply_chat_template(ANSWERED, tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert template.for_row(tools, {"enable_thinking": False})(ANSWERED, answer=True) == theirs


def test_the_date_can_be_fixed():
    template = chat("{{ strftime_now('%d %b %Y') }}", now=datetime(2020, 2, 3))
    assert template.for_row(None, {})(ASKED) == "03 Feb 2020"


def test_a_template_that_refuses_rejects_the_row_with_its_own_words():
    with pytest.raises(RowRejected, match="the chat template refused it: roles must alternate"):
        chat("{{ raise_exception('roles must alternate') }}").for_row(None, {})(ASKED)


@pytest.mark.parametrize("name", ["tools", "tokenize", "chat_template", "add_generation_prompt", "return_dict", "continue_final_message"])
def test_what_is_not_the_templates_cannot_be_its_argument(name: str):
    with pytest.raises(InputError, match=f"--template-arg {name}: is no argument of the chat template"):
        chat(tiny.CHATML, template_args={name: 1})


@pytest.mark.parametrize(
    ("template", "arguments", "prompt"),
    [
        (tiny.CHATML, {}, "<|im_start|>assistant\n"),
        (templates.THINKING, {}, "<|im_start|>assistant\n"),
        (templates.THINKING, {"enable_thinking": False}, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        (templates.INSTRUCT, {}, ""),
        (templates.NO_PROMPT, {}, ""),
        ("{{ raise_exception('never') }}", {}, None),
        (tiny.CHATML + "{{ messages | length }}", {}, None),
    ],
)
def test_the_generation_prompt_is_what_asking_adds(template: str, arguments: dict[str, Any], prompt: str | None):
    assert chat(template).generation_prompt(arguments) == prompt


def test_generation_prompts_of_different_arguments_are_kept_apart():
    template = chat(templates.THINKING, template_args={"enable_thinking": False})
    assert template.generation_prompt({}) == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert template.generation_prompt({"enable_thinking": True}) == "<|im_start|>assistant\n"


# --- generation tags


def spans(template: str, messages: list[dict[str, Any]]) -> list[str] | None:
    render = chat(template).for_row(None, {})
    text = render(messages)
    found = render.generation_spans(messages, text)
    return None if found is None else [text[start:end] for start, end in found]


def test_tags_give_the_text_between_them():
    assert spans(templates.TAGGED, [*ANSWERED, *ANSWERED]) == ["yo", "yo"]
    assert spans(templates.TAGGED_WIDE, ANSWERED) == ["<|im_start|>assistant\n<think>\n\n</think>\n\nyo<|im_end|>\n"]


def test_a_template_without_tags_has_no_tagged_text_rather_than_an_empty_one():
    assert spans(tiny.CHATML, ANSWERED) is None
    assert spans(templates.TAGGED, ASKED) == []


@pytest.mark.parametrize("template", [templates.TAGGED, templates.TAGGED_WIDE])
def test_tags_are_where_transformers_puts_its_assistant_mask(template: str):
    """One token a byte, so that its mask says which characters."""
    built = chat(template)
    messages = [*ANSWERED, {"role": "user", "content": "<|im_start|>assistant\nno"}, {"role": "assistant", "content": "c d"}]
    render = built.for_row(None, {})
    text = render(messages)
    theirs = built.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    marked = [(built.tokenizer.decode(run), run) for run in _runs(theirs["input_ids"], theirs["assistant_masks"])]
    found = render.generation_spans(messages, text)
    assert found is not None
    assert [said for said, _ in marked] == [text[start:end] for start, end in found]


def _runs(ids: list[int], mask: list[int]) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for token, inside in zip(ids, mask, strict=True):
        if inside:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def test_tags_in_a_macro_are_followed():
    """transformers gives places in the macro's own text there."""
    macro = "{% macro say(m) %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}"
    assert spans(macro, ANSWERED) == ["hi", "yo"]


@pytest.mark.parametrize(("left", "right"), [("", ""), ("-", "-"), ("-", ""), ("", "-")])
def test_tags_that_trim_white_space_trim_as_ever(left: str, right: str):
    template = (
        f"{{% for m in messages %}}A \n  {{%{left} generation {right}%}}\n {{{{ m.content }}}} \n{{%{left} endgeneration {right}%}}\n B{{% endfor %}}"
    )
    found = spans(template, ASKED)
    assert found is not None
    assert [text.strip() for text in found] == ["hi"]


def test_tags_that_cannot_be_followed_reject_the_row():
    counted = "{% set said %}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{% endset %}{{ said | length }}"
    with pytest.raises(RowRejected, match="generation tags cannot be followed"):
        spans(counted, ANSWERED)


# --- where templates come from


def test_a_template_is_a_file_or_the_text_itself(tmp_path: Path):
    (tmp_path / "own.jinja").write_text(tiny.CHATML)
    assert read_template(tmp_path / "own.jinja") == tiny.CHATML
    assert read_template(str(tmp_path / "own.jinja")) == tiny.CHATML
    assert read_template(tiny.CHATML) == tiny.CHATML
    with pytest.raises(InputError, match=r"--chat-template: cannot be read: .*No such file"):
        read_template(tmp_path / "other.jinja")


def test_a_template_that_is_no_jinja_is_refused_with_its_line():
    tokenizer = tiny.build_tokenizer("{# one #}\n{% for m in messages %}\n{{ m.content }")
    with pytest.raises(InputError, match=re.compile(r"--chat-template: the chat template is no valid Jinja: .*found: +line 3", re.S)):
        check_template(tokenizer, "--chat-template")
    tokenizer.chat_template = {"default": tiny.CHATML, "tool_use": "{% if %}"}
    with pytest.raises(InputError, match="the chat template tool_use is no valid Jinja"):
        check_template(tokenizer, "--model")


@pytest.mark.parametrize("template", [tiny.CHATML, templates.TAGGED, "{{ raise_exception('one message is not enough') }}"])
def test_a_template_that_refuses_a_single_question_is_still_one(template: str):
    check_template(tiny.build_tokenizer(template), "--model")


def test_of_named_templates_the_one_for_tools_is_taken_when_there_are_tools():
    named = chat({"default": "default", "tool_use": "tools {% generation %}{% endgeneration %}"})
    assert named.for_row(None, {})(ASKED) == "default"
    assert named.for_row([{"name": "f"}], {})(ASKED) == "tools "
    assert named.for_row(None, {}).generation_spans(ASKED, "default") is None
    assert named.for_row([{"name": "f"}], {}).generation_spans(ASKED, "tools ") == [(6, 6)]


def test_the_hash_is_the_templates_wherever_it_comes_from():
    def hashed(template: Any) -> str:
        return chat_template_hash(chat(template).tokenizer)

    assert hashed(tiny.CHATML) == hashed(str(tiny.CHATML))
    assert len({hashed(each) for each in (None, tiny.CHATML, tiny.CHATML_BOS, {"default": tiny.CHATML}, {"default": tiny.CHATML_BOS})}) == 5


def test_without_a_template_a_conversation_is_the_users_error():
    with pytest.raises(InputError, match=r"no chat template(.|\n)*give a template with --chat-template, or rows of plain text or tokens"):
        chat(None).for_row(None, {})


def test_unused_digits_do_not_occur_in_the_text():
    taken = unused_digits("")
    assert unused_digits(f"a{taken}b") not in f"a{taken}b"
    assert len(unused_digits(taken)) == len(taken)
