"""The benchmark harness measures nothing twice, and contestants that live side by side take turns."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import harness
import overhead


@pytest.fixture
def runs(monkeypatch):
    """Record and return the specs that are run."""
    found = []
    monkeypatch.setattr(harness, "run", lambda spec, **options: found.append(spec) or {"accuracy": 0.5})
    return found


def test_answers_are_taken_up_where_the_data_lies_elsewhere(tmp_path, runs):
    """An answer in the journal is used again on a machine that keeps the data in another folder."""
    path, spec = str(tmp_path / "journal.jsonl"), harness.Spec("plain", data="/here/mnist")
    first = harness.Journal(path).run(spec, 0)
    again = harness.Journal(path)

    assert again.run(replace(spec, data="/there/mnist"), 0) == first
    assert runs == [spec]
    assert "/here" not in Path(path).read_text()


def test_another_round_or_setting_is_run(tmp_path, runs):
    """Another round or another setting is a run of its own."""
    path, spec = str(tmp_path / "journal.jsonl"), harness.Spec("plain")
    for round_, setting in ((0, spec), (1, spec), (0, replace(spec, optimizer="adam"))):
        harness.Journal(path).run(setting, round_)

    assert len(runs) == 3


CONTESTANT = """
import json, sys, time
spec = json.loads(sys.argv[1])
def fit(what):
    if spec["gated"]:
        print("ready", flush=True)
        sys.stdin.readline()
    start = time.monotonic()
    time.sleep(0.05)
    if (spec["name"], what) == ("plain", "turn"):
        {misfortune}
    return start, time.monotonic()
fit("first")
print(json.dumps({{"turns": [fit("turn") for _ in range(spec["turns"])]}}))
"""


@pytest.fixture
def contestants(tmp_path, monkeypatch):
    """Return a function that replaces all contestants by one that records when it trained."""

    def replaced(misfortune="pass"):
        script = tmp_path / "contestants.py"
        script.write_text(CONTESTANT.format(misfortune=misfortune))
        monkeypatch.setattr(harness, "CONTESTANTS", script)

    return replaced


def test_one_trains_while_the_others_wait(contestants):
    """Contestants train one at a time, and all end a turn before the next turn begins."""
    contestants()
    specs = [harness.Spec(name, turns=3) for name in ("plain", "moving", "sparkdl")]
    answers = harness.in_turns(specs)
    spans = sorted(tuple(span) for answer in answers for span in answer["turns"])

    assert [len(answer["turns"]) for answer in answers] == [3, 3, 3]
    assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))
    turns = [{answer["turns"][turn][0] for answer in answers} for turn in range(3)]
    assert max(turns[0]) < min(turns[1])
    assert max(turns[1]) < min(turns[2])


def test_what_the_host_took_is_told_by_turn_and_the_calmer_half_counts(contestants, monkeypatch):
    """Each turn has the share of time that the host took, and only the half with the least counts."""
    clock = iter([(0, 0), (5, 100), (5, 100), (25, 200), (25, 200), (25, 300), (25, 300), (115, 400)])
    monkeypatch.setattr(harness, "ticks", lambda: next(clock))
    contestants()
    spec = harness.Spec("sparkdl", turns=4)
    (answer,) = harness.in_turns([spec])
    assert answer["stolen"] == [0.05, 0.2, 0.0, 0.9]

    calm = overhead.calmer_half(
        {spec: answer, harness.Spec("plain"): {"error": "", "stolen": [0.5, 0, 0, 0]}}
    )
    assert calm[spec]["turns"] == [answer["turns"][2], answer["turns"][1]]
    assert "turns" not in calm[harness.Spec("plain")]


def test_the_clock_of_the_processors_goes_on():
    """The machine's clock reports the ticks that passed, and how many of them the host took."""
    stolen, passed = harness.ticks()
    assert 0 <= stolen <= passed
    assert passed > 0


@pytest.mark.whole
@pytest.mark.parametrize(
    ("misfortune", "error"),
    [("raise ValueError('no luck')", "exit status 1: .*no luck"), ("time.sleep(60)", "not done within 4 s")],
)
def test_who_fails_or_hangs_holds_up_nobody(contestants, misfortune, error):
    """A contestant that fails or hangs has an error, and the others finish."""
    contestants(misfortune)
    specs = [harness.Spec(name, turns=2) for name in ("plain", "sparkdl")]
    failed, other = harness.in_turns(specs, timeout=4)

    assert re.search(error, failed["error"], re.DOTALL)
    assert len(other["turns"]) == 2
    assert re.search(error, harness.run(specs[0], timeout=4)["error"], re.DOTALL)
    assert len(harness.run(specs[1], timeout=4)["turns"]) == 2
