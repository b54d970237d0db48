"""Twinkle's names: in a script, `twinkle.X` becomes `twinkle_jax.twinkle.X` in the imports.

Nothing here has logic of its own; it calls the functions of the other rooms, and they import
nothing from here. Of Twinkle's modules there are `advantage`, `loss`, `reward`, `model`, `sampler`,
`data_format`, `template` and `metric`; data sets, loaders and processors are not there yet.
"""
