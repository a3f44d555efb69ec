"""The layout of charts: axes, gaps, and lines of many points."""

from __future__ import annotations

import pytest

from unsloth_ddp.run.documents.charts import HEIGHT, WIDTH, Line, averaged, axis, line_chart, short_number


@pytest.mark.parametrize(
    "low, high, ticks",
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.12, 0.93, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (-3, 4, [-4, -2, 0, 2, 4])],
)
def test_an_axis_has_round_numbers_and_reaches_over_the_data(low, high, ticks):
    assert axis(low, high) == ticks


@pytest.mark.parametrize("value", [0.0, 5.0, -5.0, 1e-9])
def test_an_axis_of_one_value_holds_it(value):
    found = axis(value, value)
    assert len(found) >= 2 and found[0] <= value <= found[-1]


def test_an_axis_of_steps_has_whole_numbers():
    assert axis(1, 3, whole=True) == [1, 2, 3]


def test_points_lie_within_the_chart_and_high_values_stand_above_low_ones():
    chart = line_chart("Loss", [Line("training", [(1, 5.0), (2, 1.0), (3, 3.0)])])
    marks = chart.lines[0].marks
    assert [text for _, _, text in marks] == ["training, step 1: 5", "training, step 2: 1", "training, step 3: 3"]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y, _ in marks)
    assert marks[0][1] < marks[2][1] < marks[1][1] and marks[0][0] < marks[1][0] < marks[2][0]


def test_nothing_logged_makes_no_chart():
    assert line_chart("Loss", [Line("a", [])]) is None


def test_a_value_that_is_no_number_is_a_gap_and_not_a_point():
    nan, inf = float("nan"), float("inf")
    points = [(1, 3.0), (2, 2.0), (3, nan), (4, inf), (5, 1.0), (6, nan)]
    (line,) = line_chart("Loss", [Line("training", points)]).lines
    assert line.path.count("M") == 2 and "nan" not in line.path and "inf" not in line.path
    assert len(line.marks) == 3
    # The axis of steps reaches to the last line, and a stretch of one point is marked.
    assert line_chart("Loss", [Line("a", points)]).x_ticks[-1][1] == "6"
    many = [(step, nan if step in (40, 42) else 1.0) for step in range(99)]
    (line,) = line_chart("Loss", [Line("training", many)]).lines
    assert [text for _, _, text in line.marks] == ["training, step 41: 1"]
    assert line_chart("Loss", [Line("a", [(1, nan)])]) is None


def test_many_points_become_the_means_of_stretches():
    points = [(step, float(step % 2)) for step in range(10_000)]
    means = averaged(points, 100)
    assert len(means) == 100 and {y for _, y in means} == {0.5} and means[0][0] == 49.5
    assert averaged(points[:100], 100) == points[:100] and averaged([], 100) == []


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (1234, "1,234"),
        (0.125, "0.125"),
        (12_500, "12.5k"),
        (1.2e6, "1.2M"),
        (2e-5, "2e-5"),
        (2.5e-5, "2.5e-5"),
    ],
)
def test_numbers_are_short(value, text):
    assert short_number(value) == text
