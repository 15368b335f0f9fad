"""SGLang as a rollout engine: its record, its server, our plugin inside its processes, and what the plugin observes."""
