"""What happens before a run starts: its options, everything that is checked, the folder it may have, and forks."""
