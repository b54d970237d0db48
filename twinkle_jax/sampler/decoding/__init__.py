"""Rows that are completed: checked, laid out, advanced by a token, ended, replaced."""
