"""The endpoint picker of the Gateway API Inference Extension: Envoy asks, kvatlas decides."""
