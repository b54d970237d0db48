"""Twinkle's `utils`: what scripts ask about PyTorch."""
