"""Tests of what is found out about a run before it runs."""
