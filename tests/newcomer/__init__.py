"""What somebody meets who has read the README and nothing else: their first run, and the mistakes on the way to it."""
