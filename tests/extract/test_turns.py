"""Conversations whose every answer the target writes, with an engine that needs no model: what is stored, and that every row has its fate."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_target as tiny
from fake_engine import END_ID, FakeEngine, fake_answer, letters
from forked import Server, assert_same_cache, extraction, samples_by_key

from dflash_cache.common.errors import RunFailed
from dflash_cache.common.sample import Sample
from dflash_cache.extract import run as run_module
from dflash_cache.extract.config import ExtractConfig
from dflash_cache.extract.engine import Document, Outcome
from dflash_cache.extract.estimate import estimate
from dflash_cache.extract.rejects import load_rejects
from dflash_cache.extract.run import ExtractSummary, run
from dflash_cache.extract.turns import REWRITTEN, Turn
from dflash_cache.train.reader import CacheReader

ROWS: list[Any] = [
    tiny.chat(*(text for turn in range(number % 4 + 1) for text in (f"question {number} {turn}", "the data's answer"))) for number in range(40)
]
ROWS[7:7] = [{"turns": ["first", "second"]}, "{broken", tiny.chat("long", "x", "y" * 300, "z"), ROWS[3]]


def encode(text: str) -> list[int]:
    return tiny.build_tokenizer()(text, add_special_tokens=False)["input_ids"]


def asked_by_hand(questions: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(prompt, answer) of each turn, as a chat with the fake target goes; it ends with an answer that was cut."""
    messages: list[dict[str, str]] = []
    found = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = np.array(encode(tiny.build_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)))
        answer = fake_answer(prompt)
        found.append((prompt, answer))
        if answer[-1] != END_ID:
            break
        messages.append({"role": "assistant", "content": tiny.build_tokenizer().decode(answer[:-1])})
    return found


def questions_of(row: Any) -> list[str]:
    return row["turns"] if "turns" in row else [message["content"] for message in row["messages"][::2]]


