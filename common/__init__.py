"""What both stages must agree on: the cache format, records, errors, configuration. No torch, no vLLM."""
