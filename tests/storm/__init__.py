"""A storm of kills: a run's environment pods, generators and dataprep are killed at random, and every effect is counted.

`python -m tests.storm --kills 1000` from the root of the repository.
"""
