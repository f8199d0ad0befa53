"""Processes for code that is not ours: confined, limited, and ended with everything that they have started."""
