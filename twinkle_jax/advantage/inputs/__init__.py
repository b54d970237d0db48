"""What callers may pass, and what they are told when it does not fit."""
