"""Checkpoints and adapters in Hugging Face's formats, in and out."""
