"""The machinery: one runner for every estimator, groups, moments, statistics, sharding."""
