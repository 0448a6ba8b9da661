"""Tests of `loadmaster.threads`: how many threads torch uses, where, and that it is put back."""
