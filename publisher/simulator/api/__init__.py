"""What a simulated engine is asked and answers, API by API, in the shapes of vLLM."""
