"""Environments of the library verifiers, unchanged: the classic API of version 0.3, and the v1 API of 0.3 and 0.4."""
