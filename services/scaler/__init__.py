"""The scaler: on a cluster, keeps the requested number of generators and their Deployment's replicas in agreement."""
