"""The vLLM side of extraction: a KV connector and the worker calls that go with it. Loaded by module path in the worker.

With vLLM's `extract_hidden_states` method the wanted layers' outputs stand in a KV-cache group of their own. When a
request finishes, its blocks are kept until the worker has copied its rows (row_copies.py); `dflash_commit` then turns rows into
samples, and a process beside the worker writes them (intake_process.py). In: rows, and per document ids, mask and origin from the parent. Out: the cache.
Works on CPU and CUDA, vLLM 0.25 to 0.32. Knows nothing of engines, datasets or runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector, extract_from_kv_cache

from ..common import spec
from .cpu_sampling import repair_sampling
from .intake import check_count
from .intake_process import IntakeProcess
from .intake_worker import Offer
from .orphans import end_with_parent
from .remote_errors import describe
from .row_copies import FinishedRequest, RowCopies

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY_PARAM = "dflash_key"
"""In a request's kv_transfer_params: the document's key, hex. Requests without it are left alone."""
STORED, REJECTED, WAITING = "stored", "rejected", "waiting"
"""Answers of `dflash_commit` for one document. WAITING: its rows are not copied and checked yet, ask again."""
CACHE_LAYER = "cache_only_layers"
"""Part of the name that vLLM gives the layer that holds the states."""


@dataclass
class FinishedRequests(KVConnectorMetadata):
    """From the scheduler to the worker, once a step."""

    requests: list[FinishedRequest] = field(default_factory=list)


class CacheConnector(KVConnectorBase_V1, SupportsHMA):
    """Copies the rows of finished requests. Its extra config: cache, writer_id, feature_columns, verifier_column."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._cache = Path(extra["cache"])
        self._writer_id = int(extra["writer_id"])
        self.feature_columns: list[int] = list(extra["feature_columns"])
        self.verifier_column = int(extra["verifier_column"])
        self._group, self._block_size = _state_group(kv_cache_config)
        self._longest = int(vllm_config.model_config.max_model_len)
        if role == KVConnectorRole.SCHEDULER:
            end_with_parent()  # its workers watch it
        self._finished: list[FinishedRequest] = []  # scheduler side
        self.intake: IntakeProcess | None = None  # worker side, of the rank that writes
        self.copies: RowCopies | None = None
        self._landed: set[str] = set()
        self._seen_finished: set[str] = set()

    # ---- scheduler side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of a request of ours until the worker has copied its rows."""
        key = (request.kv_transfer_params or {}).get(KEY_PARAM)
        if key is None or request.num_computed_tokens == 0 or "ABORTED" in str(request.status):
            return False, None
        tokens = list(request.all_token_ids)[:-1]
        in_flight = int(getattr(request, "num_in_flight_tokens", 0))
        self._finished.append(FinishedRequest(request.request_id, key, tokens, request.num_computed_tokens - in_flight, list(block_ids)))
        return True, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`; only the blocks of the states' own group matter."""
        if self._group >= len(block_ids):
            return False, None
        return self.request_finished(request, block_ids[self._group])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Hand the worker what finished since the last step."""
        finished, self._finished = self._finished, []
        return FinishedRequests(finished)

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the tensor that holds the states, and on the writing rank open the cache."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        repair_sampling()
        names = [name for name in kv_caches if CACHE_LAYER in name]
        if len(names) != 1:
            raise ValueError(f"expected one layer of states in the KV cache, found {names}")
        states = kv_caches[names[0]]
        if states.dtype != torch.bfloat16:
            raise ValueError(f"the states are {states.dtype}, not bfloat16")
        if get_tensor_model_parallel_rank() == 0:
            columns = len(self.feature_columns) + (self.verifier_column not in self.feature_columns)
            width = spec.load(self._cache).hidden_size
            self.copies = RowCopies(states, self._block_size, columns, width, self._longest, extract_from_kv_cache)
            self.intake = IntakeProcess(self._cache, self._writer_id, self.copies.memory, columns, width, self.feature_columns, self.verifier_column)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Called before a step's forward pass: what finished in earlier steps is copied after their passes, and beside this one."""
        super().bind_connector_metadata(connector_metadata)
        if self.copies is not None and isinstance(connector_metadata, FinishedRequests) and connector_metadata.requests:
            self.copies.mark_written()
            self.copies.submit(connector_metadata.requests)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Rows are copied when their request has finished, not layer by layer."""

    def wait_for_save(self) -> None:
        """Rows are copied in `get_finished`."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Begin to copy the rows of requests that finished in an earlier step, and let go of blocks whose rows are copied.

        Called after the forward pass is queued, so that the engine's thread does this while the GPU works.
        """
        if self.copies is None:
            return None, None
        self.copies.advance()
        self._landed |= self.copies.landed()
        if self.intake is not None and self.intake.failed:  # the engine must go on until the parent asks and hears of it
            self._landed |= self.copies.give_up()
        self._seen_finished |= finished_req_ids
        done = self._landed & self._seen_finished
        self._landed -= done
        self._seen_finished -= done
        return done or None, None

    def get_finished_count(self) -> int:
        """One worker reports a request: the one that writes."""
        return 1

    def shutdown(self) -> None:
        """The engine closes: publish what was committed. What cannot be published now is extracted again by the next run."""
        if self.intake is not None:
            with suppress(Exception):
                self.intake.close(publish=True)
        if self.copies is not None:
            self.copies.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Whatever this version's own reader of such a cache needs; the name differs between versions."""
        layout = ExampleHiddenStatesConnector.get_required_kvcache_layout(vllm_config)
        return None if layout is None else str(layout)


def _state_group(kv_cache_config: Any) -> tuple[int, int]:
    """(index, block size in tokens) of the KV-cache group that holds the states."""
    groups = kv_cache_config.kv_cache_groups
    ours = [index for index, group in enumerate(groups) if any(CACHE_LAYER in name for name in group.layer_names)]
    if len(ours) != 1:
        raise ValueError(f"expected the states in one of {len(groups)} KV-cache groups, found them in {ours}")
    return ours[0], int(groups[ours[0]].kv_cache_spec.block_size)


class WorkerExtension:
    """Methods that vLLM adds to its worker class; called by the parent through `collective_rpc`.

    They answer in plain values (what vLLM's message format carries). An error comes back as data, so that the parent can
    raise the same error again. Workers that do not write answer None.
    """

    def dflash_commit(self, documents: Sequence[Sequence[Any]]) -> dict[str, Any] | None:
        """Store finished documents, each (key hex, input_ids int32 bytes, loss_mask bytes, source, row, top1, next token).

        Answers {"results": [[STORED | REJECTED | WAITING, reason, last verifier row as bytes]], "held_back", "counts", "error"}.
        held_back: rows wait for the writer, so that waiting for them is no sign of a broken engine.
        """
        connector = _connector()
        if connector is None or connector.intake is None:
            return None
        results: list[list[Any]] = []
        error = None
        try:
            connector.intake.check()  # with full memory nothing could be offered that would meet the error
            if connector.copies is not None:
                connector.copies.advance()  # the engine may have no further step to make
            for document in documents:
                results.append(_commit(connector, connector.intake, *document))
        except Exception as problem:
            error = describe(problem)
        held_back = connector.copies is not None and connector.copies.held_back
        return {"results": results, "held_back": held_back, "counts": connector.intake.counts(), "error": error}

    def dflash_close(self, publish: bool) -> dict[str, Any] | None:
        """Wait for the writer and publish, or drop, the pending part. Answers {"counts", "error"}."""
        connector = _connector()
        if connector is None or connector.intake is None:
            return None
        error = None
        try:
            connector.intake.close(publish=publish)
        except Exception as problem:
            error = describe(problem)
        return {"counts": connector.intake.counts(), "error": error}


def _connector() -> CacheConnector | None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    return connector if isinstance(connector, CacheConnector) else None


def _commit(
    connector: CacheConnector, intake: IntakeProcess, key: str, ids: bytes, mask: bytes, source: str, row: int, top1: int, following: int
) -> list[Any]:
    assert connector.copies is not None
    rows = connector.copies.take(key)
    if rows is None:
        return [WAITING, "", b""]
    input_ids, bits_TCH = np.frombuffer(ids, np.int32), rows.bits_TCH
    reason = check_count(len(input_ids), len(bits_TCH)) or rows.bad
    if len(rows.token_ids) == len(input_ids) and not np.array_equal(input_ids, rows.token_ids):
        reason = "the engine computed other tokens than it was given"
    if reason is not None:
        rows.release()
        return [REJECTED, reason, b""]
    last = bits_TCH[-1, connector.verifier_column].tobytes()
    intake.offer_checked(Offer(rows.offset, bytes.fromhex(key), source, row, ids, mask, top1, following), rows.release)
    return [STORED, "", last]
