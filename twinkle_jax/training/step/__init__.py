"""One step of training, in parts: completions, rewards, advantages, updates, an evaluation."""
