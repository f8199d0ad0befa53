"""The trainer: DeepSpeed ranks that fetch their own rows, train, commit, checkpoint and send weights."""
