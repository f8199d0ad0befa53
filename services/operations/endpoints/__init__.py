"""Endpoints that more than one kind of service has: dataprep or the trainer, and the web console."""
