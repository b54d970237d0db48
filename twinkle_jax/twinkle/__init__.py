"""Twinkle's names: a script for Twinkle changes `twinkle` to `twinkle_jax.twinkle` in its imports.

Nothing here has logic of its own; it calls the functions of the other rooms, and they import
nothing from here.
"""
