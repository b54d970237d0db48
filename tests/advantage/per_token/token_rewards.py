"""Rewards and values per token, some of them masked, for the estimators over time."""

import numpy as np

NAN, INF = float("nan"), float("inf")
ROWS, TIME = 5, 12
RNG = np.random.default_rng(0)
REWARDS, VALUES = RNG.normal(size=(2, ROWS, TIME)).astype(np.float32)
LAST = RNG.normal(size=ROWS).astype(np.float32)
KEEP = RNG.uniform(size=(ROWS, TIME)) < 0.7
KEEP[1], KEEP[2], KEEP[3, -5:] = False, True, False
