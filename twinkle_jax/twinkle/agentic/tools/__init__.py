"""`twinkle_agentic.tools`."""
