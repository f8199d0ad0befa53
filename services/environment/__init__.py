"""Environments: rollouts of several turns, whose tokens generators sample (docs/environments.md)."""
