"""Where engines come from: lists, files, DNS, Kubernetes."""
