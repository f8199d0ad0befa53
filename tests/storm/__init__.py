"""A storm of kills: environment pods, generators and dataprep of a run are killed at random turns, and everything is counted.

`python -m tests.storm --kills 1000` from the root of the repository.
"""
