"""When requests arrive: all at once, or with gamma-distributed gaps.

Pure. Burstiness 1 is a Poisson process; below it requests come in clusters, above it evenly, as in
`vllm bench serve`. Called by `serve.py`.
"""

import math

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the begin, the first at 0; a rate of infinity sends all at 0."""
    if math.isinf(rate):
        return [0.0] * count
    # A gamma variable has the mean shape * scale: 1 / rate for every shape.
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (rate * burstiness), count)
    gaps[0] = 0.0
    return [float(time) for time in np.cumsum(gaps)]
