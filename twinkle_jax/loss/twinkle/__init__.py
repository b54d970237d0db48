"""Losses under Twinkle's names: objects that read a batch and compose the functions."""
