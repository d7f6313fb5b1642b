"""What a connector's two halves tell each other."""
