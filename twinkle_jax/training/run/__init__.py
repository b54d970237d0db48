"""A whole run: how it begins, goes from step to step, is interrupted, and ends."""
