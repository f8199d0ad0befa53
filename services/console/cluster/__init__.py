"""Commands for a release on a cluster: `--kube-context`."""
