"""The lines of progress where standard error is not a terminal."""

import pytest

from restorekv.cli import terminal
from restorekv.cli.terminal import ShareMeter


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only as a test says."""
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def report(meter, clock, reports):
    """The lines that reports (seconds later, share) give."""
    lines = []
    for seconds, share in reports:
        clock[0] += seconds
        if meter.is_due(share):
            lines.append(f"{share:.0%}{meter.describe_rest(share)}")
    return lines


def test_a_tenth_or_a_minute_is_worth_a_line(clock):
    reports = [(10, 0.05), (10, 0.1), (10, 0.15), (61, 0.16), (10, 0.3), (10, 1.0)]
    assert report(ShareMeter(), clock, reports) == [
        "10%, 3 min to go",  # 0.05 in 10 s since the first report
        "16%, 10 min to go",
        "30%, 4 min to go",
        "100%",
    ]


def test_work_that_is_continued_is_not_taken_for_fast(clock):
    assert report(ShareMeter(), clock, [(0, 0.5), (10, 0.6)]) == ["50%", "60%, 40 s to go"]


def test_every_phase_has_a_line_for_its_end(clock):
    assert report(ShareMeter(), clock, [(1, 1.0), (1, 1.0)]) == ["100%", "100%"]


def test_a_new_phase_begins_anew(clock):
    lines = report(ShareMeter(), clock, [(0, 0.0), (10, 1.0), (5, 0.0), (10, 0.5)])
    assert lines == ["100%", "0%", "50%, 10 s to go"]
