"""What becomes of a configuration file before it is a `RunConfig`: where its keys are set, their faults, and derived defaults."""
