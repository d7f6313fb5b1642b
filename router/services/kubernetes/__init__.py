"""Source of engines: pods of a Kubernetes cluster."""
