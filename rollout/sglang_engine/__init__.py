"""The real sglang server behind the engine protocol: its process, its HTTP, its weights."""
