"""Score centering inside Miles, through its hooks and without a fork: see docs/miles.md.

Each module is one hook (`rollout`, `generate`, `conversion`, `trainer`, `loss`) or what they share (`arguments`,
`refusals`, `versions`, `samples`, `preflight`). Only the hooks import Miles.
"""
