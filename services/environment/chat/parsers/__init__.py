"""Tool calls in the notations of model families. Pure; whatever a model writes is calls, text or a `MalformedCall`."""
