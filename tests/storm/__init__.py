"""A storm of kills: environment pods, generators and dataprep of a run are killed at random, and every effect is counted.

`python -m tests.storm --kills 1000` from the root of the repository.
"""
