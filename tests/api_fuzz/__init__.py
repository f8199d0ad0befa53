"""Requests generated from the services' OpenAPI documents, sent to real servers: `python -m tests.api_fuzz --minutes 10`."""
