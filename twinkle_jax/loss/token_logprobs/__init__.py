"""Log-probabilities of given tokens from hidden states: logits in tiles, tokens over devices."""
