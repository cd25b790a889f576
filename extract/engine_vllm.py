"""The vLLM engine: feeds documents, keeps the batch full, and asks the worker to commit what finished.

The worker (connector.py) holds the features; here only ids, the engine's top-1 token and the last verifier row pass.
`generate()` may return before the worker has gathered a request's rows, so a document is done when the worker says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..common.errors import InputError, RunFailed
from ..common.sample import NO_TOKEN
from .engine import Document, EngineJob, Outcome, WriterCounts
from .remote_errors import rebuild
from .stall import name_documents
from .turns import Turn, Turns
from .vllm_setup import EngineLog, StartLimit, check_engine_args, extraction_arguments, quiet_environment, vllm_version

LIVENESS_SECONDS = 0.5
"""How often to look whether the engine still lives while waiting for its answer."""
GATHER_SECONDS = 120.0
"""How long finished documents may wait for their rows before the engine counts as broken."""


@dataclass
class _Finished:
    """A turn whose sample is to be committed."""

    turn: Turn
    input_ids: np.ndarray
    loss_mask: np.ndarray
    engine_top1: int
    next_token: int
    answer_tokens: int = 0

    def wire(self) -> list[Any]:
        document = self.turn.document
        ids, mask = self.input_ids.astype(np.int32).tobytes(), self.loss_mask.astype(np.uint8).tobytes()
        return [document.key.hex(), ids, mask, document.source, document.source_row, self.engine_top1, self.next_token]

    def outcome(self, verifier_row: bytes) -> Outcome:
        counts = len(self.input_ids), int(self.loss_mask.sum()), self.next_token, self.engine_top1
        return self.turn.outcome(*counts, np.frombuffer(verifier_row, np.uint16), self.answer_tokens)


class VllmEngine:
    """See `engine.Engine`."""

    def __init__(self, job: EngineJob) -> None:
        """Start vLLM. Raises InputError for arguments that it does not take, RunFailed when it cannot start."""
        vllm_version()
        check_engine_args(job.config.engine_args)
        self.job = job
        self._turns = Turns(job)
        self._requests = 0
        self._counts = WriterCounts()
        self._held_back = False
        """Do rows wait for the writer, rather than for the engine?"""
        self._closed = False
        self._log = EngineLog()
        with quiet_environment():
            arguments = extraction_arguments(job)
            self._max_len = int(arguments["max_model_len"])
            self._in_flight_limit = 2 * int(arguments["max_num_seqs"])
            self._engine = self._start(arguments)

    def _start(self, arguments: dict[str, Any]) -> Any:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        try:
            engine_args = EngineArgs(**arguments)
        except TypeError as error:
            raise InputError(f"vLLM does not take this: {error}", place="--engine-arg", fix="see `vllm serve --help` for its arguments") from None
        limit = StartLimit()
        try:
            with self._log.capture(), limit:
                return LLMEngine.from_engine_args(engine_args)
        except Exception as error:
            what = f"vLLM did not start within {limit.seconds:.0f} s and was ended" if limit.passed else "vLLM could not start"
            raise self._failed(what, error) from error

    def run(self, documents: Iterable[Document]) -> Iterator[list[Outcome]]:
        """See `engine.Engine`."""
        upcoming = iter(documents)
        running: dict[str, Turn] = {}
        waiting: list[_Finished] = []
        waiting_since = time.monotonic()
        exhausted = False
        while True:
            refused: list[Outcome] = []
            while not exhausted and len(running) < self._in_flight_limit:
                document = next(upcoming, None)
                if document is None:
                    exhausted = True
                    break
                refused += self._submit(self._turns.first(document), running)
            if refused:
                yield refused
            if not running and not waiting:
                if exhausted:
                    return
                continue
            answered = self._step(running)
            finished = [self._finish(turn, output) for turn, output in answered if turn.stored]
            if self.job.config.generate and answered:
                yield [outcome for turn, output in answered for outcome in self._go_on(turn, output, running)]
            if finished or not waiting or self._held_back:
                waiting_since = time.monotonic()
            waiting, outcomes = self._commit([*waiting, *finished])
            if outcomes:
                waiting_since = time.monotonic()
                yield outcomes
            elif waiting and not running:
                if time.monotonic() - waiting_since > GATHER_SECONDS:
                    raise RunFailed(
                        f"vLLM finished {len(waiting)} documents but did not give their rows within {GATHER_SECONDS:.0f} s",
                        place="vLLM",
                        found=f"the oldest: {name_documents(item.turn.document for item in waiting)}",
                    )
                time.sleep(0.002)  # the engine gathers them in its next step, which it makes by itself

    def _submit(self, turn: Turn, running: dict[str, Turn]) -> list[Outcome]:
        """Queue one turn; the outcomes when vLLM refuses it."""
        self._requests += 1
        reason = self._request(str(self._requests), turn)
        if reason is not None:
            return self._turns.refuse(turn, reason)
        running[str(self._requests)] = turn
        return []

    def _go_on(self, turn: Turn, output: Any, running: dict[str, Turn]) -> list[Outcome]:
        """Queue the next turn of an answered one's conversation at once, so that the batch stays full; the outcomes when there is none."""
        following = self._turns.following(turn, np.asarray(output.outputs[0].token_ids, np.int32))
        return self._submit(following, running) if isinstance(following, Turn) else following

    def _request(self, request_id: str, turn: Turn) -> str | None:
        """Queue one request; the reason when vLLM refuses it. One without a key is not captured."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from .connector import KEY_PARAM

        document = turn.document
        config, length = self.job.config, len(document)
        room = self._max_len - length
        if room < 1:
            return f"it has {length} tokens; this model in vLLM takes {self._max_len - 1}"
        parameters: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}
        if config.generate:
            answer = min(config.max_new_tokens, config.max_length - length, room)
            parameters = {
                "max_tokens": answer,
                "temperature": config.temperature,
                "top_p": config.top_p,
                "top_k": config.top_k,
                "seed": int.from_bytes(document.key[:4], "little") ^ config.seed if config.temperature else None,
                "stop_token_ids": list(self.job.stop_token_ids),
            }
        sampling = SamplingParams(
            **parameters,
            logprobs=1,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": {KEY_PARAM: document.key.hex()}} if turn.stored else None,
        )
        try:
            self._engine.add_request(request_id, {"type": "token", "prompt_token_ids": document.input_ids.tolist()}, sampling)
        except ValueError as error:
            return f"vLLM refused it: {str(error).strip().splitlines()[0]}"
        except Exception as error:
            raise self._failed("vLLM died", error) from error
        return None

    def _step(self, running: dict[str, Turn]) -> list[tuple[Turn, Any]]:
        """Let the engine work until it has something to say; the turns that finished, with vLLM's output."""
        if not running:
            if not _in_own_process(self._engine):
                self._engine.step()
            return []
        try:
            outputs = self._engine.step()
        except Exception as error:
            raise self._failed("vLLM died", error) from error
        return [(running.pop(output.request_id), output) for output in outputs if output.finished]

    def _finish(self, turn: Turn, output: Any) -> _Finished:
        completion = output.outputs[0]
        top1 = _top_token(completion.logprobs[-1])
        if not self.job.config.generate:
            return _Finished(turn, turn.document.input_ids, turn.document.loss_mask, top1, NO_TOKEN)
        rows, mask, following = turn.rows(np.asarray(completion.token_ids, np.int32))
        return _Finished(turn, rows, mask, top1, following, len(completion.token_ids))

    def _commit(self, finished: list[_Finished]) -> tuple[list[_Finished], list[Outcome]]:
        """(still waiting for their rows, outcomes)."""
        if not finished:
            return [], []
        from .connector import STORED, WAITING

        answer = self._ask("dflash_commit", [item.wire() for item in finished])
        self._held_back = bool(answer["held_back"])
        waiting, outcomes = [], []
        for item, (status, reason, verifier_row) in zip(finished, answer["results"], strict=True):
            if status == WAITING:
                waiting.append(item)
            elif status == STORED:
                outcomes.append(item.outcome(verifier_row))
            else:
                outcomes.append(item.turn.rejected(reason, item.answer_tokens))
        return waiting, outcomes

    def _ask(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call the writing worker. Raises the error that it met as that same error."""
        try:
            answers = _call(self._engine, method, arguments)
        except Exception as error:
            raise self._failed("vLLM died", error) from error
        answer: dict[str, Any] = next(answer for answer in answers if answer is not None)
        self._counts = WriterCounts(**answer["counts"])
        if answer["error"] is not None:
            raise rebuild(answer["error"])
        return answer

    def counts(self) -> WriterCounts:
        """See `engine.Engine`."""
        return self._counts

    def close(self, *, publish: bool) -> WriterCounts:
        """See `engine.Engine`."""
        if self._closed:
            return self._counts
        self._closed = True
        try:
            self._ask("dflash_close", publish)
        finally:
            with suppress(Exception):
                self._engine.engine_core.shutdown()
            self._log.close()
        return self._counts

    def _failed(self, what: str, error: Exception) -> RunFailed:
        fix = "set VLLM_LOGGING_LEVEL=INFO to see its own log; published parts are kept, and the same command continues"
        return RunFailed(f"{what}: {self._log.reason(error)}", place="vLLM", fix=fix)


def _in_own_process(engine: Any) -> bool:
    return type(engine.engine_core).__name__ != "InprocClient"


def _call(engine: Any, method: str, arguments: tuple[Any, ...]) -> list[Any]:
    """`collective_rpc` that notices when the engine is gone; vLLM's own waits for ever then, as after Ctrl-C."""
    manager = getattr(getattr(engine.engine_core, "resources", None), "engine_manager", None)
    processes = getattr(manager, "processes", None)
    if not processes:
        return list(engine.collective_rpc(method, args=arguments))
    answer: list[Any] = []

    def ask() -> None:
        try:
            answer.append(engine.collective_rpc(method, args=arguments))
        except Exception as error:
            answer.append(error)

    caller = threading.Thread(target=ask, daemon=True)
    caller.start()
    while caller.is_alive() and any(process.is_alive() for process in processes):
        caller.join(LIVENESS_SECONDS)
    caller.join(LIVENESS_SECONDS)  # an answer given just before the end
    if not answer:
        raise RunFailed("its process has ended")
    if isinstance(answer[0], Exception):
        raise answer[0]
    return list(answer[0])


def _top_token(logprobs: dict[int, Any]) -> int:
    """The most likely token of one step, whatever was sampled."""
    return int(max(logprobs, key=lambda token: logprobs[token].logprob))
