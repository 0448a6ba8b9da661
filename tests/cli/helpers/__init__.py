"""Runs the command, and a hook that makes something happen while a rank reads."""
