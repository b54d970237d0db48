"""What a loss is called with, read into arrays: labels, values per sequence or token, names."""
