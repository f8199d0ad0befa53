"""The experience of someone who has read only the README: their first run, and the mistakes on the way to it."""
