"""Tool calls in the notations of model families. Pure; any text of a model becomes calls, text or a `MalformedCall`."""
