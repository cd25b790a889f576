"""Lint: faults of an exported folder, of any origin, before a server meets them.

In: a folder, and the target's folder or a cache of it to hold it against. Out: a LintReport, errors first. The rules are in
`lint_config`, `lint_layers` and `lint_tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.errors import InputError
from . import lint_config, lint_layers, lint_tensors
from .lint_finding import Finding
from .lint_folder import DrafterFiles, read_folder, target_of_cache, target_of_folder

RULES: tuple[Callable[[DrafterFiles], Iterator[Finding]], ...] = (
    lint_config.form,
    lint_config.sizes,
    lint_config.attention,
    lint_config.rotary,
    lint_config.speculators_fields,
    lint_layers.layer_ids,
    lint_layers.depth,
    lint_layers.block,
    lint_layers.mask_token,
    lint_layers.target,
    lint_tensors.names_and_shapes,
    lint_tensors.types,
    lint_tensors.values,
    lint_tensors.vocabulary,
)
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class LintReport:
    """What was found in a folder."""

    folder: Path
    format: str
    """zlab or speculators."""
    target: str | None
    """What it was held against."""
    num_tensors: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """No errors."""
        return not any(finding.severity == "error" for finding in self.findings)

    def count(self, severity: str) -> int:
        """Findings of a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        counts = {f"{severity}s": self.count(severity) for severity in SEVERITIES}
        document = {"folder": str(self.folder), "format": self.format, "target": self.target, "tensors": self.num_tensors, "ok": self.ok}
        return {**document, **counts, "findings": [finding.to_dict() for finding in self.findings]}

    def to_text(self) -> str:
        """For people."""
        against = f"held against {self.target}" if self.target else "not held against its target (--model or --cache)"
        counts = ", ".join(f"{self.count(severity)} {severity}s" for severity in SEVERITIES)
        return "\n".join(
            [*(finding.to_text() for finding in self.findings), f"{self.folder}: {self.format}, {self.num_tensors} tensors, {against}: {counts}"]
        )


def lint(folder: Path, model: Path | None = None, cache: Path | None = None) -> LintReport:
    """Look at `folder`. model: the target's folder; cache: of that target. Raises InputError when there is no config.json to look at."""
    if model is not None and cache is not None:
        raise InputError("hold it against one target, not two", place="--model, --cache", fix="leave one out")
    target = target_of_folder(model) if model is not None else target_of_cache(cache) if cache is not None else None
    it = read_folder(folder, target)
    found = [finding for rule in RULES for finding in rule(it)]
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return LintReport(folder, it.format, target.place if target else None, len(it.tensors), tuple(found))
