"""The sandbox service: on a cluster, keeps a pod for each rollout whose policy writes code, and runs the code there."""
