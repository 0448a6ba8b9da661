"""A terminal to look at."""
