"""Served evaluation: the same prompts in vLLM with a drafter and without, and what the server itself counted.

Everything that can be known before a server starts is checked before: the drafter's folder against the target, the prompts, the
engine's arguments. In: prompts, target, exported drafter. Out: ServedResult. tau is 1 + accepted / drafts, from vLLM's own counters.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..common.errors import InputError
from .config import ServeConfig
from .conversation import Conversation
from .dataset import read_rows
from .prepare import LATER_TURNS, parse
from .prompt_sets import prompt_sources
from .rejects import Reject, RowRejected, count_reasons
from .serve_report import ServedResult, compare
from .serve_worker import ServerJob, serve
from .served_drafter import check_belongs, read_drafter, speculative_tokens
from .shapes import check_reading
from .sources import Source
from .target import read_target
from .tokens import ConversationTokenizer, eos_token_ids, load_tokenizer
from .vllm_setup import check_engine_args, model_length, on_cpu, vllm_version


@dataclass(frozen=True)
class Prompts:
    """What is served."""

    tokens: list[list[int]]
    sources: list[str]
    """Of each."""
    rejects: dict[str, int]
    """Rows that are no prompts, by reason."""
    notes: dict[str, int]
    """What happened to others."""


def evaluate_served(config: ServeConfig) -> ServedResult:
    """Serve the prompts with the drafter, then without. Raises InputError for wrong input, RunFailed when a server dies.

    The drafter's answers come first, so that the plain server can be asked how sure it is where they differ.
    """
    vllm_version()
    check_engine_args(config.engine_args)
    check_sampling(config.temperature)
    sources = prompt_sources(config.data)
    check_reading(config.data_format, config.columns, config.roles)
    drafter = read_drafter(config.drafter)
    speculative = speculative_tokens(drafter, config.num_speculative_tokens)
    target = read_target(config.model, trust_remote_code=config.trust_remote_code)
    check_belongs(drafter, target.spec, config.model)
    config = config.model_copy(update={"max_length": model_length(target, config.max_length, config.trust_remote_code)})
    tokenizer = load_tokenizer(
        target.folder, trust_remote_code=config.trust_remote_code, place=f"--model {config.model}", chat_template=config.chat_template
    )
    prompts = read_prompts(config, sources, tokenizer)
    if not prompts.tokens:
        lines = "".join(f"\n  - {count} x {reason}" for reason, count in prompts.rejects.items()) or " there is none"
        raise InputError(f"none of the rows is a prompt:{lines}", place="--data", fix="see `dflash extract --generate --preview 3` for what is read")
    job = ServerJob(config, str(target.folder), prompts.tokens, eos_token_ids(target.folder, tokenizer), speculative)
    drafted = serve(job)
    plain = None
    if config.baseline:
        compared = drafted.outputs if config.temperature == 0 else None
        plain = serve(ServerJob(config, job.model, job.prompts, job.stops, None, compared))
    return compare(config, speculative, prompts.sources, drafted, plain, prompts.rejects, prompts.notes)


def check_sampling(temperature: float) -> None:
    """Raise InputError when vLLM would sample with a drafter at a temperature that is not the one asked for.

    On the CPU it does, up to 0.32: `vllm.utils.cpu_triton_utils._expand_kernel_impl`, which gives every drafted token its request's
    temperature, writes into an int64 copy of the float32 tensor, and what divides the logits is memory that nobody filled
    (https://github.com/vllm-project/vllm/issues/55005).
    """
    if temperature > 0 and on_cpu():
        raise InputError(
            "vLLM on the CPU samples drafted tokens at a wrong temperature, so the acceptance would mean nothing",
            place=f"--temperature {temperature:g}",
            fix="serve at temperature 0, or on a GPU; what sampling would accept is expected offline: dflash eval --cache HELD-OUT --temperature T",
        )


def read_prompts(config: ServeConfig, sources: tuple[Source, ...], tokenizer: Any) -> Prompts:
    """The prompts of the rows, as tokens; those too long to leave room for an answer are rejects."""
    converter = ConversationTokenizer(tokenizer, (), config.max_length, template_args=config.template_args)
    tokens, names, rejects, notes = [], [], [], Counter[str]()
    for row in read_rows(sources, config.limit, config.seed):
        try:
            found = parse(row, config)
            if not isinstance(found.value, Conversation):
                raise RowRejected(f"a row of shape {found.shape} holds no question to answer")
            tokens.append(converter.prompt(found.value).tolist())
            names.append(row.source)
            notes[LATER_TURNS] += bool(found.value.pending)
        except RowRejected as rejected:
            rejects.append(Reject(row.source, row.number, str(rejected)))
    return Prompts(tokens, names, count_reasons(rejects), {note: count for note, count in notes.items() if count})
