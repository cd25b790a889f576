"""DraftRecorder: what a serving engine really drafts, kept as it drafts it.

Mixed into vLLM's worker class by name (`worker_extension_cls`); called through `collective_rpc`. In: nothing. Out: the drafted tokens of
every proposal since the last question. vLLM's own counters say only how many tokens were accepted. Imports no vLLM.
"""

from __future__ import annotations

from typing import Any


class DraftRecorder:
    """Wraps the proposer of the worker's model runner: `drafter` in the first runner, `speculator` in the second."""

    model_runner: Any

    def dflash_record_drafts(self) -> bool:
        """Begin to record. False where this worker drafts nothing, or keeps its proposer elsewhere."""
        proposer = getattr(self.model_runner, "drafter", None) or getattr(self.model_runner, "speculator", None)
        if proposer is None or not hasattr(proposer, "propose"):
            return False
        self._dflash_drafts: list[list[int]] = []
        propose, kept = proposer.propose, self._dflash_drafts

        def recording(*arguments: Any, **options: Any) -> Any:
            drafted = propose(*arguments, **options)
            kept.extend(drafted.tolist())  # at once: the second runner's answer is a view of a buffer that it fills again
            return drafted

        proposer.propose = recording
        return True

    def dflash_take_drafts(self) -> list[list[int]]:
        """The drafts so far, and forget them."""
        kept = getattr(self, "_dflash_drafts", [])
        taken = list(kept)
        kept.clear()
        return taken
