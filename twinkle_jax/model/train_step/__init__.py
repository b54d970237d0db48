"""Train state, gradient, update, and the scoring of given tokens."""
