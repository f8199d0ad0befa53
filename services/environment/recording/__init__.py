"""Records the tokens of each message: exactly those that the policy read and sampled, turn by turn."""
