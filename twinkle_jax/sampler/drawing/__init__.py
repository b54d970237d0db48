"""One token of each row: temperature, filters, and a draw with one uniform number."""
