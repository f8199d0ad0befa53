"""Requests generated from the services' OpenAPI documents, against real servers. `python -m tests.api_fuzz --minutes 10`."""
