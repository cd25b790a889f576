"""Chat templates in the manner of well-known ones, each with a plain Python twin that says which of its text the target writes.

A twin is the slow, obvious reading of its template: it gives the text in pieces, and of each piece whether it is learned from.
Two tokenizers, trained here on a few words: byte-level pieces as in GPT-2, and pieces with a `▁` for the space as in Llama 2.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]
Pieces = list[tuple[str, bool]]

SPECIAL = ("<bos>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|sep|>", "<|eot|>", "<s>", "</s>", "[INST]", "[/INST]")

SYSTEM_DEFAULT = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML with a system prompt of its own, as SmolLM2 has."""

THINKING = """\
{%- if tools %}{{- '<|im_start|>system\n# Tools' }}{% for tool in tools %}{{- '\n' + (tool | tojson) }}{% endfor %}{{- '<|im_end|>\n' }}{% endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for m in messages %}{% if m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content %}{% set thought = (m.reasoning_content or '').strip('\n') %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\n' + thought + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\n' }}{% endif %}
            {{- '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
"""As Qwen3's: thoughts only after the last question, an empty one in the last turn, tool results in user turns."""

TRIMS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '<|sep|>\n\n' + m['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|sep|>\n\n' }}{% endif %}"
)
"""As Llama 3's: contents are trimmed, and nothing stands behind the end-of-turn token."""

INSTRUCT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'].strip() + ' </s>' }}"
    "{% else %}{{ raise_exception('only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
"""As Llama 2's: no generation prompt, a space before the answer and one behind it."""

TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Tags around the content, without the end-of-turn token."""

TAGGED_WIDE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
)
"""As SmolLM3's: tags around the whole turn, header, empty thought and new line included."""

NO_THOUGHT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
)
"""The generation prompt ends in an empty thought."""

OPENS_THOUGHT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""The generation prompt opens a thought, which a row may bring in its content or not."""

NO_PROMPT = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
"""ChatML from before there were generation prompts."""


def _chatml(messages: Messages) -> Pieces:
    pieces: Pieces = []
    for m in messages:
        pieces += [(f"<|im_start|>{m['role']}\n", False), (m["content"] + "<|im_end|>", m["role"] == "assistant"), ("\n", False)]
    return pieces


def _system_default(messages: Messages) -> Pieces:
    own = messages[0]["role"] == "system"
    return ([] if own else [("<|im_start|>system\nYou are helpful.<|im_end|>\n", False)]) + _chatml(messages)


def _is_tool_response(content: str) -> bool:
    return content.startswith("<tool_response>") and content.endswith("</tool_response>")


def _thinking(messages: Messages) -> Pieces:
    pieces: Pieces = []
    asked = [i for i, m in enumerate(messages) if m["role"] == "user" and not _is_tool_response(m["content"])]
    last = asked[-1] if asked else len(messages) - 1
    for i, m in enumerate(messages):
        if m["role"] == "tool":
            first, final = messages[i - 1]["role"] != "tool", i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            wrapped = "\n<tool_response>\n" + m["content"] + "\n</tool_response>"
            pieces.append(("<|im_start|>user" * first + wrapped + "<|im_end|>\n" * final, False))
            continue
        if m["role"] != "assistant":
            pieces.append((f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n", False))
            continue
        content, thought = m["content"], (m.get("reasoning_content") or "").strip("\n")
        if not thought and "</think>" in content:
            thought, content = content.split("</think>")[0].split("<think>")[-1].strip("\n"), content.split("</think>")[-1].lstrip("\n")
        pieces.append(("<|im_start|>assistant\n", False))
        if i > last and (thought or i + 1 == len(messages)):
            pieces.append((f"<think>\n{thought}\n</think>\n\n", bool(thought)))
            calls, content = content, content.lstrip("\n")
        else:
            calls = content
        written = content
        for number, call in enumerate(m.get("tool_calls", [])):
            written += "\n" * bool(number or calls) + "<tool_call>\n" + json.dumps(call["function"], ensure_ascii=False) + "\n</tool_call>"
        pieces += [(written + "<|im_end|>", True), ("\n", False)]
    return pieces


def _trims(messages: Messages) -> Pieces:
    pieces: Pieces = [("<bos>", False)]
    for m in messages:
        pieces += [(f"<|start|>{m['role']}<|sep|>\n\n", False), (m["content"].strip() + "<|eot|>", m["role"] == "assistant")]
    return pieces


def _instruct(messages: Messages) -> Pieces:
    said = {"user": "<s>[INST] {} [/INST]", "assistant": " {} </s>"}
    return [(said[m["role"]].replace("{}", m["content"].strip()), m["role"] == "assistant") for m in messages]


def _no_thought(messages: Messages) -> Pieces:
    pieces: Pieces = []
    for m in messages:
        mine = m["role"] == "assistant"
        head = f"<|im_start|>{m['role']}\n" + "<think>\n\n</think>\n\n" * mine
        pieces += [(head, False), (m["content"] + "<|im_end|>", mine), ("\n", False)]
    return pieces


def _opens_thought(messages: Messages) -> Pieces:
    pieces: Pieces = []
    for m in messages:
        mine, said = m["role"] == "assistant", m["content"] + "<|im_end|>"
        opened = "<think>\n" if mine and said.startswith("<think>\n") else ""
        pieces += [(f"<|im_start|>{m['role']}\n{opened}", False), (said.removeprefix(opened), mine), ("\n", False)]
    return pieces


TWINS: dict[str, tuple[str, Callable[[Messages], Pieces]]] = {
    "system_default": (SYSTEM_DEFAULT, _system_default),
    "thinking": (THINKING, _thinking),
    "trims": (TRIMS, _trims),
    "instruct": (INSTRUCT, _instruct),
    "tagged": (TAGGED, _chatml),
    "tagged_wide": (TAGGED_WIDE, _no_thought),
    "no_thought": (NO_THOUGHT, _no_thought),
    "opens_thought": (OPENS_THOUGHT, _opens_thought),
    "no_prompt": (NO_PROMPT, _chatml),
}
"""Each template and its twin: messages to pieces (text, learned from?)."""

WORDS = [
    "system user assistant hello there, what is it? The answer is forty two.",
    "<think>\nOkay, let me see.\n</think>\n\nYes.  Two  spaces,\n\n\nthree lines. {}[] 0123456789 don't won't",
    "user\n\nassistant\nYou are helpful. hi yo ho no so go",
]


def pieces_tokenizer(template: str | None = None) -> Any:
    """Byte-level BPE with GPT-2's words, 300 merges; white space merges across the borders of turns where nothing stops it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(WORDS * 9, trainers.BpeTrainer(vocab_size=560, initial_alphabet=alphabet, show_progress=False))
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<|im_end|>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = template
    return tokenizer


def spaces_tokenizer(template: str | None = None, *, prepend_bos: bool = True) -> Any:
    """BPE over whole texts with `▁` for the space, one put before each text, bytes for what it does not know; adds <s> unless told not to."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    taught = Tokenizer(models.BPE())
    taught.normalizer = spaces
    taught.train_from_iterator(WORDS * 9, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(taught.to_str())["model"]
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for token in model["vocab"]:
        vocab.setdefault(token, len(vocab))
    merges = [tuple(pair) for pair in model["merges"]]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = spaces
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if prepend_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = template
    return tokenizer
