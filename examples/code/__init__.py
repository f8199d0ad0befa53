"""A policy that learns to write code."""
