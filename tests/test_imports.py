"""Import rules as they hold when a module is loaded; the arrows between packages are import-linter's."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACT = ["errors", "sampling", "seeds", "records", "wire", "weights", "capability"]
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "ray", "transformers"}:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
"""


@pytest.mark.parametrize(
    "module",
    [*(f"miles_ext.{name}" for name in CONTRACT), "rollout.engine", "rollout.config", "trainer.config",
     "experiments.config"],
)  # fmt: skip
def test_the_contract_imports_where_there_is_no_torch(module):
    subprocess.run([sys.executable, "-c", f"{BLOCK}\nimport {module}"], cwd=ROOT, check=True)


def test_the_block_blocks():
    done = subprocess.run([sys.executable, "-c", f"{BLOCK}\nimport miles_ext.law"], cwd=ROOT, capture_output=True)
    assert done.returncode != 0 and b"torch is blocked" in done.stderr
