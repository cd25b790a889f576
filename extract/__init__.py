"""Stage one: a chat dataset in, a feature cache out. The only folder that knows vLLM."""
