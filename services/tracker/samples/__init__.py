"""Writes the sample log (docs/samples.md)."""
