"""vLLM as a rollout engine: its record, its server, and our plugin inside its processes."""
