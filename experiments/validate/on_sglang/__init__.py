"""The proof table on the real sglang: its servers, the probe inside them, and its own functions."""
