"""Processes a configuration file before it becomes a `RunConfig`: where its keys are set, their faults, and derived defaults."""
