"""A run as manifests of Kubernetes: what was asked for, the pods, what holds them, the text."""
