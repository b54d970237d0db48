"""What a person sees of a run, and the metrics that are written down."""
