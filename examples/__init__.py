"""Runs that show what the services do."""
