"""Finding: one thing that is wrong, or worth knowing, in an exported folder, and what each engine makes of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
NOT_READ = "does not read this format"
AS_IT_STANDS = "takes it as it stands, without a word"


@dataclass(frozen=True)
class Finding:
    """One finding."""

    code: str
    """Short name of the rule, for scripts."""
    severity: Severity
    """error: some engine refuses the folder or drafts wrongly. warning: probably wrong, or engines differ. note: worth knowing."""
    place: str
    """File, field or tensor."""
    problem: str
    found: str
    expected: str
    vllm: str
    """What vLLM 0.32 does."""
    sglang: str
    """What SGLang does."""
    reference: str
    """What the reference implementation, `dflash` 0.1.0, does."""

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)

    def to_text(self) -> str:
        """For people."""
        lines = [f"{self.severity:8} {self.place}: {self.problem}  [{self.code}]"]
        rows = [("found", self.found), ("expected", self.expected), ("vLLM", self.vllm), ("SGLang", self.sglang), ("reference", self.reference)]
        return "\n".join([*lines, *(f"           {name + ':':10} {text}" for name, text in rows if text)])
