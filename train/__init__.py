"""Stage two: a feature cache in, a drafter out. Runs without vLLM, datasets, tokenizer or network."""
