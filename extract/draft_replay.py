"""Draft replay: a live engine continues given prompts one after the other, and every block that it drafts is written down.

In: the target, an exported drafter, prompts as tokens and how many tokens to answer. Out: for each prompt the answer, the drafts, and
vLLM's own counts. The engine lives in a process of its own. Not for timing: requests are served one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ..common.errors import InputError, RunFailed
from .serve_worker import read_counters
from .served_drafter import read_drafter
from .target import read_target
from .vllm_setup import EngineLog, check_engine_args, cpu_arguments, model_length, quiet_environment, vllm_version

LEAST_BATCHED_TOKENS = 2048


@dataclass(frozen=True)
class ReplayedPrompt:
    """What the engine made of one prompt."""

    tokens: list[int]
    drafts: list[list[int]] | None
    """Every block that was proposed, in order; the last may never have been verified. None when they could not be recorded."""
    steps: int
    """Verified blocks, by vLLM's counter."""
    accepted: int
    """Tokens of them that were accepted, by vLLM's counter."""


@dataclass(frozen=True)
class ReplayJob:
    """What the engine's process is given."""

    model: str
    drafter: str
    speculative: int
    max_length: int
    prompts: list[tuple[list[int], int]]
    """(prompt, tokens to answer)."""
    trust_remote_code: bool = False
    engine_args: dict[str, Any] = field(default_factory=dict)


def replay_drafts(
    model: str,
    drafter: Path,
    prompts: Sequence[tuple[list[int], int]],
    *,
    content_hash: str | None = None,
    trust_remote_code: bool = False,
    engine_args: dict[str, Any] | None = None,
) -> list[ReplayedPrompt]:
    """Serve the prompts greedily. content_hash: of the target that the cache was made with; another one is refused.

    Raises InputError for wrong input, RunFailed, with the engine's reason, when it does not start or dies.
    """
    vllm_version()
    check_engine_args(engine_args or {})
    target = read_target(model, trust_remote_code=trust_remote_code)
    if content_hash is not None and target.spec.content_hash != content_hash:
        found, fix = f"content hash {target.spec.content_hash[:16]}", "name the model that the cache was extracted from"
        raise InputError("is not the target of the cache", place=f"--model {model}", found=found, expected=content_hash[:16], fix=fix)
    found_drafter = read_drafter(drafter)
    longest = max(len(prompt) + tokens for prompt, tokens in prompts) + 4 * found_drafter.block_size  # near its end vLLM drafts no more
    job = ReplayJob(
        model=str(target.folder),
        drafter=str(drafter),
        speculative=found_drafter.most_tokens,
        max_length=model_length(target, longest, trust_remote_code),
        prompts=list(prompts),
        trust_remote_code=trust_remote_code,
        engine_args=dict(engine_args or {}),
    )
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            answer = pool.submit(_replay, job).result()
        except BrokenProcessPool:
            answer = "the engine's process ended without an answer"
    if isinstance(answer, str):
        raise RunFailed(answer, place="vLLM with the drafter", fix="set VLLM_LOGGING_LEVEL=INFO to see its own log")
    return answer


def _replay(job: ReplayJob) -> list[ReplayedPrompt] | str:
    """The body of the engine's process: answers, or the reason of a failure."""
    log = EngineLog()
    try:
        with quiet_environment(), log.capture():
            from vllm import LLM

            arguments: dict[str, Any] = {
                "model": job.model,
                "trust_remote_code": job.trust_remote_code,
                "dtype": "bfloat16",
                "seed": 0,
                "max_model_len": job.max_length,
                "max_num_batched_tokens": max(job.max_length, LEAST_BATCHED_TOKENS),  # a prompt in pieces would be drafted from at each
                "max_num_seqs": 1,
                "enable_prefix_caching": False,
                "disable_log_stats": False,
                "skip_tokenizer_init": True,
                "worker_extension_cls": f"{__package__}.draft_recorder.DraftRecorder",
                "speculative_config": {"method": "dflash", "model": job.drafter, "num_speculative_tokens": job.speculative},
            }
            llm = LLM(**{**arguments, **cpu_arguments(), **job.engine_args})
            try:
                return _serve(llm, job.prompts)
            finally:
                llm.llm_engine.engine_core.shutdown()
    except Exception as error:
        return log.reason(error)


def _serve(llm: Any, prompts: Sequence[tuple[list[int], int]]) -> list[ReplayedPrompt]:
    from vllm import SamplingParams

    recorded = any(llm.collective_rpc("dflash_record_drafts"))
    found, before = [], read_counters(llm.get_metrics())[0]
    for prompt, tokens in prompts:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        output = llm.generate([{"prompt_token_ids": prompt}], [sampling], use_tqdm=False)[0]
        taken = [drafts for drafts in llm.collective_rpc("dflash_take_drafts") if drafts] if recorded else []  # every rank has the same
        after = read_counters(llm.get_metrics())[0]
        steps, accepted = (after.get(name, 0) - before.get(name, 0) for name in ("drafts", "accepted_tokens"))
        found.append(ReplayedPrompt(list(output.outputs[0].token_ids), (taken[0] if taken else []) if recorded else None, steps, accepted))
        before = after
    return found
