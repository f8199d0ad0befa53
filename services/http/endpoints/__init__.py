"""Endpoints that several kinds of service share: dataprep or the trainer, and the web console."""
