"""The contents of a run, as answers for people: for `grpo inspect`, which reads Redis directly, and for dataprep's endpoints.

Guarantees: inspecting changes nothing; a page has at most `MAX_PAGE` entries; anything missing raises `NotFound` with the reason.
"""
