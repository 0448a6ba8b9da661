"""Tests of `loadmaster.observe`: what a load tells while it runs and when it is done."""
