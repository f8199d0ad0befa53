"""Bundles: one step of a run with everything that is needed to repeat it, in one file (docs/bundles.md)."""
