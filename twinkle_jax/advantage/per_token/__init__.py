"""One advantage for each token: estimators over time, and the way from completions to tokens."""
