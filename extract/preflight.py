"""Preflight: what would otherwise be found out after hours of reading, or minutes of loading weights.

In: a Plan (the target, its layers and its tokenizer are checked there) and later how many tokens there are. Out: InputError
or DiskFull in one message, and warnings on stderr. Writes nothing, starts nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..common.errors import DiskFull, InputError
from ..common.spec import CacheSpec
from .capture import gives_hidden_states, vllm_folder
from .config import ExtractConfig
from .devices import divide_devices, visible_devices
from .document_store import DocumentStore
from .estimate import stored_share
from .plan import Plan
from .rejects import RowRejected
from .target import Target, load_config
from .template import ChatTemplate

QUESTION = {"role": "user", "content": "What is 2 + 2?"}
ANSWER = {"role": "assistant", "content": "It is 4."}


def preflight(plan: Plan) -> None:
    """Check everything that can be checked before a row is read. Raises InputError."""
    config = plan.config
    check_folder(config.cache)
    check_template_renders(plan)
    if config.engine == "vllm":
        check_capture(plan.target, config.trust_remote_code, config.engine_args.get("model_impl"))
    divide_devices(visible_devices(config.workers), config.workers, group_size(config))
    part = _stored_bytes(plan.spec, plan.spec.limits.part_tokens)
    free = free_bytes(config.cache)
    if free < part:
        warn(f"{_gb(free)} are free where {config.cache} lies; a whole part takes about {_gb(part)}")


def check_space(config: ExtractConfig, spec: CacheSpec, documents: DocumentStore, todo: Iterable[int]) -> None:
    """Compare the free space with what `todo` will take. Warns when it is less; raises DiskFull when not even one part fits."""
    answer = config.max_new_tokens if config.generate else 0
    tokens = sum(documents.rows(number, answer, config.max_length) for number in todo)
    needed, free = _stored_bytes(spec, tokens), free_bytes(config.cache)
    one = min(needed, config.workers * _stored_bytes(spec, spec.limits.part_tokens))
    at_most = "at most " if config.generate else "about "
    if free < one:
        raise DiskFull(
            "the disk has no space for even one part",
            place=f"--cache {config.cache}",
            found=f"{_gb(free)} free",
            expected=f"{_gb(one)} for a part of each process; {at_most}{_gb(needed)} for all of it",
            fix="free some space, or choose a folder on another disk",
        )
    if free < needed:
        warn(f"{_gb(free)} are free where {config.cache} lies; this extraction will take {at_most}{_gb(needed)}. It stops when the disk is full")


def check_folder(cache: Path) -> None:
    """Raise InputError when the cache's folder, or the one that it would be made in, may not be written to."""
    found = next(path for path in (cache.absolute(), *cache.absolute().parents) if os.path.lexists(path))
    if not found.is_dir() or not os.access(found, os.W_OK | os.X_OK):
        raise InputError(
            "cannot be written: " + ("it is no folder" if not found.is_dir() else "permission denied"),
            place=f"--cache {cache}",
            found=found,
            expected="a folder that this user may write to",
            fix="change its permissions, or choose another folder",
        )


def check_template_renders(plan: Plan) -> None:
    """Raise InputError when the chat template refuses a question and an answer, as every conversation has them."""
    config = plan.config
    if not plan.tokenizer.chat_template or config.data_format in ("text", "tokens"):
        return
    render = ChatTemplate(plan.tokenizer, plan.created_at, config.template_args).for_row(None, {})
    try:
        text = render([QUESTION], answer=True) if config.generate else render([QUESTION, ANSWER])
    except RowRejected as error:
        raise _template_error(str(error)) from None
    if not text.strip():
        raise _template_error("the chat template gives no text for a question and an answer")


def check_capture(target: Target, trust_remote_code: bool, implementation: object = None) -> None:
    """Raise InputError for a target whose states vLLM cannot give. vLLM says so itself, but after it has loaded the weights.

    Latent attention (MLA) shares its cache group with them, so `extract_hidden_states` supports no MLA verifier (0.25 to 0.32); other
    classes lack the interface by which it captures. implementation: the engine argument `model_impl`.
    """
    config = load_config(target.folder, trust_remote_code, f"--model {target.name}")
    text = config.get_text_config(decoder=True)
    if uses_latent_attention(text) and os.environ.get("VLLM_MLA_DISABLE", "0") != "1":
        raise InputError(
            "uses latent attention (MLA), whose hidden states vLLM does not give",
            place=f"--model {target.name}",
            found=getattr(text, "model_type", None),
            expected="a target with ordinary or hybrid attention",
            fix="set VLLM_MLA_DISABLE=1, where the model has another attention in vLLM, or use --engine transformers, which is slow",
        )
    vllm = vllm_folder()
    if vllm is None or implementation == "transformers":
        return
    for architecture in (config.architectures or [])[:1]:
        if gives_hidden_states(architecture, vllm) is False:
            raise InputError(
                "is of a class whose hidden states the installed vLLM does not give (it has no SupportsEagle3)",
                place=f"--model {target.name}",
                found=architecture,
                fix="use --engine transformers, which is slow, or another version of vLLM",
            )


def uses_latent_attention(text: Any) -> bool:
    """By the same fields of a config as vLLM: `kv_lora_rank`, or `compress_ratios` with `head_dim` (DeepSeek V4)."""
    if getattr(text, "compress_ratios", None) is not None:
        return getattr(text, "head_dim", None) is not None
    return getattr(text, "kv_lora_rank", None) is not None


def group_size(config: ExtractConfig) -> int:
    """GPUs of one engine. Raises InputError when `tensor_parallel_size` is no number of them."""
    given = config.engine_args.get("tensor_parallel_size", 1)
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise InputError("is no number of GPUs", place="--engine-arg tensor_parallel_size", found=given, expected="1 or more")
    return given


def free_bytes(path: Path) -> int:
    """On the disk on which `path` lies or will lie."""
    return shutil.disk_usage(next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())).free


def warn(text: str) -> None:
    """Say it on stderr and go on."""
    print(f"Warning: {text}", file=sys.stderr, flush=True)


def _stored_bytes(spec: CacheSpec, tokens: int) -> int:
    return round(tokens * spec.raw_bytes_per_token * stored_share(len(spec.layer_ids), spec.mantissa_bits))


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"


def _template_error(reason: str) -> InputError:
    return InputError(
        reason,
        place="the chat template of --model",
        found=f"{QUESTION['content']!r} and {ANSWER['content']!r}",
        expected="a text",
        fix="give a template with --chat-template, or what it asks for with --template-arg",
    )
