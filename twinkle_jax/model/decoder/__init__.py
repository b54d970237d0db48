"""The architecture: configuration, parameters, layers, cache; pure functions over arrays."""
