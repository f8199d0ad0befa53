"""TRL as a peer: its trainers on the example, and its losses."""
