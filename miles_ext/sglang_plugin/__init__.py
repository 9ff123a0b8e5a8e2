"""The sglang 0.5.23 plugin: one sampling law in every arm, flat capture, target-only weight updates, and the proof.

Entry point group `sglang.srt.plugins`, name `miles_sc`. `hooks.py` lists everything it touches.
"""

PLUGIN_VERSION = "1"
SGLANG_VERSION = "0.5.23"
