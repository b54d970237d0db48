"""What both samplers share: prompts and parameters in, responses out."""
