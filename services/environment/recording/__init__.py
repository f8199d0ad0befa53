"""What became of each message: the exact tokens that the policy read and sampled, turn by turn."""
