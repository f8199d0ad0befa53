"""The scaler: keeps a run's wish for generators and the size of their Deployment the same, on a cluster."""
