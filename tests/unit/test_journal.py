"""The benchmarks' journal: what was measured before is not measured again."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import harness


@pytest.fixture
def runs(monkeypatch):
    """Return the specs that were run."""
    found = []
    monkeypatch.setattr(harness, "run", lambda spec, **options: found.append(spec) or {"accuracy": 0.5})
    return found


def test_answers_are_taken_up_where_the_data_lies_elsewhere(tmp_path, runs):
    path, spec = str(tmp_path / "journal.jsonl"), harness.Spec("plain", data="/here/mnist")
    first = harness.Journal(path).run(spec, 0)
    again = harness.Journal(path)

    assert again.run(replace(spec, data="/there/mnist"), 0) == first
    assert runs == [spec]
    assert "/here" not in Path(path).read_text()


def test_another_round_or_setting_is_run(tmp_path, runs):
    path, spec = str(tmp_path / "journal.jsonl"), harness.Spec("plain")
    for round_, setting in ((0, spec), (1, spec), (0, replace(spec, optimizer="adam"))):
        harness.Journal(path).run(setting, round_)

    assert len(runs) == 3
