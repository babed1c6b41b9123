"""How an agent sees an environment: prompts, tool syntax, parsing, and the token template."""
