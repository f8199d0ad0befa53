"""What generators, environments, dataprep and the trainer share about a group: its tokens, its records and their check, its
statistics, advantages and weights. Pure."""
