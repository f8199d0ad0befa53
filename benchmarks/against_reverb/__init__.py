"""Reverb as a peer of the replay table."""
