"""Requests made up from the services' own OpenAPI documents, against real servers. `python -m tests.api_fuzz --minutes 10`."""
