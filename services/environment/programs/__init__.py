"""Programs of one's own, in worker processes: the environments' classes and functions."""
