"""The experience of a reader of only the README: their first run, and the mistakes on the way to it."""
