"""Tests of `loadmaster.launch`: real ranks, real signals."""
