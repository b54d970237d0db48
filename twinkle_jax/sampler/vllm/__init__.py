"""Sampling from a vLLM server that someone runs."""
