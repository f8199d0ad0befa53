"""Does recorded steps again, with the ranks of the run on CPUs, and no Redis (docs/bundles.md)."""
