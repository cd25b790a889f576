"""The doctor: one drafter, the same documents, drafted by the trainer, by a plain reading of the exported folder, and by an engine.

In: a cache, an exported folder, the run that it came from, and perhaps something that serves prompts. Out: a Diagnosis: each
way's acceptance length, where they part beyond noise, and which single change of the known conventions makes them agree.
Serving is handed in as a function; nothing here knows of an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..common.errors import InputError, RunFailed
from ..common.progress import ProgressBar
from .diagnosis import Cause, Diagnosis, Parting, Way
from .gap import Counts, gap
from .hypotheses import Change, changes
from .patient import Patient
from .plain_forward import PlainDrafter
from .replay import Document, Walked, leading

TRAINER, FOLDER, ENGINE, BETTER = "trainer", "folder", "engine", "another reading"
SAME = 0.995
"""Share of drafted tokens from which on two ways draft the same."""
ROUNDING = 0.02
"""Share by which the folder may fall below what the rounding of its weights alone gives."""
ENGINE_SAME = 0.9
"""As SAME, of an engine, which computes in bfloat16 and so turns near ties."""
LEAST_GAIN = 0.01
"""A change that raises the score by less is no cause."""
SCREEN_STEPS, SCREENED, SEARCH_STEPS = 24, 6, 200
"""Each hypothesis is replayed for a few steps, the best ones for more, and what is taken for a cause on all documents."""
MOST_CAUSES = 3
"""Changes made together at most."""


@dataclass(frozen=True)
class Request:
    """What an engine is to continue, greedily."""

    prompt: list[int]
    answer_tokens: int
    """So many, whatever they are."""


@dataclass(frozen=True)
class Answer:
    """What it did."""

    tokens: list[int]
    drafts: list[list[int]] | None
    """Every block that it proposed, in order, the first after the prompt; None when that is not known."""
    steps: int
    """By its own counters."""
    accepted: int
    """By its own counters."""


Serve = Callable[[Sequence[Request]], Sequence[Answer]]


def diagnose(cache: Path, folder: Path, run: Path | None = None, serve: Serve | None = None, *, limit: int = 32, device: str = "auto") -> Diagnosis:
    """Replay `folder` on the first `limit` documents of `cache` that can be drafted.

    run: what the trainer trained; without it the trainer's way is the folder itself, loaded into the trainer's drafter. With
    `serve`, every way drafts the first answer of each document as far as the engine writes the cached text. Raises InputError.
    """
    patient = Patient(cache, folder, run, limit, device)
    documents, engine, differing = patient.documents, None, 0
    if serve is not None:
        documents, engine, differing = _served(patient, serve)
    partings: list[Parting] = []
    ways: list[Way] = []
    served, agreement = patient.plain_walks(documents, patient.plain, "the folder, read plainly"), None
    if patient.drafter is not None:
        trained = patient.trainer_walks(documents)
        partings.append(_trainer_and_folder(patient, documents, trained, served))
        agreement = partings[0].agreement
        ways.append(Way.of(TRAINER, str(run or folder), _counts(trained), None))
    ways.append(Way.of(FOLDER, str(folder), _counts(served), agreement))
    if engine is not None:
        ways.append(Way.of(ENGINE, "", _counts(engine), None))
        partings.append(_folder_and_engine(patient, documents, served, engine))
    elif serve is not None:
        partings.append(Parting(FOLDER, ENGINE, None, True))
    if run is None and not any(parting.parts for parting in partings):
        partings += _better(patient, documents, served)
    known, untried = changes(patient.plain, patient.situation)
    differences = tuple(change.name for change in known if change.of_the_run)
    return Diagnosis(tuple(ways), tuple(partings), differences, len(documents), differing, tuple(patient.notes), tuple(untried))


def _trainer_and_folder(patient: Patient, documents: Sequence[Document], trained: Sequence[Walked], served: Sequence[Walked]) -> Parting:
    found, agreement = gap(_counts(served), _counts(trained)), patient.agreement(patient.plain, documents, trained)
    least = SAME
    if agreement < SAME and (ideal := patient.as_it_should_be()) is not None:
        least = min(SAME, patient.agreement(ideal, documents, trained) - ROUNDING)
    return _explain(patient, Parting(TRAINER, FOLDER, found, found.parts or agreement < least, agreement), documents, trained, least)


def _folder_and_engine(patient: Patient, documents: Sequence[Document], served: Sequence[Walked], engine: Sequence[Walked]) -> Parting:
    found, agreement = gap(_counts(engine), _counts(served)), patient.agreement(patient.plain, documents, engine)
    return _explain(patient, Parting(FOLDER, ENGINE, found, found.parts or agreement < ENGINE_SAME, agreement), documents, engine, ENGINE_SAME)


def _explain(patient: Patient, parting: Parting, documents: Sequence[Document], walks: Sequence[Walked], least: float) -> Parting:
    """The parting with its causes: the changes of the folder with which it drafts what `walks` drafted."""
    if not parting.parts:
        return parting

    def score(plain: PlainDrafter, steps: int) -> float:
        some = _beginning(walks, steps)
        return patient.agreement(plain, documents[:some], walks[:some])

    causes, reached = _search(patient, score, least)
    if not causes:
        return parting
    after, agreement = _counts(patient.plain_walks(documents, reached, "with the change")), patient.agreement(reached, documents, walks)
    left = gap(after, _counts(walks)) if parting.one == TRAINER else gap(_counts(walks), after)
    explained = not left.parts and agreement >= least
    return Parting(parting.one, parting.other, parting.gap, True, parting.agreement, tuple(causes), explained, left, agreement)


def _better(patient: Patient, documents: Sequence[Document], served: Sequence[Walked]) -> list[Parting]:
    """Without a run to compare with: is there a reading under which the folder drafts better? Larger blocks are no better reading."""

    def score(plain: PlainDrafter, steps: int) -> float:
        some = _beginning(served, steps)
        better = gap(_counts(patient.plain_walks(documents[:some], plain)), _counts(served[:some])).difference
        return better if plain.conventions.block_size == patient.plain.conventions.block_size else 0.0

    causes, reached = _search(patient, score, float("inf"), most=1)
    if not causes:
        return []
    found = gap(_counts(served), _counts(patient.plain_walks(documents, reached, "with the change")))
    return [Parting(BETTER, FOLDER, found, True, None, tuple(causes), True)] if found.parts and found.difference < 0 else []


def _search(
    patient: Patient, score: Callable[[PlainDrafter, int], float], enough: float, most: int = MOST_CAUSES
) -> tuple[list[Cause], PlainDrafter]:
    """The change that raises `score` most, then the next on top of it, until it is enough or nothing helps.

    score: of a drafter, over the documents up to so many steps. Every change is screened over a few steps; the best, and
    whatever the run says, are scored over more.
    """
    causes: list[Cause] = []
    current, value = patient.plain, score(patient.plain, SEARCH_STEPS)
    while len(causes) < most and value < enough:
        known = changes(current, patient.situation)[0]
        tried: list[tuple[float, Change]] = []
        with ProgressBar("hypotheses", len(known)) as bar:
            for change in [change for change in known if change.of_the_run]:
                tried.append((score(change.drafter, SEARCH_STEPS), change))
                bar.update(1)
            if not tried or max(one for one, _ in tried) < enough:  # else the run tells the truth, and nothing more need be asked
                others = [change for change in known if not change.of_the_run]
                screened = []
                for change in others:
                    screened.append((score(change.drafter, SCREEN_STEPS), change))
                    bar.update(1)
                screened.sort(key=lambda pair: -pair[0])  # stable: among equals the more telling stays first
                tried += [(score(change.drafter, SEARCH_STEPS), change) for _, change in screened[:SCREENED]]
        best, change = max(tried, key=lambda pair: pair[0])
        if best < value + LEAST_GAIN:
            break
        causes.append(Cause(change.name, change.fix, value, best, tuple(other.name for one, other in tried if other is not change and one >= best)))
        current, value = change.drafter, best
    return causes, current


def _served(patient: Patient, serve: Serve) -> tuple[list[Document], list[Walked] | None, int]:
    """The documents as far as the engine wrote the cached text, the engine's walks of them, and how many of them it left."""
    requests = [Request(document.batch.input_ids_T[: document.prompt_tokens].tolist(), len(document.answer)) for document in patient.documents]
    try:
        answers = serve(requests)
    except RunFailed as error:
        patient.notes.append(f"the engine does not serve the folder: {error.problem}")
        return patient.documents, None, 0
    documents, walks, differing = [], [], 0
    for document, answer in zip(patient.documents, answers, strict=True):
        if answer.drafts is None:
            raise RunFailed("the engine's drafts could not be recorded, so that nothing can be compared", place="--engine vllm")
        alike = leading(answer.tokens, document.answer)
        differing += alike < len(document.answer)
        if (same := document.of_answer(alike)).anchors:
            documents.append(same)
            walks.append(_walk_of(same, answer.drafts))
    steps, accepted = sum(answer.steps for answer in answers), sum(answer.accepted for answer in answers)
    patient.notes.append(f"the engine's own counters say {1 + accepted / max(steps, 1):.3f}, over {steps:,} steps of whole answers")
    if not documents:
        problem, fix = "the engine continues no prompt as the cache does", "use a cache that the target wrote: `dflash extract --generate`"
        raise InputError(problem, place=f"--cache {patient.reader.path}", found=f"{differing} of {len(answers)} answers differ at once", fix=fix)
    return documents, walks, differing


def _walk_of(document: Document, drafted: Sequence[list[int]]) -> Walked:
    """The engine's walk as far as `document` goes. Its n-th block was drafted at the token after what the blocks before it won."""
    drafts: dict[int, list[int]] = {}
    accepted, row = 0, document.prompt_tokens
    for tokens in drafted:
        if row > document.anchors[-1]:
            break
        drafts[row] = tokens
        streak = leading(tokens, document.expected(row, len(tokens)))
        accepted += streak
        row += streak + 1
    return Walked(drafts, accepted)


def _counts(walks: Sequence[Walked]) -> list[Counts]:
    return [Counts(of.steps, of.accepted) for of in walks]


def _beginning(walks: Sequence[Walked], steps: int) -> int:
    """So many documents, from the first on, have `steps` steps."""
    total, count = 0, 0
    while count < len(walks) and total < steps:
        total += walks[count].steps
        count += 1
    return count
