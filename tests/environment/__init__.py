"""Environments: conversations, exact tokens, the door."""
