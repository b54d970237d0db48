"""Twinkle's `TransformersModel`, and optimizers and schedules by the names it gives them."""
