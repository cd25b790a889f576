"""Proves a cache: every byte against its digest, every chunk against its checksum, every count, and teacher fidelity.

In: a cache folder. Out: a VerifyReport that lists every problem with its place; it stops at none. Reads all of the cache.
Teacher fidelity: from the stored state of each sample's last row, argmax(lm_head(final_norm(h))) must be the token that
the engine itself predicted there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..common import layout, manifest, planes, spec, target_folder
from ..common.agreement import MAX_DISAGREEMENT, too_many
from ..common.errors import CacheDamaged, InputError
from ..common.fingerprint import digest_file
from ..common.manifest import PartManifest
from ..common.progress import ProgressBar
from ..common.small_arrays import read_small
from ..common.spec import CacheSpec
from .reader import CacheReader
from .targets import find, scan
from .teacher_targets import TeacherTargets
from .verify_report import Problem, VerifyReport

if TYPE_CHECKING:
    from .fidelity import Agreement, TeacherCheck

NAMED_CHUNKS = 4
"""Damaged chunks of one layer that are named one by one."""
MAX_REJECT_BYTES = 1 << 20
"""A longer line of the list of rejects is none; the file itself may have any size."""
DATA_TOKENS = 20_000
"""Supervised tokens, spread over the cache, on which the teacher is compared with the data."""


def verify(cache: Path, *, teacher: bool = True) -> VerifyReport:
    """Check all of `cache`; `teacher` False leaves out fidelity (the only step that needs torch).

    Raises InputError when it is no cache, CacheDamaged when cache.json itself cannot be read; all else is reported.
    """
    found = spec.load(cache)
    report = VerifyReport(str(cache))
    check = None
    try:
        target_folder.check(cache)
        if teacher:
            from .fidelity import TeacherCheck

            check = TeacherCheck(cache)
    except (CacheDamaged, InputError) as error:
        report.add(error, layout.TARGET if isinstance(error, CacheDamaged) else "")
    _check_rejects(cache, report)
    try:
        parts, odd = manifest.scan_parts(cache)
    except CacheDamaged as error:
        report.add(error, "")
        return report
    for path in odd:
        report.add(CacheDamaged("is no part", place=str(path), expected="only folders named NNNNNNNN-WWWW, no links"), f"{layout.PARTS}/{path.name}")
    if not parts:
        report.problems.append(Problem(str(cache), "holds no samples yet"))
    keys: dict[bytes, str] = {}
    sound: dict[str, PartManifest] = {}
    with ProgressBar("verify", total=len(parts)) as bar:
        for part in parts:
            entry = f"{layout.PARTS}/{part.name}"
            try:
                part_manifest = manifest.load(part, found)
            except CacheDamaged as error:
                report.add(error, entry)
                bar.update(1)
                continue
            before = len(report.problems)
            for damage in _check_part(part, part_manifest, found, report, keys):
                report.add(damage, entry)
            if len(report.problems) == before:
                sound[part.name] = part_manifest
                if check is not None:
                    _check_teacher(part, part_manifest, check, report)
            bar.update(1, f"{report.bytes_read / 1e9:.2f} GB")
    _check_targets(cache, found, sound, report)
    if report.tokens and check is not None and report.ok:
        _compare_with_data(cache, check, report)
    total = report.fidelity_exact + report.fidelity_near_ties + report.fidelity_different
    if report.fidelity is not None and too_many(report.fidelity_different, total):
        report.problems.append(
            Problem(
                str(cache),
                f"the stored states do not give the tokens that the engine predicted ({report.fidelity:.1%} agree, expected {1 - MAX_DISAGREEMENT:.0%} or more): "
                "wrong layer, norm applied twice, or another target's head",
            )
        )
    return report


def _check_rejects(cache: Path, report: VerifyReport) -> None:
    path = cache / layout.REJECTS
    if not os.path.lexists(path):
        return
    try:
        if path.is_symlink() or not path.is_file():
            raise ValueError("it is no plain file")
        with open(path, "rb") as file:
            while line := file.readline(MAX_REJECT_BYTES):
                reject = json.loads(line)
                if not isinstance(reject, dict) or set(reject) != {"source", "row", "reason"}:
                    raise ValueError("a line is no reject")
    except (OSError, ValueError, RecursionError) as error:
        report.add(CacheDamaged(f"is no list of rejects: {error}", place=str(path)), layout.REJECTS)


def _check_targets(cache: Path, found: CacheSpec, sound: dict[str, PartManifest], report: VerifyReport) -> None:
    """Targets of parts that are sound; those of another part of that name are stale, which harms nothing."""
    groups, odd = scan(cache)
    for path in odd:
        report.add(CacheDamaged("is no group of targets", place=str(path)), path.relative_to(cache).as_posix())
    for path in groups:
        try:
            targets = find(path)
            part = sound.get(path.name)
            if part is None or part.digest != targets.manifest.part_digest:
                report.stale_targets += 1
                continue
            reader = CacheReader.of_part(cache / layout.PARTS / path.name, part, found)
            TeacherTargets(reader, targets.manifest.head).is_whole(0)
        except CacheDamaged as error:
            report.add(error, path.relative_to(cache).as_posix())
            continue
        report.targets += 1
        report.bytes_read += targets.stored_bytes


def _check_part(part: Path, found: PartManifest, cache: CacheSpec, report: VerifyReport, keys: dict[bytes, str]) -> Iterator[CacheDamaged]:
    report.parts += 1
    report.samples += found.samples
    report.tokens += found.tokens
    for name, entry in found.files.items():
        try:
            size, digest = digest_file(part / name)
        except OSError as error:
            yield CacheDamaged(f"cannot be read: {error.strerror}", place=str(part / name))
            continue
        report.bytes_read += size
        if digest != entry.xxh3_128:
            yield CacheDamaged("the file's digest does not match", place=str(part / name))
    yield from _check_metadata(part, found, cache)
    yield from _check_chunks(part, found, cache, report)
    columns: dict[str, np.ndarray] = {}
    for name in manifest.SMALL_ARRAYS:
        try:
            columns[name] = read_small(part, found, cache, name)
        except CacheDamaged as error:
            yield error
    if len(columns) == len(manifest.SMALL_ARRAYS):
        yield from _check_columns(part, found, cache, columns, keys)


def _check_metadata(part: Path, found: PartManifest, cache: CacheSpec) -> Iterator[CacheDamaged]:
    layers, width = len(cache.layer_ids), cache.hidden_size
    packed = width // 2 if cache.mantissa_bits == planes.PACKED_BITS else width
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        f"{layout.HIDDEN_STATES}/{layout.EXPONENT}": ((found.tokens, layers, width), "uint8"),
        f"{layout.HIDDEN_STATES}/{layout.SIGN_MANTISSA}": ((found.tokens, layers, packed), "uint8"),
        f"{layout.VERIFIER}/{layout.EXPONENT}": ((found.tokens, width), "uint8"),
        f"{layout.VERIFIER}/{layout.SIGN_MANTISSA}": ((found.tokens, width), "uint8"),
        **found.small_arrays(cache),
    }
    for name, (shape, dtype) in shapes.items():
        path = part / name / layout.ZARR_JSON
        try:
            document = spec.read_json(path)
        except CacheDamaged as error:
            yield error
            continue
        if document.get("shape") != list(shape) or document.get("data_type") != dtype:
            yield CacheDamaged(
                "the array's metadata disagrees with the manifest", place=str(path), found=document.get("shape"), expected=f"{shape} {dtype}"
            )


def _check_chunks(part: Path, found: PartManifest, cache: CacheSpec, report: VerifyReport) -> Iterator[CacheDamaged]:
    reader = CacheReader.of_part(part, found, cache, offsets=np.array([0, found.tokens]))
    try:
        reader.column(0, layout.CHUNK_CHECKSUMS)
    except CacheDamaged:
        return  # reported among the small arrays; the files' digests have told what else is wrong
    chunk = found.chunk_tokens
    slots = [(layout.HIDDEN_STATES, slot) for slot in range(len(cache.layer_ids))] + [(layout.VERIFIER, 0)]
    for array, slot in slots:
        damaged = []
        for number in range(found.num_chunks):
            start, stop = number * chunk, min((number + 1) * chunk, found.tokens)
            try:
                bits = reader.read_states(0, start, stop, array, (slot,))
            except CacheDamaged as error:
                damaged.append(error)
                continue
            report.chunks += len(layout.PLANES)
            finite = planes.is_finite(bits)
            if not finite.all():
                layer = cache.layer_ids[slot] if array == layout.HIDDEN_STATES else cache.settings.features.verifier_layer
                row = start + int(np.argwhere(~finite)[0, 0])
                yield CacheDamaged(f"row {row} of layer {layer} holds values that are not finite", place=f"{part / array} chunk {number}")
        yield from damaged[:NAMED_CHUNKS]
        if len(damaged) > NAMED_CHUNKS:
            yield CacheDamaged(f"and {len(damaged) - NAMED_CHUNKS} more chunks of the same layer", place=damaged[0].place.rsplit(" chunk ", 1)[0])


def _check_columns(
    part: Path, found: PartManifest, cache: CacheSpec, columns: dict[str, np.ndarray], keys: dict[bytes, str]
) -> Iterator[CacheDamaged]:
    vocab = cache.settings.target.vocab_size

    def outside(name: str, low: int, high: int) -> Iterator[CacheDamaged]:
        values = columns[name]
        if values.min() < low or values.max() >= high:
            yield CacheDamaged(
                "a value lies out of range", place=str(part / name), found=f"{values.min()}..{values.max()}", expected=f"{low}..{high - 1}"
            )

    yield from outside("input_ids", 0, vocab)
    yield from outside("loss_mask", 0, 2)
    yield from outside("engine_top1", 0, vocab)
    yield from outside("next_token", -1, vocab)
    yield from outside("source_index", 0, len(found.sources))
    offsets = columns["sample_offsets"]
    if offsets[0] != 0 or offsets[-1] != found.tokens or (np.diff(offsets) <= 0).any():
        yield CacheDamaged("the samples do not fill the part, each after the other", place=str(part / "sample_offsets"))
    if int(columns["loss_mask"].sum()) != found.supervised_tokens:
        yield CacheDamaged(
            "the manifest counts other supervised tokens",
            place=str(part / "loss_mask"),
            found=int(columns["loss_mask"].sum()),
            expected=str(found.supervised_tokens),
        )
    for number, raw in enumerate(columns["sample_key"]):
        key = raw.tobytes()
        if key in keys:
            yield CacheDamaged(f"sample {number} is stored twice; the other is {keys[key]}", place=str(part / "sample_key"))
        keys[key] = f"{part.name} sample {number}"


def _check_teacher(part: Path, found: PartManifest, check: TeacherCheck, report: VerifyReport) -> None:
    reader = CacheReader.of_part(part, found, check.spec)
    last_rows = reader.parts[0].offsets[1:] - 1
    top1 = reader.column(0, "engine_top1")
    chunk = found.chunk_tokens
    for number in range(found.num_chunks):
        start, stop = number * chunk, min((number + 1) * chunk, found.tokens)
        here = np.flatnonzero((last_rows >= start) & (last_rows < stop))
        if len(here):
            bits = reader.read_states(0, start, stop, layout.VERIFIER, (0,))[last_rows[here] - start, 0]
            agreement: Agreement = check.compare(bits, top1[here])
            report.fidelity_exact += agreement.exact
            report.fidelity_near_ties += agreement.near_ties
            report.fidelity_different += agreement.different


def _compare_with_data(cache: Path, check: TeacherCheck, report: VerifyReport) -> None:
    reader = CacheReader(cache)
    left = DATA_TOKENS
    for sample in np.random.default_rng(0).permutation(reader.num_samples):
        mask, ids = reader.tokens(sample, "loss_mask"), reader.tokens(sample, "input_ids")
        rows = np.flatnonzero(mask[1:])  # row r predicts token r + 1
        if not len(rows):
            continue
        start = int(reader.starts[sample])
        bits = reader.read_states(int(reader.part_of[sample]), start, start + len(ids), layout.VERIFIER, (0,))[rows, 0]
        report.teacher_equals_data += int((check.top1(bits) == ids[1:][rows]).sum())
        report.teacher_tokens += len(rows)
        left -= len(rows)
        if left <= 0:
            return
