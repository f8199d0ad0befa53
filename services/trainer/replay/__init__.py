"""Repeats recorded steps on CPUs, with as many ranks as the run and without Redis (docs/bundles.md)."""
