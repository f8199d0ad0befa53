"""Bundles: one step of a run with everything that is needed to do it again, in one file (docs/bundles.md)."""
