"""Custom programs in worker processes: the environments' classes and functions."""
