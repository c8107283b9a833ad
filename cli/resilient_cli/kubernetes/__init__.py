"""Runs on Kubernetes: specification, manifests, and access to a cluster through kubectl."""
