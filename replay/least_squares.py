"""Least squares with no coefficient below zero, and a robust form of it, without any library.

Pure functions over rows of numbers. Called by `step_time.py`.
"""

import math
import statistics
from collections.abc import Sequence

_NEGLIGIBLE = 1e-9
_ROUNDS = 8
"""Of weighing anew; by then the weights stand still."""
_TAIL = 2.0
"""Deviations behind which a point weighs less (Huber)."""
_TO_SIGMA = 1.4826
"""From the median deviation to the standard one, for normal errors."""

Row = Sequence[float]


def least_squares(
    rows: Sequence[Row], values: Sequence[float], weights: Sequence[float] | None = None
) -> list[float]:
    """Coefficients >= 0; a term that would be negative or says nothing new gets 0."""
    sums = _products(rows, values, weights or [1.0] * len(rows))
    used = [i for i, line in enumerate(sums) if line[i] > 0]
    while used:
        solved = _solve(sums, used)
        worst = min(used, key=lambda i: solved[i])
        if solved[worst] >= 0:
            return solved
        used.remove(worst)
    return [0.0] * len(sums)


def robust_least_squares(rows: Sequence[Row], values: Sequence[float]) -> list[float]:
    """The same for relative errors, in which single outliers and bad spells hardly weigh.

    `values` are above 0. Iteratively reweighted: a small value counts as much as a large one, and
    what lies far behind the median deviation counts less the farther it lies.
    """
    middle = statistics.median(values)
    solved = least_squares(rows, values, [1 / max(value, middle / 10) ** 2 for value in values])
    for _ in range(_ROUNDS):
        fitted = [sum(c * x for c, x in zip(solved, row, strict=True)) for row in rows]
        bases = [max(value, middle / 100) for value in fitted]
        errors = [
            (value - model) / base for value, model, base in zip(values, fitted, bases, strict=True)
        ]
        sigma = _TO_SIGMA * statistics.median(map(abs, errors)) or _NEGLIGIBLE
        weights = [
            min(1.0, _TAIL * sigma / max(abs(error), _NEGLIGIBLE)) / base**2
            for error, base in zip(errors, bases, strict=True)
        ]
        solved = least_squares(rows, values, weights)
    return solved


def _products(
    rows: Sequence[Row], values: Sequence[float], weights: Sequence[float]
) -> list[list[float]]:
    """The weighted normal equations of all terms, the right side last."""
    width = len(rows[0])
    sums = [[0.0] * (width + 1) for _ in range(width)]
    for row, value, weight in zip(rows, values, weights, strict=True):
        for i, left in enumerate(row):
            if left:
                weighted = left * weight
                line = sums[i]
                for j, right in enumerate(row):
                    line[j] += weighted * right
                line[width] += weighted * value
    return sums


def _solve(sums: Sequence[Sequence[float]], used: Sequence[int]) -> list[float]:
    """The normal equations of the used terms, by elimination on columns of equal length."""
    length = {i: math.sqrt(sums[i][i]) for i in used}
    matrix = [
        [sums[i][j] / (length[i] * length[j]) for j in used] + [sums[i][-1] / length[i]]
        for i in used
    ]
    pivots: list[int | None] = []
    for column in range(len(used)):
        free = [row for row in range(len(used)) if row not in pivots]
        pivot = max(free, key=lambda row: abs(matrix[row][column]))
        if abs(matrix[pivot][column]) < _NEGLIGIBLE:
            pivots.append(None)
            continue
        pivots.append(pivot)
        for row in range(len(used)):
            if row != pivot:
                factor = matrix[row][column] / matrix[pivot][column]
                matrix[row] = [
                    a - factor * b for a, b in zip(matrix[row], matrix[pivot], strict=True)
                ]
    solved = [0.0] * len(sums)
    for column, i in enumerate(used):
        found = pivots[column]
        if found is not None:
            solved[i] = matrix[found][-1] / matrix[found][column] / length[i]
    return solved
