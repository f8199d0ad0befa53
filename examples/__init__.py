"""Runs that demonstrate what the services do."""
