from __future__ import annotations

from pathlib import Path

import pytest

from dflash_cache.common.errors import CacheDamaged
from dflash_cache.extract.rejects import MAX_LINE_BYTES, Reject, count_reasons, load_rejects, save_rejects


def test_the_same_run_again_leaves_the_same_list(tmp_path: Path):
    rejects = [Reject("b.jsonl", 1, "x"), Reject("a.jsonl", 10, "y"), Reject("a.jsonl", 9, "y")]
    looked_at = {(reject.source, reject.row) for reject in rejects}
    save_rejects(tmp_path, rejects, looked_at)
    first = (tmp_path / "rejects.jsonl").read_text()
    save_rejects(tmp_path, rejects, looked_at)
    assert (tmp_path / "rejects.jsonl").read_text() == first
    assert [reject.row for reject in load_rejects(tmp_path)] == [9, 10, 1]


def test_rows_that_a_run_did_not_look_at_stay_listed_and_rows_that_it_stored_go(tmp_path: Path):
    save_rejects(tmp_path, [Reject("a", 0, "x"), Reject("a", 1, "x")], {("a", 0), ("a", 1)})
    save_rejects(tmp_path, [Reject("b", 0, "z")], {("a", 1), ("b", 0)})
    assert load_rejects(tmp_path) == [Reject("a", 0, "x"), Reject("b", 0, "z")]


def test_reasons_that_differ_in_a_number_are_counted_together():
    rejects = [Reject("a", 0, "it has 50 tokens; the limit is 40"), Reject("a", 1, "it has 60 tokens; the limit is 40"), Reject("a", 2, "other")]
    assert list(count_reasons(rejects).values()) == [2, 1]


def test_nothing_rejected_writes_no_file(tmp_path: Path):
    save_rejects(tmp_path, [], {("a", 0)})
    assert not (tmp_path / "rejects.jsonl").exists()


@pytest.mark.parametrize("line", ["[" * 100_000, "[]", '{"source": "d"}', "x" * (MAX_LINE_BYTES + 10)])
def test_a_line_that_is_no_reject_is_damage_named_by_its_number(tmp_path, line):
    (tmp_path / "rejects.jsonl").write_text('{"source": "d", "row": 1, "reason": "r"}\n' + line + "\n")
    with pytest.raises(CacheDamaged, match=r"rejects.jsonl line 2"):
        load_rejects(tmp_path)


def test_reasons_meet_whatever_numbers_they_hold():
    reasons = ["it has 12 tokens; the limit is 5 (message 3)", "it has 9 tokens; the limit is 5 (message 1)", "the line is not valid JSON: x"]
    assert count_reasons(Reject("d", number, reason) for number, reason in enumerate(reasons)) == {
        "it has N tokens; the limit is N (message N)": 2,
        "the line is not valid JSON": 1,
    }
