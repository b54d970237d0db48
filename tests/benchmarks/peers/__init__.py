"""The same GRPO run by several libraries, each a program of its own that goes on step by step."""
