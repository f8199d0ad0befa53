"""The API of the cluster that a pod runs in, for the services that may call it."""
