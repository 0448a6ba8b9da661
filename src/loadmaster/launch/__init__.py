"""Starts the ranks of one host as real processes, and ends them, whatever happens."""
