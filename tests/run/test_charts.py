"""The layout of charts: axes, thinning, smoothing, bars."""

from __future__ import annotations

import pytest

from unsloth_ddp.run.charts import (
    HEIGHT,
    WIDTH,
    Line,
    axis,
    histogram,
    line_chart,
    log_axis,
    short_number,
    smoothed,
    thinned,
)  # fmt: skip


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


def test_a_logarithmic_axis_has_powers_of_ten_or_finer_ones_where_there_are_few():
    assert log_axis(0.005, 15) == pytest.approx([0.01, 0.1, 1, 10])
    assert log_axis(0.9, 55) == pytest.approx([1, 2, 5, 10, 20, 50])


def test_points_lie_within_the_chart_and_high_values_stand_above_low_ones():
    chart = line_chart("Loss", [Line("training", [(1, 5.0), (2, 1.0), (3, 3.0)])])
    marks = chart.lines[0].marks
    assert [text for _, _, text in marks] == ["training, step 1: 5", "training, step 2: 1", "training, step 3: 3"]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y, _ in marks)
    assert marks[0][1] < marks[2][1] < marks[1][1] and marks[0][0] < marks[1][0] < marks[2][0]


def test_losses_over_decades_get_a_logarithmic_axis_and_others_do_not():
    falling = [(step, 10 ** (1 - step)) for step in range(4)]
    assert line_chart("Loss", [Line("a", falling)], may_be_log=True).title == "Loss (logarithmic)"
    assert line_chart("Loss", [Line("a", falling)]).title == "Loss"
    assert line_chart("Loss", [Line("a", [*falling, (9, 0.0)])], may_be_log=True).title == "Loss"


def test_nothing_logged_makes_no_chart():
    assert line_chart("Loss", [Line("a", [])]) is None
    assert histogram("Lengths", [], [], x_name="tokens", unit="rows") is None


def test_noisy_lines_get_a_smoothed_one_beside_them():
    points = [(step, float(step % 2)) for step in range(100)]
    first, second = line_chart("Loss", [Line("a", points, noisy=True)]).lines
    assert first.faint and not second.faint
    assert len(line_chart("Loss", [Line("a", points)]).lines) == 1
    falling = [(step, 5 - step / 50 + (step * 7 % 5) / 5) for step in range(100)]
    assert all(abs(y - (5.4 - x / 50)) < 0.3 for x, y in smoothed(falling, 11))


def test_smoothing_keeps_a_straight_line_but_for_its_ends():
    line = [(step, 2.0 * step) for step in range(50)]
    assert smoothed(line, 9)[1:-1] == line[1:-1]
    assert smoothed([(1, 5.0)], 9) == [(1, 5.0)] and smoothed([], 9) == []


def test_a_spike_does_not_move_the_smoothed_line():
    points = [(step, 900.0 if step == 50 else 2.0) for step in range(100)]
    assert {y for _, y in smoothed(points, 9)} == {2.0}
    assert len(smoothed([(step, 1.0) for step in range(20_000)], 1000)) < 600


def test_a_value_that_is_no_number_is_a_gap_and_not_a_point():
    nan, inf = float("nan"), float("inf")
    points = [(1, 3.0), (2, 2.0), (3, nan), (4, inf), (5, 1.0), (6, nan)]
    (line,) = line_chart("Loss", [Line("training", points)]).lines
    assert line.path.count("M") == 2 and "nan" not in line.path and "inf" not in line.path
    assert len(line.marks) == 3
    # The axis of steps reaches to the last line, and a stretch of one point is marked.
    assert line_chart("Loss", [Line("a", points)]).x_ticks[-1].text == "6"
    many = [(step, nan if step in (40, 42) else 1.0) for step in range(99)]
    (line,) = line_chart("Loss", [Line("training", many)]).lines
    assert [text for _, _, text in line.marks] == ["training, step 41: 1"]
    assert line_chart("Loss", [Line("a", [(1, nan)])]) is None


def test_thinning_keeps_both_ends_and_peaks():
    points = [(step, 100.0 if step == 777 else 0.5) for step in range(10_000)]
    kept = thinned(points, 100)
    assert len(kept) <= 110 and (777, 100.0) in kept and kept[0] == points[0] and kept[-1] == points[-1]


def test_bars_stand_for_their_counts():
    chart = histogram("Lengths", [10, 20, 30, 40], [5, 0, 10], x_name="tokens", unit="rows")
    assert [bar.text for bar in chart.bars] == [
        "10 to 19 tokens: 5 rows", "20 to 29 tokens: 0 rows", "30 to 39 tokens: 10 rows",
    ]  # fmt: skip
    assert chart.bars[2].height == pytest.approx(2 * chart.bars[0].height, abs=0.2) and chart.bars[1].height == 0


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