@pytest.fixture
def extract(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """extract(rows, engine, **fields) -> (summary, samples by row, in the order of their length)."""

    def do(rows: list[Any] = ROWS, engine: type = FakeEngine, name: str = "cache", **fields: Any) -> tuple[ExtractSummary, dict[int, list[Sample]]]:
        monkeypatch.setattr(run_module, "start_engine", engine)
        data = tiny.write_jsonl(tmp_path / "data.jsonl", rows)
        given = {"model": str(tiny_llama), "data": (str(data),), "cache": tmp_path / name, "engine": "transformers", "max_length": 256}
        summary = run(ExtractConfig(**({**given, "generate": True, "max_new_tokens": 8, "layers": (1, 3)} | fields)))
        found: dict[int, list[Sample]] = {}
        for sample in samples_by_key(tmp_path / name).values() if list((tmp_path / name / "parts").iterdir()) else ():
            found.setdefault(sample.source_row, []).append(sample)
        return summary, {row: sorted(samples, key=len) for row, samples in found.items()}

    return do


def test_a_conversation_is_what_asking_turn_by_turn_gives_and_every_answer_is_learned(extract: Any):
    summary, stored = extract()
    assert summary.rows == len(ROWS) == summary.samples + summary.rejects
    generated = 0
    for row, given in enumerate(ROWS):
        if row in (8, 9, 10):  # broken, too long, seen before
            continue
        turns = asked_by_hand(questions_of(given))
        generated += sum(len(answer) for _, answer in turns)
        if len(turns) < len(questions_of(given)):
            assert row not in stored
            continue
        (sample,) = stored[row]
        prompt, answer = turns[-1]
        assert sample.input_ids.tolist() == [*prompt, *answer[:-1]]
        assert sample.next_token == answer[-1]
        mask = np.zeros(len(sample), np.uint8)
        for before, said in turns:
            mask[len(before) : len(before) + len(said)] = 1
        assert sample.loss_mask.tolist() == mask.tolist()
    assert summary.generated_tokens == generated
    assert f"{generated} tokens generated" in summary.to_text()


def test_a_conversation_that_breaks_off_is_a_reject_that_says_where(extract: Any, tmp_path: Path):
    summary, stored = extract()
    cut = [row for row, given in enumerate(ROWS) if row not in (8, 9, 10) and len(asked_by_hand(questions_of(given))) < len(questions_of(given))]
    assert len(cut) > 3
    rejects = {reject.row: reject.reason for reject in load_rejects(tmp_path / "cache")}
    assert sorted(rejects) == sorted([*cut, 8, 9, 10])
    assert not stored.keys() & rejects.keys()
    for row in cut:
        turns = asked_by_hand(questions_of(ROWS[row]))
        why = f"an answer was cut at {len(turns[-1][1])} tokens, before its end, so that the next question cannot be asked"
        assert rejects[row] == f"{why} (turn {len(turns) + 1} of {len(questions_of(ROWS[row]))})"
    assert rejects[9].startswith("it has 3")  # its questions alone are too long, which is known before the engine starts
    assert summary.rejects == len(rejects)


def test_each_turn_is_a_sample_of_its_own_with_the_history_of_its_moment(extract: Any, tmp_path: Path):
    summary, stored = extract(turns="each")
    assert summary.rows + summary.more_turns == summary.samples + summary.rejects
    assert summary.more_turns == sum(len(questions_of(row)) - 1 for row in ROWS if isinstance(row, dict))
    for row, given in enumerate(ROWS):
        if row in (8, 9, 10):
            continue
        turns = asked_by_hand(questions_of(given))
        assert len(stored[row]) == len(turns)  # one that was cut is a sample, what would follow is not
        for sample, (prompt, answer) in zip(stored[row], turns, strict=True):
            assert sample.input_ids.tolist() == [*prompt, *answer[:-1]]
            assert sample.next_token == answer[-1]
            assert sample.loss_mask.tolist() == [0] * len(prompt) + [1] * (len(answer) - 1)
    reasons = [reject.reason for reject in load_rejects(tmp_path / "cache")]
    assert len(reasons) == summary.rejects
    assert any(reason.endswith("(turn 4 of 4, as turn 2)") for reason in reasons)
    assert [len(sample) for sample in stored[9]] == [len(asked_by_hand(["long"])[0][0]) + len(asked_by_hand(["long"])[0][1]) - 1]


@pytest.mark.parametrize(("supervise", "learned"), [("last", 1), ("all", 0)])
def test_the_last_answer_alone_or_every_token_may_be_learned(extract: Any, supervise: str, learned: int):
    summary, stored = extract(supervise=supervise)
    for row, (sample,) in stored.items():
        prompt, answer = asked_by_hand(questions_of(ROWS[row]))[-1]
        assert sample.loss_mask.tolist() == [1 - learned] * len(prompt) + [1] * (len(answer) - 1)
    assert summary.supervised_tokens == sum(int(sample.loss_mask.sum()) + 1 for (sample,) in stored.values())


class Thinking(FakeEngine):
    """Thinks before each answer and always ends it."""

    def answer(self, turn: Turn) -> np.ndarray:
        return np.array([*letters("<t>hm</t>"), *letters("ok"), END_ID], np.int32)


class Silent(FakeEngine):
    """Says nothing in the second turn."""

    def answer(self, turn: Turn) -> np.ndarray:
        return np.array([END_ID] if len(turn.answers) == 1 else [*letters("ok"), END_ID], np.int32)


def test_what_the_history_leaves_out_is_not_learned_and_noted(extract: Any, tmp_path: Path):
    template = tmp_path / "strips.jinja"
    template.write_text(tiny.CHATML_STRIPS)
    rows = [tiny.chat("one", "x", "two"), tiny.chat("three")]
    summary, stored = extract(rows, Thinking, chat_template=template, max_new_tokens=20)
    said = "<t>hm</t>ok"
    text = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    (sample,) = stored[0]
    assert sample.input_ids.tolist() == encode(text + said)
    assert sample.loss_mask.tolist() == [0] * len(encode(text)) + [1] * len(said)
    assert summary.notes == {REWRITTEN: 1}
    each, stored = extract(rows, Thinking, "each", chat_template=template, max_new_tokens=20, turns="each")
    assert [int(sample.loss_mask.sum()) for sample in stored[0]] == [len(said)] * 2
    assert each.notes == {}


def test_an_empty_answer_ends_a_conversation_unless_it_is_the_last(extract: Any, tmp_path: Path):
    summary, stored = extract([tiny.chat("one", "x", "two"), tiny.chat("one", "x", "two", "y", "three")], Silent)
    assert (summary.samples, [reject.reason for reject in load_rejects(tmp_path / "cache")]) == (
        1,
        ["an answer is empty, so that the next question cannot be asked (turn 3 of 3)"],
    )
    assert stored[0][0].next_token == END_ID


def test_a_conversation_that_outgrows_the_limit_is_rejected_with_the_turn(extract: Any, tmp_path: Path):
    class Talkative(FakeEngine):
        def answer(self, turn: Turn) -> np.ndarray:
            return np.array([*letters("a" * 150), END_ID], np.int32)

    summary, _ = extract([tiny.chat("one", "x", "two", "y", "three")], Talkative)
    (reject,) = load_rejects(tmp_path / "cache")
    assert reject.reason.startswith("it has 3")
    assert reject.reason.endswith("the limit is 256 (turn 3 of 3)")
    assert (summary.rows, summary.samples, summary.rejects) == (1, 0, 1)


def test_the_same_command_again_asks_only_for_what_is_missing(extract: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    first, _ = extract(turns="each", limit=20)
    asked: list[bytes] = []

    class Recording(FakeEngine):
        def answer(self, turn: Turn) -> np.ndarray:
            asked.append(turn.document.key)
            return super().answer(turn)

    second, _ = extract(turns="each", engine=Recording)
    assert second.already_stored == first.samples
    assert second.rows + second.more_turns == second.samples + second.rejects + second.already_stored
    whole, _ = extract(turns="each", name="whole")
    assert samples_by_key(tmp_path / "cache").keys() == samples_by_key(tmp_path / "whole").keys()
    assert whole.samples == first.samples + second.samples
    assert len(asked) < whole.samples


def test_a_turn_that_is_missing_alone_is_asked_again_with_its_history(extract: Any, tmp_path: Path):
    rows = [row for row in ROWS if isinstance(row, dict) and len(asked_by_hand(questions_of(row))) == 3][:1]
    _, whole = extract(rows, turns="each", name="whole")
    wanted = [sample.key for sample in whole[0]]

    class Forgetting(FakeEngine):
        """Rejects the second turn only."""

        def _keep(self, turn: Turn, *rest: Any) -> Outcome:
            return turn.rejected("not now", 1) if turn.document.key == wanted[1] else super()._keep(turn, *rest)

    extract(rows, Forgetting, turns="each")
    assert samples_by_key(tmp_path / "cache").keys() == set(wanted) - {wanted[1]}
    summary, stored = extract(rows, turns="each")
    assert (summary.samples, summary.already_stored) == (1, 2)
    assert [sample.input_ids.tolist() for sample in stored[0]] == [sample.input_ids.tolist() for sample in whole[0]]


def test_the_estimate_is_what_there_can_be_at_most(extract: Any, tiny_llama: Path, tmp_path: Path):
    rows = [row for row in ROWS if isinstance(row, dict)]
    for turns in ("all", "each"):
        summary, _ = extract(rows, turns=turns, name=turns)
        config = ExtractConfig(
            model=str(tiny_llama),
            data=(str(tmp_path / "data.jsonl"),),
            cache=tmp_path / "none",
            engine="transformers",
            max_length=256,
            generate=True,
            max_new_tokens=8,
            turns=turns,
        )
        guess = estimate(config)
        assert summary.tokens <= guess.tokens <= 2.5 * summary.tokens
        assert summary.supervised_tokens <= guess.supervised_tokens


def test_turns_that_end_no_sample_are_a_sign_of_life_and_a_stalled_conversation_is_named(extract: Any):
    class Slow(FakeEngine):
        pause_seconds = 0.2

        def answer(self, turn: Turn) -> np.ndarray:
            return np.array([*letters("ok"), END_ID], np.int32)

    class Stuck(Slow):
        def run(self, documents: Iterable[Document]) -> Iterator[list[Outcome]]:
            yield from super().run(next(documents) for _ in range(1))  # type: ignore[call-overload]
            next(iter(documents))
            time.sleep(3600)

    questions = [f"q{number}" for number in range(12)]
    conversation = {"turns": questions}
    assert extract([conversation], Slow, stall_seconds=1.0, max_length=2000)[0].samples == 1
    with pytest.raises(RunFailed, match="no document has finished for") as error:
        extract([conversation, {"turns": questions[::-1]}], Stuck, name="stuck", stall_seconds=1.5, max_length=2000)
    assert "data.jsonl row " in str(error.value.found)


# ---- killed


@pytest.fixture(scope="module")
def conversations_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_jsonl(tmp_path_factory.mktemp("turns") / "data.jsonl", ROWS)


@pytest.fixture(scope="module", params=["all", "each"])
def whole_turns(request: Any, server: Server, tiny_llama: Path, conversations_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(turns, the cache of an undisturbed run)."""
    cache = tmp_path_factory.mktemp("whole") / "cache"
    assert server.do(**written(tiny_llama, conversations_file, cache, request.param)) == [0]
    return request.param, cache


def written(model: Path, data: Path, cache: Path, turns: str, pause: float = 0.0, workers: int = 1) -> dict[str, Any]:
    job = extraction(model, data, cache, pause=pause)
    job["fields"] |= {"generate": True, "max_new_tokens": 8, "turns": turns, "workers": workers}
    return job


def test_killed_in_the_middle_of_conversations_the_same_command_completes_the_cache(
    server: Server, whole_turns: Any, tiny_llama: Path, conversations_file: Path, tmp_path: Path
):
    turns, whole = whole_turns
    moments, kills = random.Random(0), 0
    for number in range(4):
        cache = tmp_path / f"cache{number}"
        job = written(tiny_llama, conversations_file, cache, turns, pause=0.006)
        (pid,) = server.start(**job)
        time.sleep(moments.uniform(0.1, 0.6))
        os.kill(pid, signal.SIGKILL)
        kills += server.codes() != [0]
        assert server.do(**job) == [0]
        assert_same_cache(cache, whole)
    assert kills


def test_a_killed_process_of_several_is_replaced_and_no_turn_is_lost_or_stored_twice(
    server: Server, whole_turns: Any, tiny_llama: Path, conversations_file: Path, tmp_path: Path
):
    turns, whole = whole_turns
    moments, deaths = random.Random(0), 0
    for number in range(4):
        cache = tmp_path / f"cache{number}"
        (pid,) = server.start(**written(tiny_llama, conversations_file, cache, turns, pause=0.008, workers=2))
        for _ in range(2):
            time.sleep(moments.uniform(0.1, 0.5))
            alive = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if Path(f"/proc/{pid}").exists() else []
            if alive:
                os.kill(int(moments.choice(alive)), signal.SIGKILL)
        assert server.codes() == [0]
        assert_same_cache(cache, whole)
        lines = [json.loads(line) for line in (cache / "extract.log.jsonl").read_text().splitlines()]
        deaths += sum(line["event"] == "worker_died" for line in lines)
    assert deaths


def test_ranks_share_conversations(server: Server, whole_turns: Any, tiny_llama: Path, conversations_file: Path, tmp_path: Path):
    turns, whole = whole_turns
    job = written(tiny_llama, conversations_file, tmp_path / "cache", turns) | {"do": "ranks", "ranks": 3}
    assert server.do(**job) == [0, 0, 0]
    assert_same_cache(tmp_path / "cache", whole)
    assert CacheReader(tmp_path / "cache").num_samples > 10
