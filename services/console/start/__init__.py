"""What happens before a run starts: its options, all checks, the folder that it uses, and forks."""
