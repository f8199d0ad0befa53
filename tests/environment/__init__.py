"""Tests of environments: conversations, exact tokens, and the door."""
