"""What a run is asked to do: its settings, and what they name."""
