"""Tests of the ``loadmaster`` command: real processes, their exit codes, and what they print."""
