"""An HTTP front, in sglang's dialect, for one engine: `python -m rollout.server --target DIR --port N`."""
